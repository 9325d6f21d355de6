"""Find training runs where Sacred stored them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenv.config.files import flatten, resolve, without_command_options
from tokenv.config.registry import plugins
from tokenv.config.schema import Config
from tokenv.core import checkpoints, trust
from tokenv.core.conversion import from_dict
from tokenv.core.errors import UserError
from tokenv.core.run_folders import source_name
from tokenv.core.trust import MAX_CONFIG_BYTES, read_json
from tokenv.plotting.console import warn

UNFINISHED = ("INTERRUPTED", "FAILED", "RUNNING")  # a killed run still says that it is running


@dataclass(frozen=True)
class StoredRun:
    """A training run as Sacred stored it.

    Attributes:
        folder: folder of the run.
        config: configuration of the run.
        identity: the part of the configuration which is equal in two runs if these are the same run.
        sources: source files, as the run's record names them, and their names in the store.
        status: Sacred's status: ``COMPLETED``, ``INTERRUPTED``, ``FAILED`` or ``RUNNING``.
        last_heartbeat: time of its last sign of life, by the file system's clock.
    """

    folder: Path
    config: Config
    identity: dict[str, Any]
    sources: Mapping[str, str]
    status: str
    last_heartbeat: float

    @property
    def finished(self) -> bool:
        """Whether training was completed."""
        return self.status == "COMPLETED"

    @property
    def is_resumable(self) -> bool:
        """Whether the run has ended before it was finished and left a checkpoint, for one who holds its lock."""
        return self.status in UNFINISHED and bool(
            checkpoints.list_complete(self.folder / "checkpoints")
        )


def read_run(folder: Path) -> StoredRun | None:
    """Return a stored training run; None where the folder holds something else, or what this version cannot read.

    Raises:
        UntrustedCodeError: its data is of a kind which is code that the user has not named.
    """
    try:
        run = (folder / "run.json").stat()
        config = (folder / "config.json").stat()
        return _read_unchanged(
            folder, run.st_mtime, (run.st_mtime_ns, run.st_ino, config.st_mtime_ns, config.st_ino)
        )
    except trust.UntrustedCodeError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # no run, one that is being written, or damaged


@lru_cache(maxsize=100_000)
def _read_unchanged(
    folder: Path, last_heartbeat: float, _written: tuple[int, ...]
) -> StoredRun | None:
    """Read a run once until its files change, because a comparison searches its store once for each of its runs."""
    run = read_json(folder / "run.json")
    if run["experiment"]["name"] != "tokenv-train":
        return None
    values = read_json(folder / "config.json", limit=MAX_CONFIG_BYTES)
    trust.check_name(values["data"]["kind"], folder)  # which reading the configuration imports
    config = resolve([], {}, base=without_command_options(values))
    sources = {file: Path(kept).name for file, kept in run["experiment"].get("sources", ())}
    return StoredRun(folder, config, config.identity(), sources, run["status"], last_heartbeat)


def finished_run(folder: Path) -> StoredRun:
    """Read a finished run.

    Raises:
        UserError: there is no finished training run in the folder, its checkpoint is of another run, or it names code
            that the user has not named.
    """
    stored = read_run(folder)
    if stored is None or not stored.finished:
        if stored is None:
            problem = "there is no training run"
        else:
            problem = f"the run's status is {stored.status}"
        raise UserError(
            f"runs: {folder}: {problem}; expected the folder of a finished one, such as runs/1"
        )
    trust.check(stored.config.as_dict(), folder)
    if problem := find_contradiction(stored):
        raise UserError(f"runs: {problem}: expected a folder as its run left it")
    return stored


def find_contradiction(run: StoredRun) -> str:
    """Return how the last checkpoint of a run contradicts its folder; empty if it does not, or if there is none.

    ``config.json`` and ``run.json`` say which run it is, but its checkpoint is what is evaluated and resumed.

    Raises:
        UserError: the checkpoint is damaged, or names code that the user has not named.
    """
    complete = checkpoints.list_complete(run.folder / "checkpoints")
    if not complete:
        return ""
    checkpoint = complete[-1]
    state = checkpoints.load_state(checkpoint)
    own: Config = from_dict(Config, state["config"])
    there = flatten(own.identity())
    here = flatten(run.identity)
    for key in {**here, **there}:
        values = here.get(key), there.get(key)
        if len({json.dumps(value, default=str) for value in values}) > 1:
            return f"{run.folder}/config.json has {key} = {values[0]!r}, but {checkpoint} has {values[1]!r}"
    symbols = state.get("symbols")
    if run.finished and not (isinstance(symbols, int) and symbols >= own.train.symbols):
        return f"{run.folder}/run.json says that the run is finished, but {checkpoint} has seen {symbols!r} symbols"
    return ""


def stored_runs(store: Path) -> Iterator[StoredRun]:
    """Yield all training runs of a store, newest first, but those whose kind of data is code which nobody named."""
    written = {path.parent: path.parent.stat().st_mtime for path in store.glob("*/run.json")}
    for folder in sorted(written, key=written.__getitem__, reverse=True):
        with suppress(trust.UntrustedCodeError):
            run = read_run(folder)
            if run is not None:
                yield run


def same_runs(config: Config, store: Path) -> list[StoredRun]:
    """Return the runs of this configuration, newest first."""
    wanted = config.identity()
    return [run for run in stored_runs(store) if run.identity == wanted]


def plugin_sources(config: Config) -> dict[str, Path]:
    """Return the modules of a configuration's plugins by the names under which a store would keep them now."""
    every = plugins(config.as_dict(), load=True)
    return {source_name(plugin.module): plugin.module for plugin in every}


def find_run(
    config: Config, store: Path, sources: Mapping[str, Path] | None = None
) -> StoredRun | None:
    """Return the newest finished run of this configuration, or else the newest which can be resumed under its lock.

    A run whose checkpoint is another run's is passed over with a warning, and so is one of other plugins.

    Args:
        config: configuration of the run.
        store: folder of the runs.
        sources: ``plugin_sources`` of the run; None for the present ones.

    Raises:
        UserError: a checkpoint names code that the user has not named.
    """
    if sources is None:
        sources = plugin_sources(config)
    usable = [
        run
        for run in same_runs(config, store)
        if (run.finished or run.is_resumable) and _is_consistent(run) and _has_sources(run, sources)
    ]
    return max(usable, key=lambda run: run.finished, default=None)  # of equals, max takes the first


def _is_consistent(run: StoredRun) -> bool:
    """Return whether a run's checkpoint belongs to its folder, and warn if not."""
    try:
        problem = find_contradiction(run)
    except checkpoints.DamagedError:
        return True  # reading the checkpoint reports it, and names an intact one
    if problem:
        warn(f"{problem}: it is not taken for the run that its folder names")
    return not problem


def _has_sources(run: StoredRun, sources: Mapping[str, Path]) -> bool:
    """Return whether a run was trained with these files, and warn if not."""
    changed = [str(file) for name, file in sources.items() if name not in run.sources.values()]
    if changed:
        warn(f"{run.folder} was trained with another {' and '.join(changed)}: it is passed over")
    return not changed


def describe_versions(runs: Sequence[StoredRun]) -> str:
    """Return a sentence if runs were trained with different versions of tokenv's or a plug-in's files, else nothing."""
    versions: dict[str, set[str]] = {}
    for run in runs:
        for file, kept in run.sources.items():
            versions.setdefault(file, set()).add(kept)
    changed = [file for file, kept in versions.items() if len(kept) > 1]
    if not changed:
        return ""
    return (
        f"the runs were trained with different versions of {', '.join(changed[:3])}: a new store= trains all of them "
        "anew"
    )
