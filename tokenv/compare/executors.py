"""Where a comparison's runs are trained: here, on the workers of a dask scheduler, or as jobs of Slurm.

Each is a ``concurrent.futures.Executor`` that takes ``JobSpec``s and gives ``JobResult``s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.job import JobResult, JobSpec
from tokenv.compare.remote import RemoteJob
from tokenv.compare.worker import run_job
from tokenv.core.errors import UserError

PACKAGES = {"dask": "distributed", "slurm": "submitit"}  # of the extras of these names


@dataclass(frozen=True)
class ExecutorHandle:
    """Something that has runs.

    Attributes:
        executor: takes jobs.
        job: what is submitted, with an order.
        threads: of torch, in each of a job's processes; 0 for its own choice.
        told: what is to be said of it; empty for nothing.
        check: raises ``UserError`` once it is of no use any more.
    """

    executor: Executor
    job: Callable[[JobSpec], JobResult]
    threads: int = 0
    told: str = ""
    check: Callable[[], None] = lambda: None


@contextmanager
def open_executor(
    options: CompareOptions, tasks: Sequence[Task], work_dir: Path, threads: int
) -> Iterator[ExecutorHandle]:
    """What ``executor=…`` names; closed in the end, when its jobs have come to theirs.

    Args:
        options: of the comparison.
        tasks: what is to be had.
        work_dir: folder for a scheduler's own files.
        threads: of each of some processes that share this machine.

    Raises:
        UserError: its packages are not installed, it cannot be reached, or its file is wrong.
    """
    kind, _, where = options.executor.partition(":")
    if kind == "local":
        with ThreadPoolExecutor(options.jobs) as pool:
            yield ExecutorHandle(pool, run_job, threads)
    elif kind == "dask":
        takes_gpu = any(not task.config.hardware.device.startswith("cpu") for task in tasks)
        with _module("dask").open_dask(where, options.ranks if takes_gpu else 0) as (executor, told, check):
            yield ExecutorHandle(executor, RemoteJob(), told=told, check=check)
    else:
        with _module(kind).open_slurm(Path(where), work_dir, options.ranks) as executor:
            yield ExecutorHandle(executor, RemoteJob())


def check_executor(options: CompareOptions) -> None:
    """Find out whether a comparison's executor can be had, before anything is stored.

    Raises:
        UserError: as ``open_executor``.
    """
    kind, _, where = options.executor.partition(":")
    if kind == "dask":
        _module(kind).check(where)
    elif kind == "slurm":
        _module(kind).check(Path(where), options.ranks)


def _module(kind: str) -> ModuleType:
    """Ours for a kind of executor.

    Raises:
        UserError: what it takes is not installed.
    """
    try:
        import_module(PACKAGES[kind])
    except ImportError as error:
        raise UserError(
            f"executor={kind}:… takes the package {PACKAGES[kind]} ({error}): pip install 'tokenv[{kind}]'"
        ) from error
    return import_module(f"tokenv.compare.{kind}_executor")
