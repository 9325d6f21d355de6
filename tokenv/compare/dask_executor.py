"""The workers of a dask scheduler, as a ``concurrent.futures.Executor``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenv.core.errors import UserError

if TYPE_CHECKING:
    import distributed

CONNECT_SECONDS = 5.0


@contextmanager
def open_dask(address: str, gpus: int) -> Iterator[tuple[Executor, str, Callable[[], None]]]:
    """A scheduler's workers.

    Args:
        address: of the scheduler.
        gpus: that a run takes; of workers that have said how many they have (``--resources GPU=2``), none gets more
            runs than fit.

    Yields:
        The executor, what is to be said of it, and a call that raises once it is of no use any more.

    Raises:
        UserError: no scheduler answers there.
    """
    import distributed

    check(address)
    with distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        counted = gpus and any("GPU" in worker["resources"] for worker in workers)
        more: dict[str, Any] = {"resources": {"GPU": gpus}} if counted else {}
        slots = sum(worker["nthreads"] for worker in workers)
        told = f"{len(workers)} workers of {address} take {slots} runs at a time"
        yield client.get_executor(pure=False, **more), told, partial(check, address, client)


def check(address: str, client: distributed.Client | None = None) -> None:
    """Find out whether a scheduler answers: a client itself would wait for whoever only listens.

    Args:
        address: of the scheduler.
        client: of it; one that has lost its connection for good finds no other.

    Raises:
        UserError: none does.
    """
    try:
        with ThreadPoolExecutor(1) as pool:  # this thread may have a loop of its own, as a notebook's
            kind = pool.submit(lambda: asyncio.run(asyncio.wait_for(_kind(address), CONNECT_SECONDS))).result()
        found = "" if kind == "Scheduler" else f"a {kind} does"
        if client is not None and client.status == "closed":
            found = "it has forgotten this comparison"
    except Exception as error:  # of the network, of addresses, of whatever else a stranger's answer is taken for
        found = str(error).partition("\n")[0] or type(error).__name__
    if found:
        raise UserError(
            f"executor = 'dask:{address}': no scheduler answers there ({found}): expected the address that dask "
            "scheduler prints, such as dask:tcp://10.0.0.1:8786"
        )


async def _kind(address: str) -> str:
    import distributed

    arguments = distributed.Security().get_connection_args("client")
    async with distributed.rpc(address, timeout=CONNECT_SECONDS, connection_args=arguments) as there:
        return str((await there.identity())["type"])
