"""Save and load checkpoints: safetensors and JSON, complete or not there at all; and files with their own checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tokenv.core import trust
from tokenv.core.atomic import remove_folder, remove_partial_files, replacing_file, replacing_folder, write_atomically
from tokenv.core.errors import UserError
from tokenv.core.run_folders import (
    PREFIX,
    STATE,
    DamagedError,
    best_checkpoint,
    list_complete,
    load_state,
    verify,
    write_digests,
)
from tokenv.core.run_folders import find as find
from tokenv.core.trust import UnreadableFileError, check_regular

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
MAX_PARAMETER = 1e9  # magnitude: far above trained values, far below an overflow in a product
PRECISIONS = (torch.float32, torch.float64)  # of parameters: hardware.precision may change when a run is resumed
MAX_DIMENSIONS = 64  # of a tensor with which torch computes
OWNER, DIGEST = "of", "sha256"
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
        _save_tensors(checkpoint.tensors, partial / MODEL)
        _save_tensors(checkpoint.optimizer, partial / OPTIMIZER)
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
    return Checkpoint(tensors, _load_tensors(path / OPTIMIZER), state, path)


def load_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load the parameters and the state, without the optimiser's; see ``load``."""
    state, tensors = load_state(path), _load_tensors(path / MODEL)
    for name, tensor in tensors.items():
        if tensor.ndim > MAX_DIMENSIONS:
            raise DamagedError(path / MODEL, f"{name} has {tensor.ndim} dimensions, expected {MAX_DIMENSIONS} at most")
        if not tensor.is_floating_point():
            continue
        # A scalar may be infinite: it is a threshold which is not set yet.
        valid = ~tensor.isnan() if tensor.ndim == 0 else tensor.abs() < MAX_PARAMETER
        if not valid.all():
            raise DamagedError(path / MODEL, f"{name} holds {tensor[~valid][0]:g}, expected finite numbers below 1e9")
    return tensors, state


def check_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], origin: object) -> None:
    """Raise an error unless loaded tensors fit a model.

    Args:
        actual: loaded tensors by name.
        expected: tensors of the right shapes and types by name.
        origin: file from which they were loaded, for the message.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape or type; the message names it.
    """
    for name in mismatched_tensors(actual, expected):
        loaded = _describe(actual[name]) if name in actual else "none"
        right = _describe(expected[name]) if name in expected else "no tensor of this name"
        raise UserError(
            f"{origin}: {name}: found {loaded}, expected {right}: the file is not of the run whose configuration "
            "stands beside it"
        )


def mismatched_tensors(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Return names of tensors which are missing, unexpected, or of another shape or type; see ``check_tensors``."""
    matching = {name for name in actual.keys() & expected.keys() if _fits(name, actual[name], expected[name])}
    return sorted((actual.keys() | expected.keys()) - matching)


def _fits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.dtype != expected.dtype and not {actual.dtype, expected.dtype} <= set(PRECISIONS):
        return False
    # A module's extra state (torch's get_extra_state) may have any length.
    return actual.shape == expected.shape or (name.endswith("_extra_state") and actual.ndim == expected.ndim)


def check_optimizer(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, Mapping[str, torch.Tensor]], origin: object
) -> None:
    """Raise an error unless loaded tensors fit an optimiser; see ``check_tensors``.

    A parameter which never had a gradient has no state; any other has all the fields of ``expected[name]``.
    """
    parameters = {name.rpartition("/")[0] for name in actual} & expected.keys()
    fields = {f"{name}/{field}": like for name in parameters for field, like in expected[name].items()}
    check_tensors(actual, fields, origin)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Return the optimiser's state by parameter name: ``lm.head.weight/exp_avg`` and so on."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], tensors: dict[str, torch.Tensor]
) -> None:
    """Load tensors of ``optimizer_tensors`` which ``check_optimizer`` has accepted."""
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition("/")
        parameter = parameters[owner]
        on_device = tensor if key == "step" else tensor.to(parameter.device, parameter.dtype)
        optimizer.state[parameter][key] = on_device


def _delete_old(folder: Path, keep: int) -> None:
    checkpoints = list_complete(folder)
    best = best_checkpoint(checkpoints, skip_damaged=True)
    for path in checkpoints[:-keep]:
        if path != best:
            remove_folder(path)


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    verify(path.parent, [path.name])
    try:
        check_regular(path)
        return load_file(path)
    except UnreadableFileError as error:
        raise DamagedError(error.path, error.reason) from None
    except SafetensorError as error:
        raise DamagedError(path, f"damaged, no safetensors: {error}") from None


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def write_json(path: Path, values: Mapping[str, Any], owner: Any, *, indent: int | None = None) -> None:
    """Write values which ``read_json`` can verify, complete or not at all.

    Args:
        path: path in an existing folder.
        values: values by name, which is neither ``of`` nor ``sha256``.
        owner: JSON-serialisable description of what the values belong to.
        indent: see ``json.dumps``.
    """
    owned = dict(values) | {OWNER: fingerprint(owner)}
    write_atomically(path, json.dumps(owned | {DIGEST: fingerprint(owned)}, indent=indent))


def read_json(path: Path, owner: Any, *, require_digest: bool = False) -> dict[str, Any]:
    """Read and verify a file of ``write_json``.

    Args:
        path: path of the file.
        owner: description of what the values must belong to.
        require_digest: whether to reject a file without a digest, such as one of an earlier version.

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
    if stored is not None or require_digest:
        _check(stored, fingerprint(values), values.get(OWNER), owner, path)
    return {name: value for name, value in values.items() if name != OWNER}


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, owner: Any) -> None:
    """Write tensors which ``load_tensors`` can verify, complete or not at all.

    Args:
        tensors: tensors by name.
        path: path in an existing folder.
        owner: JSON-serialisable description of what the tensors belong to.
    """
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {OWNER: fingerprint(owner), DIGEST: _digest(on_cpu, fingerprint(owner))}
    with replacing_file(path) as scratch:
        save_file(on_cpu, scratch, metadata=metadata)


def load_tensors(path: Path, owner: Any) -> dict[str, torch.Tensor]:
    """Load and verify tensors of ``save_tensors`` onto the CPU; a file of an earlier version has no digest and passes.

    Raises:
        UserError: it is not what was written, or belongs to another owner.
    """
    try:
        trust.check_regular(path)
        with safe_open(path, "pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, trust.UnreadableFileError) as error:
        raise UserError(f"{path} is damaged, no safetensors: {error}: {_ADVICE}") from None
    if DIGEST in metadata:
        digest = _digest(tensors, metadata.get(OWNER, ""))
        _check(metadata[DIGEST], digest, metadata.get(OWNER), owner, path)
    return tensors


def fingerprint(values: Any) -> str:
    """Return a digest of JSON-serialisable values which does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def _digest(tensors: Mapping[str, torch.Tensor], owner: str) -> str:
    digest = hashlib.sha256(owner.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _check(stored: Any, actual: str, stored_owner: Any, owner: Any, path: Path) -> None:
    if stored != actual:
        raise UserError(f"{path} is damaged: its SHA-256 is {actual}, expected {stored!r}: {_ADVICE}")
    if stored_owner != fingerprint(owner):
        raise UserError(f"{path}: of another run, or measured with other options: {_ADVICE}")
