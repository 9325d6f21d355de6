"""Looking at a trained model: load a run, segment a text."""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tokenv import keys
from tokenv.config.schema import Config
from tokenv.errors import UserError
from tokenv.report.characters import plain
from tokenv.run.evaluate import evaluating
from tokenv.run.parts import Parts, build_parts
from tokenv.run.state import RunState
from tokenv.storage import checkpoints


@dataclass(frozen=True)
class Trained:
    """A model as a run left it.

    Attributes:
        parts: model and agent, in evaluation mode.
        config: of the run.
        path: the checkpoint.
        step: updates done.
    """

    parts: Parts
    config: Config
    path: Path
    step: int


@dataclass(frozen=True)
class Segmented:
    """A text of N bytes with its token boundaries.

    Attributes:
        text: its bytes.
        probability_N: of a boundary after each byte, in [0, 1].
        boundary_N: whether one was drawn there.
    """

    text: bytes
    probability_N: list[float]
    boundary_N: list[bool]


def load_run(run: str, which: str = "best", *, fall_back: bool = True) -> Trained:
    """Load a run's model.

    Args:
        run: run folder, such as ``runs/7``.
        which: ``best`` by validation loss, or ``latest``.
        fall_back: if that checkpoint is damaged, take the newest one that is sound, and say so in a line on stderr; a
            checkpoint that ``run`` itself names is never replaced.

    Raises:
        DamagedError: a checkpoint is damaged, and no other one may take its place.
        MissingFileError: there is no such run, or it has no checkpoint.
        UserError: the run names code that the user has not named (``tokenv.storage.trust`` lets it), or the checkpoint
            holds another model than its configuration says.
    """
    try:
        return _load(checkpoints.find(run, which))
    except checkpoints.DamagedError as error:
        if not fall_back or error.sound is None or (Path(run) / checkpoints.STATE).is_file():
            raise
        print(plain(f"tokenv: warning: {error.what}; this goes on with {error.sound}"), file=sys.stderr)
        return _load(error.sound)


def _load(path: Path) -> Trained:
    tensors, stored = checkpoints.load_model(path)
    state = RunState.from_dict(stored, path)
    config = state.settings
    parts = build_parts(config, pretrained=False)
    checkpoints.check_tensors(tensors, parts.state_dict(), path / checkpoints.MODEL)
    parts.load_state_dict(tensors)
    parts.train(False)
    return Trained(parts, config, path, state.step)


def segment(trained: Trained, text: bytes, *, seed: int = 0, threshold: bool = False) -> Segmented:
    """Draw token boundaries in a text, in pieces of the length that the model was trained on.

    Args:
        trained: the model.
        text: at least one byte.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.

    Raises:
        UserError: the text is empty.
    """
    if not text:
        raise UserError("the text is empty: expected at least one byte in text=... or file=...")
    length = trained.config.data.seq_len
    probability_N: list[float] = []
    boundary_N: list[bool] = []
    with evaluating(trained.parts, seed=seed, threshold=threshold) as draw:
        for start in range(0, len(text), length):
            # A rollout decides nothing at its last symbol, so one more is put there.
            symbol_N = F.pad(torch.tensor(list(text[start : start + length])), (0, 1))
            td = draw(symbol_N.unsqueeze(0))
            probability_N += td[keys.BOUNDARY_PROB][0].float().clamp(0, 1).tolist()
            boundary_N += td[keys.ACTION][0].bool().tolist()
    return Segmented(text, probability_N, boundary_N)
