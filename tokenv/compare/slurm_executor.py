"""Slurm through submitit, as a ``concurrent.futures.Executor``: submitit's own jobs are no futures."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tokenv.config.files import load_yaml
from tokenv.core.errors import UserError

if TYPE_CHECKING:
    import submitit

EVERY_SECONDS = 1.0
OF_EXECUTOR = ("max_num_timeout", "python")  # what submitit wants to know when an executor is made


class SlurmExecutor(Executor):
    """Jobs of submitit as futures, which a thread looks after.

    A future that is cancelled takes its job out of the queue, or ends it. None is ever ``running``, for Slurm is not to
    be asked about each job once a second.

    Args:
        executor: submitit's.
    """

    def __init__(self, executor: submitit.Executor) -> None:
        self._executor = executor
        self._jobs: dict[Future[Any], submitit.Job[Any]] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._look_after, daemon=True, name="look after jobs")
        self._thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Put a call into the queue.

        Raises:
            RuntimeError: the executor is shut down.
        """
        if self._closed.is_set():
            raise RuntimeError("cannot schedule new futures after shutdown")
        job, future = self._executor.submit(fn, *args, **kwargs), Future[Any]()
        with self._lock:
            self._jobs[future] = job
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more; ``cancel_futures`` cancels those that are there."""
        self._closed.set()
        with self._lock:
            futures = list(self._jobs)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            self._thread.join()

    def _look_after(self) -> None:
        while self._jobs or not self._closed.is_set():
            time.sleep(EVERY_SECONDS)
            with self._lock:
                jobs = list(self._jobs.items())
            for future, job in jobs:
                if self._settled(future, job):
                    with self._lock:
                        del self._jobs[future]

    @staticmethod
    def _settled(future: Future[Any], job: submitit.Job[Any]) -> bool:
        """Whether a job has come to its end; its future says how."""
        if future.cancelled():
            job.cancel(check=False)
            future.set_running_or_notify_cancel()
            return True
        if not job.done():
            return False
        try:
            found = job.result()
        except Exception as error:  # submitit's own, of a job that failed or was killed
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(found)
        return True


@contextmanager
def open_slurm(file: Path, folder: Path, ranks: int) -> Iterator[SlurmExecutor]:
    """An executor as a file describes it.

    Args:
        file: YAML of submitit's parameters, such as ``timeout_min``, ``partition`` and ``gpus_per_node``, and
            ``cluster``: ``slurm``, or ``local`` for processes on this machine.
        folder: for submitit's own files, seen by every node.
        ranks: GPUs of a job, where the file does not say.

    Raises:
        UserError: there is no such file, it is no YAML mapping, submitit refuses it, or there is no Slurm.
    """
    executor = SlurmExecutor(_made(file, folder, ranks))
    try:
        yield executor
    except BaseException:
        executor.shutdown(wait=False)  # jobs of Slurm need nobody who waits
        raise
    executor.shutdown()


def check(file: Path, ranks: int) -> None:
    """Find out whether a file describes an executor.

    Raises:
        UserError: as ``open_slurm``.
    """
    with TemporaryDirectory() as folder:
        _made(file, Path(folder), ranks)


def _made(file: Path, folder: Path, ranks: int) -> submitit.Executor:
    import submitit

    where = f"executor = 'slurm:{file}'"
    if not file.is_file():
        raise UserError(
            f"{where}: no such file: expected a YAML file of submitit's parameters, such as timeout_min: 60"
        )
    told = load_yaml(file)
    cluster = told.pop("cluster", "slurm")
    if cluster not in ("slurm", "local"):
        raise UserError(f"{where}: cluster = {cluster!r}: expected slurm or local")
    generic = submitit.AutoExecutor._valid_parameters()
    known = tuple(f"{name}_" for name in ("slurm", "local"))
    named = {key if key in generic or key.startswith(known) else f"{cluster}_{key}": told[key] for key in told}
    if ranks > 1:
        named.setdefault("gpus_per_node", ranks)
    own = {key: named.pop(key) for key in list(named) if key.partition("_")[2] in OF_EXECUTOR}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            executor = submitit.AutoExecutor(folder, cluster=cluster, **own)
            executor.update_parameters(**{"name": "tokenv", **named})
    except (RuntimeError, ValueError, TypeError, NameError, AssertionError, Warning) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from error
    return executor
