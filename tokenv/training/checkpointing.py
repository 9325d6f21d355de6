"""Save a run and its tensors as a checkpoint, and restore them."""

from pathlib import Path

import torch

from tokenv.config.components import Components
from tokenv.config.schema import TrainConfig
from tokenv.core import checkpoints
from tokenv.core.distributed import gather_full_tensors
from tokenv.core.errors import UserError
from tokenv.data.stream import Streams
from tokenv.evaluation.run_state import RunState
from tokenv.training.optimizers import expected_optimizer_state


def make_checkpoint(
    state: RunState, components: Components, optimizer: torch.optim.Optimizer
) -> checkpoints.Checkpoint:
    """Return all that is needed to resume a run from here; every rank must call this together."""
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
    """Load a checkpoint into model, optimizer and streams, which were built from ``config``; return the run's state.

    Raises:
        UserError: the checkpoint belongs to another model or other data.
    """
    state = check_checkpoint(checkpoint, config, components)
    components.load_state_dict(checkpoint.tensors)
    checkpoints.load_optimizer(optimizer, components.named_parameters(), checkpoint.optimizer)
    try:
        streams.load_state_dict(state.data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"{checkpoint.path}: data = {state.data!r} is no position in the training data: expected the state of its "
            "streams: resume from another checkpoint"
        ) from error
    return state


def check_checkpoint(
    checkpoint: checkpoints.Checkpoint, config: TrainConfig, components: Components
) -> RunState:
    """Check that a checkpoint belongs to a model, and return its state.

    Args:
        checkpoint: checkpoint as read from disk.
        config: optimizer of the run.
        components: model on any device, including the meta device.

    Raises:
        UserError: a tensor is missing, unexpected, or of another shape or type, or the state cannot be read.
    """
    state = RunState.from_dict(checkpoint.state, checkpoint.path)
    path = checkpoint.path or Path()
    checkpoints.check_tensors(checkpoint.tensors, components.state_dict(), path / checkpoints.MODEL)
    expected = expected_optimizer_state(config, components.named_parameters())
    checkpoints.check_optimizer(checkpoint.optimizer, expected, path / checkpoints.OPTIMIZER)
    return state


def latest_checkpoint(folder: Path) -> str:
    """Return a sentence which names the newest complete checkpoint."""
    found = checkpoints.list_complete(folder)
    return f"the last good checkpoint is {found[-1]}" if found else "there is no checkpoint yet"
