"""How far a training run is: a small file beside its checkpoints, for whoever watches it from outside."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenv.storage.atomic import write_atomically
from tokenv.storage.files import read_json

FILE = "progress.json"
EVERY_SECONDS = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        symbols: seen in training so far.
        total: to be seen.
        seconds: since the run started, or went on.
    """

    symbols: int
    total: int
    seconds: float


class ProgressFile:
    """Tells how far a run is, at most once a second, and when it has seen everything.

    Args:
        folder: of the run's checkpoints; made if it is missing.
        total: symbols to be seen.
    """

    def __init__(self, folder: Path, total: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._total = folder / FILE, total
        self._started, self._told = time.monotonic(), -EVERY_SECONDS

    def update(self, symbols: int) -> None:
        """Tell that so many symbols have been seen in all."""
        seconds = time.monotonic() - self._started
        if seconds - self._told >= EVERY_SECONDS or symbols >= self._total:
            with suppress(OSError):  # a disk may have room again, or be back, when a checkpoint is saved
                write_atomically(self._path, json.dumps(asdict(Progress(symbols, self._total, seconds))))
            self._told = seconds


def read_progress(folder: Path) -> Progress | None:
    """What a run told last.

    Args:
        folder: of the run's checkpoints.

    Returns:
        None if it has told nothing yet.
    """
    try:
        return Progress(**read_json(folder / FILE))
    except (OSError, ValueError, TypeError):  # none, or another version's
        return None
