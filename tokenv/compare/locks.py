"""Locks: a run is trained by one comparison at a time, and a GPU is used by one job at a time."""

from __future__ import annotations

import getpass
import hashlib
import json
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from tokenv.compare.store import SILENT_SECONDS, file_system_time, identity, same_runs
from tokenv.config.schema import Config
from tokenv.core import processes
from tokenv.core.atomic import write_atomically
from tokenv.core.errors import UserError
from tokenv.core.trust import UnreadableFileError, read_json
from tokenv.plotting.characters import escape_line

ACQUIRE_SECONDS = 10.0  # acquiring takes milliseconds: a marker that is still there was left by a machine that died
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class LockHolder:
    """Another process which works on a run.

    Attributes:
        description: text for people, such as ``process 12 on host``.
    """

    description: str


class RunLock:
    """The right to train a run, held by this process and by the process which trains.

    Every lock is a file of its own name in the store, so that it can be deleted safely once its processes are gone: no
    other lock can have taken its place in between. Its modification time is a heartbeat for other machines.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write_owners(self, *trainers: int) -> None:
        """Write down who holds the lock: this process, and the processes of these ids."""
        write_atomically(self.path, json.dumps(processes.describe(*trainers)))

    def refresh(self) -> None:
        """Show other machines that the lock is still held."""
        with suppress(OSError):  # the store cannot be written to, which the run itself reports
            os.utime(self.path)

    def release(self) -> None:
        """Delete the lock."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def acquire_run(config: Config, store: Path) -> RunLock | LockHolder:
    """Lock the run of a configuration, or return who works on it: a comparison, or a training started by hand.

    The lock is written before others are looked for: of two processes which come at once, at most one goes on, on any
    file system. The marker around both lets exactly one go on.

    Args:
        config: configuration of the run.
        store: folder where the run is to be stored; created if it is missing.

    Raises:
        OSError: the store cannot be written to.
    """
    key = _key(config)
    store.mkdir(parents=True, exist_ok=True)
    lock = RunLock(store / f".claim-{key}-{uuid.uuid4().hex[:8]}.json")
    with _marker(store / f".acquire-{key}.lock"):
        lock.write_owners()
        other = find_holder(config, store, lock)
    if other is None:
        return lock
    lock.release()
    return other


@contextmanager
def _marker(path: Path) -> Iterator[None]:
    """Hold a file which only one process at a time can create; delete one which a dead machine left behind."""
    marker = SoftFileLock(path)
    try:
        marker.acquire(timeout=ACQUIRE_SECONDS)
    except Timeout:
        path.unlink(missing_ok=True)
        marker.acquire()
    try:
        yield
    finally:
        marker.release()


def find_holder(config: Config, store: Path, own: RunLock | None = None) -> LockHolder | None:
    """Return who works on a run; None for nobody.

    Args:
        config: configuration of the run.
        store: folder of the runs.
        own: lock of the caller, which does not count.
    """
    holder = _lock_holder(store, _key(config), own)
    if holder is not None:
        return holder
    running = next((run for run in same_runs(config, store) if run.is_running), None)
    return None if running is None else LockHolder(f"{running.folder}, which is under way")


def _key(config: Config) -> str:
    return hashlib.sha256(json.dumps(identity(config), sort_keys=True, default=str).encode()).hexdigest()[:16]


def _lock_holder(store: Path, key: str, own: RunLock | None) -> LockHolder | None:
    """Return another who holds a lock of a run; locks whose processes are gone are deleted."""
    for path in store.glob(f".claim-{key}-*.json"):
        if own is not None and path == own.path:
            continue
        try:
            owners, refreshed = read_json(path), path.stat().st_mtime
        except FileNotFoundError:  # released in the meantime
            continue
        except UnreadableFileError:  # written by another program, or damaged
            owners, refreshed = None, 0.0
        alive = processes.alive_pids(owners)
        if alive is None:  # of another machine
            silent = abs(file_system_time(store) - refreshed) > SILENT_SECONDS
            alive = [] if silent else [process["pid"] for process in owners["processes"]]
        if alive:
            return LockHolder(escape_line(f"process {alive[0]} on {str(owners['place']).partition(' ')[0]}"))
        path.unlink(missing_ok=True)
    return None


@contextmanager
def acquire_gpus(
    device: str, count: int, while_waiting: Callable[[], None], stop_requested: Callable[[], bool]
) -> Iterator[dict[str, str] | None]:
    """Wait for GPUs which no other job uses, and lock them for all threads and processes of this user.

    Args:
        device: value of ``hardware.device``; ``cuda:1`` is that GPU, ``auto`` and ``cuda`` are any.
        count: number of GPUs.
        while_waiting: called once a second while waiting.
        stop_requested: whether to stop waiting.

    Yields:
        Environment variables which let a process see only these GPUs; None if waiting was stopped.
    """
    index = device.partition(":")[2]
    uses_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    candidates = visible_gpus() if uses_gpu else []
    if index:
        candidates = candidates[int(index) :][:1]
    count = min(count, len(candidates))  # a run which needs more GPUs than there are reports that itself
    with ExitStack() as locks:
        while (gpus := _lock_gpus(candidates, count, locks)) is None:
            if stop_requested():
                yield None
                return
            while_waiting()
            time.sleep(1)
        yield {VISIBLE: ",".join(gpus)} if gpus and not index else {}


def visible_gpus() -> list[str]:
    """Return the GPUs which this process may use, by names which are valid on the whole machine where possible."""
    allowed = os.environ.get(VISIBLE)
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout
        names = dict(line.replace(" ", "").split(",", 1) for line in output.splitlines() if "," in line)
    except (OSError, subprocess.SubprocessError, ValueError):
        names = {}
    if allowed is not None:
        return [names.get(gpu.strip(), gpu.strip()) for gpu in allowed.split(",") if gpu.strip()]
    return list(names.values()) or [str(index) for index in range(torch.cuda.device_count())]


def _lock_gpus(candidates: Sequence[str], count: int, locks: ExitStack) -> list[str] | None:
    """Lock so many of these GPUs; None, and lock none, if fewer are free."""
    with ExitStack() as taken:
        gpus: list[str] = []
        for gpu in candidates:
            if len(gpus) < count and (lock := lock_gpu(gpu)) is not None:
                taken.callback(lock.release)
                gpus.append(gpu)
        if len(gpus) < count:
            return None
        locks.push(taken.pop_all())
        return gpus


def lock_gpu(gpu: str) -> BaseFileLock | None:
    """Lock a GPU until the lock is released or its process ends; None if it is locked already.

    Raises:
        UserError: the lock's file belongs to somebody else or is a link.
    """
    path = Path(tempfile.gettempdir()) / f"tokenv-{getpass.getuser()}-gpu-{gpu}.lock"
    lock = FileLock(path, mode=0o600)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror}): delete it, or ask its owner to") from None
    return lock
