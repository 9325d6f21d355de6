"""Checkpoints: safetensors and JSON, complete or not there at all."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tokenv.storage.atomic import remove_folder, replacing_folder, sweep
from tokenv.storage.folders import PREFIX, best, complete, find, load_state

__all__ = [
    "Checkpoint",
    "complete",
    "find",
    "load",
    "load_model",
    "load_optimizer",
    "load_state",
    "optimizer_tensors",
    "save",
]


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Attributes:
        tensors: parameters and buffers, by ``lm.``, ``agent.`` or ``estimator.`` name.
        optimizer: AdamW's moments, by ``parameter name/field``.
        state: everything else, as JSON: configuration, counters, data position, metrics so far.
    """

    tensors: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint, then drop old ones.

    It is written under another name and renamed when complete, so a kill at any moment leaves the last good one.

    Args:
        folder: of all checkpoints of the run.
        checkpoint: with ``step``, ``unit`` (``bits_per_byte`` where there is none) and, under the unit's name, the
            validation loss (None where there was no validation) in its state.
        keep: newest ones to keep; the best one by validation loss stays besides.
    """
    sweep(folder)
    final = folder / f"{PREFIX}{checkpoint.state['step']:08d}"
    with replacing_folder(final) as partial:
        _save_tensors(checkpoint.tensors, partial / "model.safetensors")
        _save_tensors(checkpoint.optimizer, partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(checkpoint.state))
    _drop_old(folder, keep)
    return final


def load(path: Path) -> Checkpoint:
    """Read what ``save`` wrote, onto the CPU."""
    return Checkpoint(
        load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"), load_state(path)
    )


def load_model(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Only the parameters and the state, for those who do not train on."""
    return load_file(path / "model.safetensors"), load_state(path)


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
    """Put back what ``optimizer_tensors`` gave."""
    for name, tensor in tensors.items():
        owner, _, key = name.rpartition("/")
        parameter = parameters[owner]
        on_device = tensor if key == "step" else tensor.to(parameter.device)
        optimizer.state[parameter][key] = on_device


def _drop_old(folder: Path, keep: int) -> None:
    found = complete(folder)
    lowest = best(found)
    for path in found[:-keep]:
        if path != lowest:
            remove_folder(path)


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
