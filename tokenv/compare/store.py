"""Finding runs where Sacred stored them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenv.config.files import resolve
from tokenv.config.schema import IDENTITY, Config
from tokenv.storage import checkpoints

ALIVE_SECONDS = 60  # Sacred tells every 10 s that a run goes on


@dataclass(frozen=True)
class StoredRun:
    """A training run as Sacred stored it.

    Attributes:
        folder: of the run.
        config: of the run.
        status: Sacred's: ``COMPLETED``, ``INTERRUPTED``, ``FAILED`` or ``RUNNING``.
        seconds: since the last sign of life.
    """

    folder: Path
    config: Config
    status: str
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == "COMPLETED"

    @property
    def can_go_on(self) -> bool:
        """Whether it was stopped or killed, and left a checkpoint."""
        stopped = self.status == "INTERRUPTED" or (self.status == "RUNNING" and self.seconds > ALIVE_SECONDS)
        return stopped and bool(checkpoints.complete(self.folder / "checkpoints"))


def read_run(folder: Path) -> StoredRun | None:
    """A stored training run; None where the folder holds something else, or what this version cannot read."""
    try:
        told, values = (json.loads((folder / name).read_text()) for name in ("run.json", "config.json"))
    except (OSError, json.JSONDecodeError):  # no run, or one that is being written
        return None
    if told.get("experiment", {}).get("name") != "tokenv-train":
        return None
    known = {key: value for key, value in values.items() if key != "resume"}
    try:
        config = resolve([], known)
    except ValueError:
        return None
    beat = told.get("heartbeat") or told["start_time"]
    last = datetime.fromisoformat(beat).replace(tzinfo=UTC).timestamp()
    return StoredRun(folder, config, told["status"], time.time() - last)


def stored_runs(store: Path) -> Iterator[StoredRun]:
    """All training runs of a store, newest first."""
    folders = [path.parent for path in store.glob("*/run.json")]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        run = read_run(folder)
        if run is not None:
            yield run


def identity(config: Config) -> dict[str, Any]:
    """What two runs must have in common to be the same run."""
    return {key: value for key, value in config.as_dict().items() if key in IDENTITY}


def find_run(config: Config, store: Path) -> StoredRun | None:
    """The run of this configuration that is finished, or else can go on; the newest of several."""
    wanted = identity(config)
    same = [run for run in stored_runs(store) if identity(run.config) == wanted]
    return next((run for run in same if run.finished), None) or next((run for run in same if run.can_go_on), None)
