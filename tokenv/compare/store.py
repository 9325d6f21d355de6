"""Finding runs where Sacred stored them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from tokenv.config.files import resolve
from tokenv.config.schema import IDENTITY, Config
from tokenv.errors import UserError
from tokenv.storage import checkpoints, processes, trust

ALIVE_SECONDS = 60  # Sacred tells every 10 s that a run goes on
PROCESS = "process"  # in what a run tells of its host: see ``tokenv.storage.processes``


@dataclass(frozen=True)
class StoredRun:
    """A training run as Sacred stored it.

    Attributes:
        folder: of the run.
        config: of the run.
        status: Sacred's: ``COMPLETED``, ``INTERRUPTED``, ``FAILED`` or ``RUNNING``.
        seconds: since the last sign of life.
        gone: whether its process is known to have ended.
    """

    folder: Path
    config: Config
    status: str
    seconds: float
    gone: bool = False

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == "COMPLETED"

    @property
    def can_go_on(self) -> bool:
        """Whether it was stopped or killed or has failed, and left a checkpoint."""
        ended = self.status in ("INTERRUPTED", "FAILED") or (self.status == "RUNNING" and not self.going_on)
        return ended and bool(checkpoints.complete(self.folder / "checkpoints"))

    @property
    def going_on(self) -> bool:
        """Whether somebody is at it, as far as one can tell."""
        return self.status == "RUNNING" and not self.gone and self.seconds <= ALIVE_SECONDS


def read_run(folder: Path) -> StoredRun | None:
    """A stored training run; None where the folder holds something else, or what this version cannot read."""
    try:
        told = json.loads((folder / "run.json").read_text())
        if told["experiment"]["name"] != "tokenv-train":
            return None
        config = _config(folder / "config.json", (folder / "config.json").stat().st_mtime_ns)
        beat = told.get("heartbeat") or told["start_time"]
        last = datetime.fromisoformat(beat).replace(tzinfo=UTC).timestamp()
        host = told.get("host") or {}
        gone = PROCESS in host and processes.living(host[PROCESS]) == []
        return StoredRun(folder, config, told["status"], time.time() - last, gone)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # no run, one that is being written, or damaged


@cache
def _config(path: Path, _written: int) -> Config:
    """A run's configuration, read once: comparisons look through their store for each of their runs."""
    values = json.loads(path.read_text())
    return resolve([], {}, base={key: value for key, value in values.items() if key != "resume"})


def finished_run(folder: Path) -> StoredRun:
    """Read a finished run.

    Raises:
        UserError: there is no finished training run in the folder, or it names code that the user has not named.
    """
    stored = read_run(folder)
    if stored is None or not stored.finished:
        what = "there is no training run" if stored is None else f"the run's status is {stored.status}"
        raise UserError(f"runs: {folder}: {what}; expected the folder of a finished one, such as runs/1")
    trust.check(stored.config.as_dict(), folder)
    return stored


def stored_runs(store: Path, since: float = 0.0) -> Iterator[StoredRun]:
    """All training runs of a store, newest first.

    Args:
        store: folder of Sacred runs.
        since: only those in whose folder something was written since then, in seconds since 1970.
    """
    written = {path.parent: path.parent.stat().st_mtime for path in store.glob("*/run.json")}
    for folder in sorted((path for path in written if written[path] >= since), key=written.__getitem__, reverse=True):
        run = read_run(folder)
        if run is not None:
            yield run


def identity(config: Config) -> dict[str, Any]:
    """What two runs must have in common to be the same run."""
    return {key: value for key, value in config.as_dict().items() if key in IDENTITY}


def same_runs(config: Config, store: Path, since: float = 0.0) -> list[StoredRun]:
    """The runs of this configuration, newest first; see ``stored_runs``."""
    wanted = identity(config)
    return [run for run in stored_runs(store, since) if identity(run.config) == wanted]


def find_run(config: Config, store: Path) -> StoredRun | None:
    """The run of this configuration that is finished, or else can go on; the newest of several."""
    same = same_runs(config, store)
    return next((run for run in same if run.finished), None) or next((run for run in same if run.can_go_on), None)
