"""Locks: a run is trained by one process at a time, and a GPU is used by as many jobs as it has places."""

import getpass
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch
from filelock import BaseFileLock, FileLock, Timeout

from tokenv.config.schema import Config
from tokenv.core.checkpoints import fingerprint
from tokenv.core.errors import UserError

LOCKS = ".locks"  # folder in a store
LOCK_SECONDS = 1.0  # to acquire a lock: others may hold it for a moment, to see whether it is free
VISIBLE = "CUDA_VISIBLE_DEVICES"


def run_lock(config: Config, store: Path) -> FileLock:
    """Return the lock of a run in a store, which the process that trains the run holds.

    The operating system releases it when that process ends, however it ends. The file remains. Within a process, the
    lock of a run is one object, which may be acquired several times.

    Args:
        config: configuration of the run.
        store: folder of the runs; created if it is missing.

    Raises:
        OSError: the store cannot be written to.
    """
    folder = store.absolute() / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    key = fingerprint(config.identity())[:16]
    return FileLock(folder / f"{key}.lock", is_singleton=True)


def is_locked(config: Config, store: Path) -> bool:
    """Return whether another process trains a run."""
    try:
        with run_lock(config, store).acquire(blocking=False):
            return False
    except Timeout:
        return True


@contextmanager
def holding_if_free(config: Config, store: Path) -> Iterator[None]:
    """Hold the lock of a run, unless another process does: then the user trains one run twice, which is his choice."""
    with ExitStack() as held:
        with suppress(Timeout):
            held.enter_context(run_lock(config, store).acquire(timeout=LOCK_SECONDS))
        yield


@contextmanager
def acquire_gpus(device: str, count: int, runs_per_gpu: int = 1) -> Iterator[dict[str, str]]:
    """Wait for GPUs with a free place, and lock the places for all threads and processes of this user.

    Args:
        device: value of ``hardware.device``; ``cuda:1`` is that GPU, ``auto`` and ``cuda`` are any.
        count: number of GPUs.
        runs_per_gpu: places of each GPU.

    Yields:
        Environment variables which let a process see only these GPUs.
    """
    index = device.partition(":")[2]
    uses_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    candidates: list[str] = []
    if uses_gpu:
        candidates = visible_gpus()
    if index:
        candidates = candidates[int(index) :][:1]
    # a run which needs more GPUs than there are reports that itself
    count = min(count, len(candidates))
    with ExitStack() as locks:
        while (gpus := _lock_gpus(candidates, count, runs_per_gpu, locks)) is None:
            time.sleep(1)
        if gpus and not index:
            yield {VISIBLE: ",".join(gpus)}
        else:
            yield {}


def visible_gpus() -> list[str]:
    """Return the GPUs which this process may use, by names which are valid on the whole machine where possible."""
    allowed = os.environ.get(VISIBLE)
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        output = subprocess.run(
            query, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        names = dict(
            line.replace(" ", "").split(",", 1) for line in output.splitlines() if "," in line
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        names = {}
    if allowed is not None:
        return [names.get(gpu.strip(), gpu.strip()) for gpu in allowed.split(",") if gpu.strip()]
    return list(names.values()) or [str(index) for index in range(torch.cuda.device_count())]


def _lock_gpus(
    candidates: Sequence[str], count: int, runs_per_gpu: int, locks: ExitStack
) -> list[str] | None:
    """Lock a place of so many of these GPUs; None, and lock none, if fewer have one."""
    with ExitStack() as taken:
        gpus: list[str] = []
        for gpu in candidates:
            if len(gpus) < count and (lock := lock_gpu(gpu, runs_per_gpu)) is not None:
                taken.callback(lock.release)
                gpus.append(gpu)
        if len(gpus) < count:
            return None
        locks.push(taken.pop_all())
        return gpus


def lock_gpu(gpu: str, places: int) -> BaseFileLock | None:
    """Lock a place of a GPU until the lock is released or its process ends; None if all are locked already.

    Raises:
        UserError: the lock's file belongs to somebody else or is a link.
    """
    for place in range(places):
        path = Path(tempfile.gettempdir()) / f"tokenv-{getpass.getuser()}-gpu-{gpu}-{place}.lock"
        lock = FileLock(path, mode=0o600)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        except OSError as error:
            raise UserError(
                f"{path}: cannot be opened ({error.strerror}): delete it, or ask its owner to"
            ) from None
        return lock
    return None
