"""Finding runs where Sacred stored them."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenv.compare.config import flatten
from tokenv.config.conversion import from_dict, migrate_keys
from tokenv.config.files import resolve
from tokenv.config.schema import IDENTITY, Config
from tokenv.core.errors import UserError
from tokenv.plotting.characters import warn
from tokenv.storage import checkpoints, processes, trust
from tokenv.storage.regular_files import read_json

SILENT_SECONDS = 300.0  # machines may see one another's files a minute late
PROCESS = "process"  # in what a run tells of its host: see ``tokenv.storage.processes``


def now(store: Path) -> float:
    """The time by the clock of the file system that a folder is on: machines that share it share no other."""
    try:
        with tempfile.TemporaryFile(dir=store) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # whoever may only read has his own
        return time.time()


@dataclass(frozen=True)
class _RunMetadata:
    """What a run's files say, read once for as long as they stay as they are."""

    config: Config
    identity: dict[str, Any]
    status: str
    process: Any


@dataclass(frozen=True)
class StoredRun:
    """A training run as Sacred stored it.

    Attributes:
        folder: of the run.
        config: of the run.
        identity: what two runs must have in common to be the same run.
        status: Sacred's: ``COMPLETED``, ``INTERRUPTED``, ``FAILED`` or ``RUNNING``.
        heard: when it last gave a sign of life, by the file system's clock.
        alive: whether its process exists; None where that cannot be seen from here.
    """

    folder: Path
    config: Config
    identity: dict[str, Any]
    status: str
    heard: float
    alive: bool | None = None

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.status == "COMPLETED"

    @property
    def is_resumable(self) -> bool:
        """Whether it was stopped or killed or has failed, and left a checkpoint."""
        ended = self.status in ("INTERRUPTED", "FAILED") or (self.status == "RUNNING" and not self.is_running)
        return ended and bool(checkpoints.list_complete(self.folder / "checkpoints"))

    @property
    def is_running(self) -> bool:
        """Whether somebody is at it, as far as one can tell."""
        if self.status != "RUNNING" or self.alive is not None:
            return self.status == "RUNNING" and bool(self.alive)
        return now(self.folder.parent) - self.heard <= SILENT_SECONDS


def read_run(folder: Path) -> StoredRun | None:
    """A stored training run; None where the folder holds something else, or what this version cannot read."""
    try:
        run, config = (folder / "run.json").stat(), (folder / "config.json").stat()
        told = _read_metadata(folder, (run.st_mtime_ns, run.st_ino, config.st_mtime_ns, config.st_ino))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # no run, one that is being written, or damaged
    if told is None:
        return None
    living = None if told.process is None else processes.alive_pids(told.process)
    alive = None if living is None else bool(living)
    return StoredRun(folder, told.config, told.identity, told.status, run.st_mtime, alive)


@lru_cache(maxsize=100_000)
def _read_metadata(folder: Path, _written: tuple[int, ...]) -> _RunMetadata | None:
    """Comparisons look through their store for each of their runs."""
    told = read_json(folder / "run.json")
    if told["experiment"]["name"] != "tokenv-train":
        return None
    values = read_json(folder / "config.json")
    config = resolve([], {}, base={key: value for key, value in values.items() if key != "resume"})
    return _RunMetadata(config, identity(config), told["status"], (told.get("host") or {}).get(PROCESS))


def finished_run(folder: Path) -> StoredRun:
    """Read a finished run.

    Raises:
        UserError: there is no finished training run in the folder, its checkpoint is of another run, or it names code
            that the user has not named.
    """
    stored = read_run(folder)
    if stored is None or not stored.finished:
        what = "there is no training run" if stored is None else f"the run's status is {stored.status}"
        raise UserError(f"runs: {folder}: {what}; expected the folder of a finished one, such as runs/1")
    trust.check(stored.config.as_dict(), folder)
    if wrong := contradiction(stored):
        raise UserError(f"runs: {wrong}: expected a folder as its run left it")
    return stored


def contradiction(run: StoredRun) -> str:
    """How the last checkpoint of a run contradicts what its folder says; empty where it does not, or there is none.

    ``config.json`` and ``run.json`` tell what a run was, but its checkpoint is what is measured and gone on from.

    Raises:
        UserError: the checkpoint is damaged, or names code that the user has not named.
    """
    found = checkpoints.list_complete(run.folder / "checkpoints")
    if not found:
        return ""
    state = checkpoints.load_state(found[-1])
    own: Config = from_dict(Config, migrate_keys(Config, state["config"]))
    there, here = flatten(own.as_dict()), flatten(run.config.as_dict())
    differs = [key for key in {**here, **there} if key.partition(".")[0] in IDENTITY and _odd(key, here, there)]
    if differs:
        key = differs[0]
        return f"{run.folder}/config.json has {key} = {here.get(key)!r}, but {found[-1]} has {there.get(key)!r}"
    symbols = state.get("symbols", state.get("bytes"))
    if run.finished and not (isinstance(symbols, int) and symbols >= own.train.symbols):
        return f"{run.folder}/run.json says that the run is finished, but {found[-1]} has seen {symbols!r} symbols"
    return ""


def _odd(key: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    return json.dumps([here.get(key)], default=str) != json.dumps([there.get(key)], default=str)


def stored_runs(store: Path) -> Iterator[StoredRun]:
    """All training runs of a store, newest first."""
    written = {path.parent: path.parent.stat().st_mtime for path in store.glob("*/run.json")}
    for folder in sorted(written, key=written.__getitem__, reverse=True):
        run = read_run(folder)
        if run is not None:
            yield run


def identity(config: Config) -> dict[str, Any]:
    """What two runs must have in common to be the same run."""
    return {key: value for key, value in config.as_dict().items() if key in IDENTITY}


def same_runs(config: Config, store: Path) -> list[StoredRun]:
    """The runs of this configuration, newest first."""
    wanted = identity(config)
    return [run for run in stored_runs(store) if run.identity == wanted]


def _agrees(run: StoredRun) -> bool:
    try:
        wrong = contradiction(run)
    except checkpoints.DamagedError:
        return True  # whoever reads the checkpoint says so, and names a sound one
    if wrong:
        warn(f"{wrong}: it is not taken for the run that its folder names")
    return not wrong


def find_run(config: Config, store: Path) -> StoredRun | None:
    """The run of this configuration that is finished, or else can go on; the newest of several.

    A run whose checkpoint is another run's is passed over with a warning.

    Raises:
        UserError: a checkpoint names code that the user has not named.
    """
    same = [run for run in same_runs(config, store) if (run.finished or run.is_resumable) and _agrees(run)]
    return next((run for run in same if run.finished), None) or next((run for run in same if run.is_resumable), None)
