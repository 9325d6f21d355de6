"""Claims: of several comparisons on one store, one alone has a run trained, and the others wait for it."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenv.compare.store import SILENT_SECONDS, identity, now, same_runs
from tokenv.config.schema import Config
from tokenv.plotting.characters import escape_line
from tokenv.storage import processes
from tokenv.storage.atomic import write_atomically
from tokenv.storage.trust import UnreadableFileError, read_json

ATTEMPTS = 5


@dataclass(frozen=True)
class LockHolder:
    """Somebody else is at a run.

    Attributes:
        who: for people.
    """

    who: str


class RunLock:
    """The right to have a run trained, held by this process and the one that trains.

    It is a file of its own name in the store, so whoever finds its processes gone may delete it: no other claim can
    have come to lie there in between.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tell(self, *trainers: int) -> None:
        """Write down who holds it: this process, and those of these ids."""
        write_atomically(self.path, json.dumps(processes.describe(*trainers)))

    def refresh(self) -> None:
        """Show other machines that it is still held."""
        with suppress(OSError):  # the store cannot be written to; the run itself tells of that
            os.utime(self.path)

    def release(self) -> None:
        """Give it up."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def acquire_run(config: Config, store: Path) -> RunLock | LockHolder:
    """Claim the run of a configuration, or say who is at it: a comparison, or somebody who trains it by hand.

    Args:
        config: of the run.
        store: where it is to be stored; made if it is missing.

    Raises:
        OSError: the store cannot be written to.
    """
    key = _key(config)
    store.mkdir(parents=True, exist_ok=True)
    own = RunLock(store / f".claim-{key}-{uuid.uuid4().hex[:8]}.json")
    other = _holder(store, key, own)
    for _ in range(ATTEMPTS):
        if other is not None:
            break
        # Each of two that come at once tells first and looks then, so at least one of them sees the other.
        own.tell()
        other = _holder(store, key, own)
        if other is None:
            running = _running(config, store)
            if running is None:
                return own
            own.release()
            return running
        own.release()
        time.sleep(random.uniform(0, 0.3))
        other = _holder(store, key, own)
    return other or LockHolder("another comparison")


def holder(config: Config, store: Path) -> LockHolder | None:
    """Who is at a run; claims nothing."""
    return _holder(store, _key(config)) or _running(config, store)


def _key(config: Config) -> str:
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _running(config: Config, store: Path) -> LockHolder | None:
    """A run that goes on without a claim, as one that somebody trains by hand."""
    running = next((run for run in same_runs(config, store) if run.is_running), None)
    return None if running is None else LockHolder(f"{running.folder}, which is under way")


def _holder(store: Path, key: str, own: RunLock | None = None) -> LockHolder | None:
    """Another who holds a claim on a run; claims that nobody holds any more are deleted."""
    for path in store.glob(f".claim-{key}-*.json"):
        if own is not None and path == own.path:
            continue
        try:
            told, refreshed = read_json(path), path.stat().st_mtime
        except FileNotFoundError:  # released while we looked
            continue
        except UnreadableFileError:  # not ours, or damaged
            told, refreshed = None, 0.0
        living = processes.alive_pids(told)
        if living is None:  # of another machine
            silent = now(store) - refreshed > SILENT_SECONDS
            living = [] if silent else [each["pid"] for each in told["processes"]]
        if living:
            return LockHolder(escape_line(f"process {living[0]} on {str(told['place']).partition(' ')[0]}"))
        path.unlink(missing_ok=True)
    return None
