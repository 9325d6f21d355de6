"""Save a run and its tensors as a checkpoint, and restore them."""

from __future__ import annotations

from pathlib import Path

import torch

from tokenv.config.components import Components
from tokenv.config.schema import TrainConfig
from tokenv.core.distributed import gather_full_tensors
from tokenv.core.errors import UserError
from tokenv.data.stream import Streams
from tokenv.evaluation.run_state import RunState
from tokenv.storage import checkpoints
from tokenv.training.update import expected_optimizer_state


def make_checkpoint(
    state: RunState, components: Components, optimizer: torch.optim.Optimizer
) -> checkpoints.Checkpoint:
    """Return all that is needed to resume a run from here; every rank must call it together."""
    moments = checkpoints.optimizer_tensors(optimizer, components.named_parameters())
    return checkpoints.Checkpoint(
        gather_full_tensors(components.state_dict()), gather_full_tensors(moments), state.as_dict()
    )


def restore(
    checkpoint: checkpoints.Checkpoint,
    config: TrainConfig,
    components: Components,
    optimizer: torch.optim.Optimizer,
    streams: Streams,
) -> RunState:
    """Put model, optimiser and streams, which are of ``config``, where they were at ``checkpoint``.

    Raises:
        UserError: it is of another model or other data.
    """
    state = check_checkpoint(checkpoint, config, components)
    components.load_state_dict(checkpoint.tensors)
    checkpoints.load_optimizer(optimizer, components.named_parameters(), checkpoint.optimizer)
    try:
        streams.load_state_dict(state.data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{checkpoint.path}: data = {state.data!r}: no place in the training data") from error
    return state


def check_checkpoint(checkpoint: checkpoints.Checkpoint, config: TrainConfig, components: Components) -> RunState:
    """Refuse a checkpoint that is not of this model; its state.

    Args:
        checkpoint: as it was read.
        config: who learns.
        components: the model, on any device, the meta device too.

    Raises:
        UserError: a tensor is missing, too many, or of another shape or type, or the state is none.
    """
    state, path = RunState.from_dict(checkpoint.state, checkpoint.path), checkpoint.path or Path()
    checkpoints.check_tensors(checkpoint.tensors, components.state_dict(), path / checkpoints.MODEL)
    kept = expected_optimizer_state(config, components.named_parameters())
    checkpoints.check_optimizer(checkpoint.optimizer, kept, path / checkpoints.OPTIMIZER)
    return state


def latest_checkpoint(folder: Path) -> str:
    """Return a sentence which names the newest complete checkpoint."""
    found = checkpoints.list_complete(folder)
    return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
