"""Where a comparison's runs are trained: here, on the workers of a dask scheduler, or as jobs of Slurm.

Each is a ``concurrent.futures.Executor`` that takes ``Order``s and gives ``Outcome``s.
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
from tokenv.compare.job import Order, Outcome
from tokenv.compare.worker import Remote, have
from tokenv.core.errors import UserError

PACKAGES = {"dask": "distributed", "slurm": "submitit"}  # of the extras of these names


@dataclass(frozen=True)
class Workshop:
    """Something that has runs.

    Attributes:
        executor: takes jobs.
        job: what is submitted, with an order.
        threads: of torch, in each of a job's processes; 0 for its own choice.
        told: what is to be said of it; empty for nothing.
        check: raises ``UserError`` once it is of no use any more.
    """

    executor: Executor
    job: Callable[[Order], Outcome]
    threads: int = 0
    told: str = ""
    check: Callable[[], None] = lambda: None


@contextmanager
def opened(options: CompareOptions, tasks: Sequence[Task], desk: Path, threads: int) -> Iterator[Workshop]:
    """What ``executor=…`` names; closed in the end, when its jobs have come to theirs.

    Args:
        options: of the comparison.
        tasks: what is to be had.
        desk: folder for a scheduler's own files.
        threads: of each of some processes that share this machine.

    Raises:
        UserError: its packages are not installed, it cannot be reached, or its file is wrong.
    """
    kind, _, where = options.executor.partition(":")
    if kind == "local":
        with ThreadPoolExecutor(options.jobs) as pool:
            yield Workshop(pool, have, threads)
    elif kind == "dask":
        takes_gpu = any(not task.config.hardware.device.startswith("cpu") for task in tasks)
        with _module("dask").opened(where, options.ranks if takes_gpu else 0) as (executor, told, check):
            yield Workshop(executor, Remote(), told=told, check=check)
    else:
        with _module(kind).opened(Path(where), desk, options.ranks) as executor:
            yield Workshop(executor, Remote())


def check_executor(options: CompareOptions) -> None:
    """Find out whether a comparison's executor can be had, before anything is stored.

    Raises:
        UserError: as ``opened``.
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
    return import_module(f"tokenv.compare.{kind}")
