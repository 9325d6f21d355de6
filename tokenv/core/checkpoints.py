"""Save and load checkpoints: safetensors and JSON, complete or not there at all; and files with their own checksum."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tokenv.core import trust
from tokenv.core.atomic import (
    remove_folder,
    remove_partial_files,
    replacing_file,
    replacing_folder,
    write_atomically,
)
from tokenv.core.errors import UserError
from tokenv.core.run_folders import (
    PREFIX,
    STATE,
    DamagedError,
    best_checkpoint,
    file_digest,
    list_complete,
    load_state,
    verify,
    write_digests,
)
from tokenv.core.run_folders import find as find

MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
MAX_PARAMETER = 1e9  # magnitude: far above trained values, far below an overflow in a product
# of parameters: hardware.precision may change when a run is resumed
PRECISIONS = (torch.float32, torch.float64)
MAX_DIMENSIONS = 64  # of a tensor with which torch computes
OWNER = "of"
DIGEST = "sha256"
_ADVICE = "delete it, and what it held is measured again"


@dataclass(frozen=True)
class Checkpoint:
    """State from which a run resumes exactly.

    Attributes:
        tensors: parameters and buffers, by ``lm.``, ``agent.`` or ``estimator.`` name.
        optimizer: state tensors of the optimiser, by ``parameter name/field``.
        state: other state, as JSON: configuration, counters, data position, metrics so far.
        path: folder from which it was loaded; None if it was not yet saved.
    """

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]
    path: Path | None = None


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then delete old ones.

    It is written under another name and renamed when complete, so a kill at any moment leaves the last good one.

    Args:
        folder: folder of the run's checkpoints.
        checkpoint: checkpoint whose state has ``step``, ``unit`` (default ``bits_per_byte``) and, under the unit's
            name, the validation loss (None without validation).
        keep: number of newest checkpoints to keep, in addition to the best one by validation loss.
    """
    remove_partial_files(folder)
    final = folder / f"{PREFIX}{checkpoint.state['step']:08d}"
    with replacing_folder(final) as partial:
        save_tensors(checkpoint.tensors, partial / MODEL)
        save_tensors(checkpoint.optimizer, partial / OPTIMIZER)
        (partial / STATE).write_text(json.dumps(checkpoint.state))
        write_digests(partial)
    _delete_old(folder, keep)
    return final


def load(path: Path) -> Checkpoint:
    """Load a checkpoint onto the CPU.

    Raises:
        DamagedError: a file is not what was saved.
        UserError: the configuration names code which the user has not allowed: see ``tokenv.core.trust``.
    """
    tensors, state = load_model(path)
    verify(path, [OPTIMIZER])
    optimizer = load_tensors(path / OPTIMIZER)
    return Checkpoint(tensors, optimizer, state, path)


def load_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load the parameters and the state, without the optimiser's; see ``load``."""
    state = load_state(path)
    verify(path, [MODEL])
    tensors = load_tensors(path / MODEL)
    for name, tensor in tensors.items():
        if tensor.ndim > MAX_DIMENSIONS:
            raise DamagedError(
                path / MODEL,
                f"{name} has {tensor.ndim} dimensions, expected {MAX_DIMENSIONS} at most",
            )
        if not tensor.is_floating_point():
            continue
        valid = tensor.abs() < MAX_PARAMETER
        if tensor.ndim == 0:  # which may be infinite: a threshold which is not set yet
            valid = ~tensor.isnan()
        if not valid.all():
            raise DamagedError(
                path / MODEL,
                f"{name} holds {tensor[~valid][0]:g}, expected finite numbers below 1e9",
            )
    return tensors, state


def check_tensors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], origin: object
) -> None:
    """Raise an error unless loaded tensors fit a model.

    Args:
        actual: loaded tensors by name.
        expected: tensors of the right shapes and types by name.
        origin: file from which they were loaded, for the message.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape or type; the message names it.
    """
    for name in mismatched_tensors(actual, expected):
        loaded = describe(actual.get(name), "none")
        right = describe(expected.get(name), "no tensor of this name")
        raise UserError(
            f"{origin}: {name}: found {loaded}, expected {right}: the file is not of the run whose configuration "
            "stands beside it"
        )


def mismatched_tensors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return names of tensors which are missing, unexpected, or of another shape or type; see ``check_tensors``."""
    common = actual.keys() & expected.keys()
    matching = {name for name in common if _fits(name, actual[name], expected[name])}
    return sorted((actual.keys() | expected.keys()) - matching)


def _fits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    types = {actual.dtype, expected.dtype}
    if len(types) > 1 and not types <= set(PRECISIONS):
        return False
    # A module's extra state (torch's get_extra_state) may have any length.
    return actual.shape == expected.shape or (
        name.endswith("_extra_state") and actual.ndim == expected.ndim
    )


def check_optimizer(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, Mapping[str, torch.Tensor]],
    origin: object,
) -> None:
    """Raise an error unless loaded tensors fit an optimiser; see ``check_tensors``.

    A parameter which never had a gradient has no state; any other has all the fields of ``expected[name]``.
    """
    parameters = {name.rpartition("/")[0] for name in actual} & expected.keys()
    fields = {}
    for name in parameters:
        for field, like in expected[name].items():
            fields[f"{name}/{field}"] = like
    check_tensors(actual, fields, origin)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the optimiser's state by parameter name: ``lm.head.weight/exp_avg`` and so on."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}/{key}"] = value
    return tensors


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, torch.nn.Parameter],
    tensors: dict[str, torch.Tensor],
) -> None:
    """Load tensors of ``optimizer_tensors`` which ``check_optimizer`` has accepted."""
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition("/")
        parameter = parameters[owner]
        dtype = parameter.dtype
        if key == "step":  # a count, which fused optimizers read on the parameter's device
            dtype = tensor.dtype
        optimizer.state[parameter][key] = tensor.to(parameter.device, dtype)


def _delete_old(folder: Path, keep: int) -> None:
    checkpoints = list_complete(folder)
    best = best_checkpoint(checkpoints, skip_damaged=True)
    for path in checkpoints[:-keep]:
        if path != best:
            remove_folder(path)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write tensors by name, complete or not at all, from any device."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing_file(path) as scratch:
        save_file(on_cpu, scratch, metadata={"format": "pt"})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Load tensors of ``save_tensors`` onto the CPU.

    Raises:
        DamagedError: the file holds no tensors.
    """
    try:
        trust.open_regular(path).close()  # safetensors would wait for a named pipe
        return load_file(path)
    except trust.UnreadableFileError as error:
        raise DamagedError(error.path, error.reason) from None
    except SafetensorError as error:
        raise DamagedError(path, f"damaged, no safetensors: {error}") from None


def describe(tensor: torch.Tensor | None, missing: str) -> str:
    """Return the type and the shape of a tensor in words; ``missing`` for None."""
    if tensor is None:
        return missing
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)}"


def write_json(
    path: Path, values: Mapping[str, Any], owner: Any, *, indent: int | None = None
) -> None:
    """Write values which ``read_json`` can verify, complete or not at all.

    Args:
        path: path in an existing folder.
        values: values by name, which is neither ``of`` nor ``sha256``.
        owner: JSON-serialisable description of what the values belong to.
        indent: see ``json.dumps``.
    """
    owned = dict(values) | {OWNER: fingerprint(owner)}
    owned[DIGEST] = fingerprint(owned)
    write_atomically(path, json.dumps(owned, indent=indent))


def read_json(path: Path, owner: Any) -> dict[str, Any]:
    """Read and verify a file of ``write_json``.

    Args:
        path: path of the file.
        owner: description of what the values must belong to.

    Raises:
        OSError: the file cannot be read.
        UserError: it is not what was written, or belongs to another owner.
    """
    try:
        values = trust.read_json(path)
    except trust.UnreadableFileError as error:
        raise UserError(f"{error}: {_ADVICE}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} is damaged: expected a JSON mapping: {_ADVICE}")
    stored = values.pop(DIGEST, None)
    actual = fingerprint(values)
    if stored != actual:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {actual}, expected {stored!r}: {_ADVICE}"
        )
    if values.pop(OWNER, None) != fingerprint(owner):
        raise UserError(f"{path}: of another run, or measured with other options: {_ADVICE}")
    return values


def save_measured_tensors(tensors: Mapping[str, torch.Tensor], path: Path, owner: Any) -> None:
    """Write tensors which were measured, and beside them their digest; see ``load_measured_tensors``.

    Args:
        tensors: tensors by name.
        path: path in an existing folder.
        owner: JSON-serialisable description of what the tensors belong to.
    """
    save_tensors(tensors, path)
    write_json(_digest_file(path), {path.name: file_digest(path)}, owner)


def load_measured_tensors(path: Path, owner: Any) -> dict[str, torch.Tensor] | None:
    """Load and verify tensors of ``save_measured_tensors`` onto the CPU; None if they have not been written.

    Raises:
        UserError: they are not what was written, or belong to another owner.
    """
    if not _digest_file(path).exists():
        return None
    expected = read_json(_digest_file(path), owner).get(path.name)
    try:
        actual = file_digest(path)
    except (OSError, trust.UnreadableFileError) as error:
        raise UserError(f"{path} is damaged: {error}: {_ADVICE}") from None
    if actual != expected:
        raise UserError(
            f"{path} is damaged: its SHA-256 is {actual}, expected {expected!r}: {_ADVICE}"
        )
    return load_tensors(path)


def _digest_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def fingerprint(values: Any) -> str:
    """Return a digest of JSON-serialisable values which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()
