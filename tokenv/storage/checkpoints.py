"""Save and load checkpoints: safetensors and JSON, complete or not there at all."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tokenv.core.errors import UserError
from tokenv.storage.atomic import remove_folder, remove_partial_files, replacing_folder
from tokenv.storage.run_folders import (
    PREFIX,
    STATE,
    DamagedError,
    best_checkpoint,
    list_complete,
    load_state,
    verify,
    write_digests,
)
from tokenv.storage.run_folders import find as find
from tokenv.storage.trust import UnreadableFileError, check_regular

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
MAX_PARAMETER = 1e9  # magnitude: far above trained values, far below an overflow in a product
PRECISIONS = (torch.float32, torch.float64)  # of parameters: hardware.precision may change when a run is resumed


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
        UserError: the configuration names code which the user has not allowed: see ``tokenv.storage.trust``.
    """
    tensors, state = load_model(path)
    return Checkpoint(tensors, _load_tensors(path / OPTIMIZER), state, path)


def load_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Load the parameters and the state, without the optimiser's; see ``load``."""
    state, tensors = load_state(path), _load_tensors(path / MODEL)
    for name, tensor in tensors.items():
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
