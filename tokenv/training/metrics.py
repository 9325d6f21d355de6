"""Read an update's metrics without waiting for the device, and write a run's progress to a file."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenv.storage.atomic import write_atomically
from tokenv.storage.trust import read_json


class MetricsBuffer:
    """Hold an update's metrics; reading them waits for a GPU, and is immediate on a CPU.

    Args:
        values: metrics by name, one number each, on one device.
        watched: names of the metrics which must be finite.
    """

    def __init__(self, values: Mapping[str, Tensor], watched: Sequence[str]) -> None:
        self._names, self._watched = list(values), watched
        self._device_values = torch.stack([value.double() for value in values.values()])
        self._host_values = self._device_values.to("cpu", non_blocking=True)  # into pinned memory
        self._event = None
        if self._device_values.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def found_inf(self) -> Tensor:
        """On the device of the values: 1.0 if a watched metric is infinite or NaN, else 0.0."""
        chosen = [self._names.index(name) for name in self._watched]
        return 1 - torch.stack([self._device_values[number] for number in chosen]).sum().isfinite().float()

    def read(self) -> dict[str, float]:
        """Return all metrics by name."""
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._host_values.tolist(), strict=True))

    def is_finite(self) -> bool:
        """Return whether all watched metrics are finite."""
        values = self.read()
        return math.isfinite(sum(values[name] for name in self._watched))


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
