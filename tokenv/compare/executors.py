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
from typing import Any

from tokenv.compare.have import have
from tokenv.compare.options import CompareOptions, Task
from tokenv.compare.order import Order, Outcome
from tokenv.compare.remote import Remote
from tokenv.errors import UserError

CONNECT_SECONDS = 5


@dataclass(frozen=True)
class Workshop:
    """Something that has runs.

    Attributes:
        executor: takes jobs.
        job: what is submitted, with an order.
        threads: of torch, in each of a job's processes; 0 for its own choice.
    """

    executor: Executor
    job: Callable[[Order], Outcome]
    threads: int = 0


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
        with _client(where) as client:
            takes_gpu = any(not task.config.hardware.device.startswith("cpu") for task in tasks)
            workers = client.scheduler_info(n_workers=-1)["workers"].values()
            has_gpu = any("GPU" in worker.get("resources", {}) for worker in workers)
            more: dict[str, Any] = {"resources": {"GPU": options.ranks}} if takes_gpu and has_gpu else {}
            yield Workshop(client.get_executor(pure=False, **more), Remote())
    else:
        with _slurm().opened(Path(where), desk, options.ranks) as executor:
            yield Workshop(executor, Remote())


def check_executor(options: CompareOptions) -> None:
    """Find out whether a comparison's executor can be had, before anything is stored.

    Raises:
        UserError: as ``opened``.
    """
    kind, _, where = options.executor.partition(":")
    if kind == "dask":
        with _client(where):
            pass
    elif kind == "slurm":
        _slurm().check(Path(where), options.ranks)


def _client(address: str) -> Any:
    distributed = extra("distributed", "dask")
    try:
        return distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"executor = 'dask:{address}': no scheduler answers there ({_first_line(error)}): expected the address "
            "that dask scheduler prints, such as dask:tcp://10.0.0.1:8786"
        ) from error


def _slurm() -> ModuleType:
    extra("submitit", "slurm")
    return import_module("tokenv.compare.slurm")


def extra(package: str, name: str) -> ModuleType:
    """A package of an extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise UserError(f"executor={name}:… needs the package {package}: pip install 'tokenv[{name}]'") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
