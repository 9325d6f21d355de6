"""Checkpoints: safetensors and JSON, complete or not there at all."""

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
from tokenv.storage.checksums import PREFIX, DamagedError, verify, write_digests
from tokenv.storage.regular_files import UnreadableFileError, check_regular
from tokenv.storage.run_folders import STATE, best_checkpoint, find, list_complete, load_state

__all__ = [
    "MODEL",
    "OPTIMIZER",
    "STATE",
    "Checkpoint",
    "DamagedError",
    "check_optimizer",
    "check_tensors",
    "find",
    "list_complete",
    "load",
    "load_model",
    "load_optimizer",
    "load_state",
    "odd_tensors",
    "optimizer_tensors",
    "save",
    "verify",
]
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
LARGEST = 1e9  # magnitude of a parameter: far above what training gives, far below what overflows in a product
WIDTHS = (torch.float32, torch.float64)  # of parameters: hardware.precision may change when a run is resumed


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Attributes:
        tensors: parameters and buffers, by ``lm.``, ``agent.`` or ``estimator.`` name.
        optimizer: the optimiser's moments, by ``parameter name/field``.
        state: everything else, as JSON: configuration, counters, data position, metrics so far.
        path: where it was read; None for one that was not yet saved.
    """

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]
    path: Path | None = None


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then drop old ones.

    It is written under another name and renamed when complete, so a kill at any moment leaves the last good one.

    Args:
        folder: of all checkpoints of the run.
        checkpoint: with ``step``, ``unit`` (``bits_per_byte`` where there is none) and, under the unit's name, the
            validation loss (None where there was no validation) in its state.
        keep: newest ones to keep; the best one by validation loss stays besides.
    """
    remove_partial_files(folder)
    final = folder / f"{PREFIX}{checkpoint.state['step']:08d}"
    with replacing_folder(final) as partial:
        _save_tensors(checkpoint.tensors, partial / MODEL)
        _save_tensors(checkpoint.optimizer, partial / OPTIMIZER)
        (partial / "state.json").write_text(json.dumps(checkpoint.state))
        write_digests(partial)
    _drop_old(folder, keep)
    return final


def load(path: Path) -> Checkpoint:
    """Read what ``save`` wrote, onto the CPU.

    Raises:
        DamagedError: a file is not what was saved.
        UserError: the configuration names code that the user has not named: see ``tokenv.storage.trust``.
    """
    tensors, state = load_model(path)
    return Checkpoint(tensors, _load_tensors(path / OPTIMIZER), state, path)


def load_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Only the parameters and the state, for those who do not train on; see ``load``."""
    state, tensors = load_state(path), _load_tensors(path / MODEL)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            continue
        # A single number may be infinite: it is a threshold that nothing has yet set.
        usual = ~tensor.isnan() if tensor.ndim == 0 else tensor.abs() < LARGEST
        if not usual.all():
            raise DamagedError(path / MODEL, f"{name} holds {tensor[~usual][0]:g}, expected finite numbers below 1e9")
    return tensors, state


def check_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], whence: object) -> None:
    """Refuse tensors that are not those of a model.

    Args:
        found: by name, as they were read.
        wanted: by name, tensors of the right shapes and types.
        whence: the file they were read from, for the message.

    Raises:
        UserError: one is missing, too many, or of another shape or type; the message names it.
    """
    for name in odd_tensors(found, wanted):
        there = _told(found[name]) if name in found else "none"
        expected = _told(wanted[name]) if name in wanted else "no tensor of this name"
        raise UserError(
            f"{whence}: {name}: found {there}, expected {expected}: the file is not of the run whose configuration "
            "stands beside it"
        )


def odd_tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are missing, too many, or of another shape or type; see ``check_tensors``."""
    list_all, both = found.keys() | wanted.keys(), found.keys() & wanted.keys()
    return sorted(name for name in list_all if name not in both or not _alike(name, found[name], wanted[name]))


def _alike(name: str, found: torch.Tensor, wanted: torch.Tensor) -> bool:
    same_type = found.dtype == wanted.dtype or (found.dtype in WIDTHS and wanted.dtype in WIDTHS)
    # What a module keeps beside its tensors (torch's get_extra_state) may have any length.
    return same_type and (found.shape == wanted.shape or (name.endswith("_extra_state") and found.ndim == wanted.ndim))


def check_optimizer(
    found: Mapping[str, torch.Tensor], kept: Mapping[str, Mapping[str, torch.Tensor]], whence: object
) -> None:
    """Refuse tensors that are not what an optimiser keeps; see ``check_tensors``.

    A parameter that never had a gradient has none of ``kept``, which is by name and field; any other has all.
    """
    owners = {name.rpartition("/")[0] for name in found} & kept.keys()
    wanted = {f"{owner}/{key}": like for owner in owners for key, like in kept[owner].items()}
    check_tensors(found, wanted, whence)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The optimiser's state by parameter name: ``lm.head.weight/exp_avg`` and so on."""
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: dict[str, torch.nn.Parameter], tensors: dict[str, torch.Tensor]
) -> None:
    """Put back what ``optimizer_tensors`` gave, and ``check_optimizer`` has let pass."""
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition("/")
        parameter = parameters[owner]
        on_device = tensor if key == "step" else tensor.to(parameter.device, parameter.dtype)
        optimizer.state[parameter][key] = on_device


def _drop_old(folder: Path, keep: int) -> None:
    found = list_complete(folder)
    lowest = best_checkpoint(found, pass_over_damaged=True)
    for path in found[:-keep]:
        if path != lowest:
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


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
