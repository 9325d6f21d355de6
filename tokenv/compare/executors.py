"""Executors of jobs, one for each place: threads on this machine, dask's workers, and Slurm's queue.

Each is a ``concurrent.futures.Executor``, to which a ``Job`` is submitted. dask's and submitit's packages are imported
when they are used.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.job import Job, JobResult
from tokenv.config.files import load_yaml
from tokenv.core.errors import UserError, check_value, choice

if TYPE_CHECKING:
    import submitit

CONNECT_SECONDS = 5.0  # for a dask scheduler to answer
POLL_SECONDS = 1.0  # between two looks at submitit's jobs
CONSTRUCTOR_KEYS = ("max_num_timeout", "python")  # what submitit takes when an executor is created
PACKAGES = {"dask": "distributed", "slurm": "submitit"}  # of the extras of these names


@contextmanager
def open_executor(
    options: CompareOptions, tasks: Sequence[Task], work_dir: Path, say: Callable[[str], None]
) -> Iterator[Executor]:
    """Open the executor which ``executor=…`` names; it is closed when its jobs have ended.

    On this machine, each thread of a pool starts one process at a time. ``ProcessPoolExecutor`` would not do: it cannot
    interrupt a job, and it breaks when one of its processes is killed.

    Args:
        options: options of the comparison.
        tasks: runs of the comparison.
        work_dir: folder for a scheduler's own files.
        say: function which prints a line.

    Raises:
        UserError: see ``check_executor``.
    """
    check_executor(options)
    kind, _, where = options.executor.partition(":")
    if kind == "local":
        with ThreadPoolExecutor(options.jobs) as pool:
            yield pool
    elif kind == "dask":
        gpus = 0
        if any(not task.config.hardware.device.startswith("cpu") for task in tasks):
            gpus = options.ranks
        with _open_dask(where, gpus, say) as executor:
            yield executor
    else:
        submitit_executor = _create_submitit_executor(Path(where), work_dir, options.ranks)
        with SlurmExecutor(submitit_executor, len(tasks)) as executor:
            yield executor


def check_executor(options: CompareOptions) -> None:
    """Check that a comparison's executor can be used.

    Raises:
        UserError: its package is not installed, no scheduler answers, or its file is wrong.
    """
    kind, _, where = options.executor.partition(":")
    if kind == "local":
        return
    try:
        import_module(PACKAGES[kind])
    except ImportError as error:
        raise UserError(
            f"executor={kind}:… takes the package {PACKAGES[kind]} ({error}): pip install 'tokenv[{kind}]'"
        ) from error
    if kind == "dask":
        _check_dask(where)
    else:
        with TemporaryDirectory() as folder:
            _create_submitit_executor(Path(where), Path(folder), options.ranks)


@contextmanager
def _open_dask(address: str, gpus: int, say: Callable[[str], None]) -> Iterator[Executor]:
    """Connect to a dask scheduler.

    Args:
        address: address of the scheduler.
        gpus: GPUs of a run. Workers which declare GPUs (``--resources GPU=2``) get no more runs than fit.
        say: function which prints a line.
    """
    import distributed

    with distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        threads = sum(worker["nthreads"] for worker in workers)
        say(f"{len(workers)} workers of {address} take {threads} runs at a time")
        declared = gpus and any("GPU" in worker["resources"] for worker in workers)
        resources: dict[str, Any] = {"resources": {"GPU": gpus}} if declared else {}
        yield client.get_executor(pure=False, **resources)


def _check_dask(address: str) -> None:
    """Check that a dask scheduler answers; a client would wait forever for a server which says nothing.

    Raises:
        UserError: none answers.
    """
    try:
        # this thread may have an event loop already, as a notebook's has
        with ThreadPoolExecutor(1) as pool:
            query = asyncio.wait_for(_identify_server(address), CONNECT_SECONDS)
            kind = pool.submit(asyncio.run, query).result()
        problem = "" if kind == "Scheduler" else f"a {kind} does"
    except Exception as error:  # of the network, of the address, or of another protocol
        problem = str(error).partition("\n")[0] or type(error).__name__
    if problem:
        raise UserError(
            f"executor = 'dask:{address}': no scheduler answers there ({problem}): expected the address that dask "
            "scheduler prints, such as dask:tcp://10.0.0.1:8786"
        )


async def _identify_server(address: str) -> str:
    import distributed

    arguments = distributed.Security().get_connection_args("client")
    async with distributed.rpc(
        address, timeout=CONNECT_SECONDS, connection_args=arguments
    ) as server:
        return str((await server.identity())["type"])


class SlurmExecutor(ThreadPoolExecutor):
    """Runs jobs through submitit, whose own jobs are no futures: a thread waits for each.

    When an exception leaves the ``with`` block, jobs which have begun go on and are not waited for.

    Args:
        executor: submitit's executor.
        jobs: number of jobs at most.
    """

    def __init__(self, executor: submitit.Executor, jobs: int) -> None:
        super().__init__(jobs)
        self._submitit = executor
        self._submitit_lock = threading.Lock()
        self._abandoned = threading.Event()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._abandoned.set()
        self.shutdown()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Put a job into the queue; it takes no arguments."""
        assert isinstance(fn, Job)
        return super().submit(self._run, fn)

    def _run(self, job: Job) -> JobResult:
        """Wait for the result of a job; take it out of the queue if it is stopped before it begins."""
        with self._submitit_lock:
            queued = self._submitit.submit(job)
        while not self._is_done(queued):
            if job.spec.stop_requested() and not job.spec.job_dir.exists():
                queued.cancel(check=False)
                return JobResult("stopped")
            if self._abandoned.wait(POLL_SECONDS):
                return JobResult("lost", "the comparison has ended")
        result: JobResult = queued.result()
        return result

    def _is_done(self, queued: submitit.Job[Any]) -> bool:
        with self._submitit_lock:
            return queued.done()


def _create_submitit_executor(file: Path, folder: Path, ranks: int) -> submitit.Executor:
    """Create submitit's executor as a file describes it.

    Args:
        file: YAML of submitit's parameters, such as ``timeout_min``, ``partition`` and ``gpus_per_node``, and
            ``cluster``: ``slurm``, or ``local`` for processes on this machine.
        folder: folder for submitit's own files, seen by every node.
        ranks: GPUs of a job where the file does not say.

    Raises:
        UserError: there is no such file, it is no YAML mapping, submitit refuses it, or there is no Slurm.
    """
    import submitit

    where = f"executor = 'slurm:{file}'"
    if not file.is_file():
        raise UserError(
            f"{where}: no such file: expected a YAML file of submitit's parameters, such as timeout_min: 60"
        )
    values = load_yaml(file)
    cluster = values.pop("cluster", "slurm")
    check_value(f"{where}: cluster", cluster, choice("slurm", "local"))
    generic = submitit.AutoExecutor._valid_parameters()
    full = [
        key if key in generic or key.startswith(("slurm_", "local_")) else f"{cluster}_{key}"
        for key in values
    ]
    parameters = dict(zip(full, values.values(), strict=True))
    if ranks > 1:
        parameters.setdefault("gpus_per_node", ranks)
    own = {key: parameters.pop(key) for key in full if key.partition("_")[2] in CONSTRUCTOR_KEYS}
    try:
        with warnings.catch_warnings(action="error"):
            executor = submitit.AutoExecutor(folder, cluster=cluster, **own)
            executor.update_parameters(**{"name": "tokenv", **parameters})
    except (RuntimeError, ValueError, TypeError, NameError, AssertionError, Warning) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())}") from error
    return executor
