"""A run's progress file: written by the training loop, read by whoever shows the progress of several runs."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenv.storage.atomic import write_atomically
from tokenv.storage.trust import read_json

FILE = "progress.json"
INTERVAL = 1.0  # seconds between two writes


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        symbols: training symbols so far.
        total: training symbols of the whole run.
        seconds: time since the run started or resumed.
    """

    symbols: int
    total: int
    seconds: float


class ProgressFile:
    """Writer of a run's progress, at most once a second and at the end of the run.

    Args:
        folder: folder of the run's checkpoints; created if it is missing.
        total: training symbols of the whole run.
    """

    def __init__(self, folder: Path, total: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._total = folder / FILE, total
        self._started, self._last_write = time.monotonic(), -INTERVAL

    def update(self, symbols: int) -> None:
        """Write that so many training symbols have been seen in all."""
        seconds = time.monotonic() - self._started
        if seconds - self._last_write >= INTERVAL or symbols >= self._total:
            with suppress(OSError):  # the disk may be full for a while; saving a checkpoint reports that
                write_atomically(self._path, json.dumps(asdict(Progress(symbols, self._total, seconds))))
            self._last_write = seconds


def read_progress(folder: Path) -> Progress | None:
    """Return the progress written last to a folder of checkpoints; None if there is none that can be read."""
    try:
        return Progress(**read_json(folder / FILE))
    except (OSError, ValueError, TypeError):  # missing, or written by another version
        return None
