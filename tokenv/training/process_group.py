"""The processes which train one run together, as torchrun starts them, and the messages among them.

Nothing here knows of models or batches: ``tokenv.training.data_parallel`` says which sequences belong to which rank,
sums gradients and shards the model. In a single process nothing is sent. Rank 0 alone writes files and messages.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from tokenv.config.hardware import resolve_device
from tokenv.core.distributed import SINGLE_PROCESS, Group
from tokenv.core.errors import RunFailedError, UserError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # after which a rank which does not answer counts as lost
REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RanksError(UserError):
    """An error which every rank raises alike, so that one of them is enough to report it."""


@dataclass(frozen=True)
class Ranks:
    """All processes of a run.

    Attributes:
        device_group: group which sends tensors on the model's device.
        cpu_group: group which sends small objects from CPU to CPU.
        local_rank: number of this process on its machine.
    """

    device_group: Group = SINGLE_PROCESS
    cpu_group: Group = SINGLE_PROCESS
    local_rank: int = 0

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.device_group.rank

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.device_group.size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and messages."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """Return this process's device; of several processes on a machine, each has a GPU of its own.

        Raises:
            UserError: the machine has no GPU for this process.
        """
        device = resolve_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise UserError(
                f"hardware.device = {name!r} with {self.size} processes: expected auto, cuda or cpu, for every process "
                "takes a GPU of its own"
            )
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"process {self.local_rank} of this machine finds {torch.cuda.device_count()} GPUs: expected one for "
                "each: lower torchrun's --nproc-per-node, or choose hardware.device=cpu"
            )
        return torch.device("cuda", self.local_rank)

    def broadcast_parameters(self, modules: Iterable[torch.nn.Module]) -> None:
        """Copy rank 0's parameters and buffers to all ranks."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self.device_group.broadcast_(tensor.detach())

    def any(self, flag: bool) -> bool:
        """Return whether ``flag`` is True on any rank."""
        return bool(self.cpu_group.all_reduce_(torch.tensor(int(flag))))

    def from_rank0(self, work: Callable[[], T], *, run_on_all: bool = False) -> T:
        """Return the result of ``work`` on rank 0, a small object; other ranks run it only if ``run_on_all``."""
        own = work() if self.is_first or run_on_all else None
        return cast(T, self.cpu_group.all_gather_object(own)[0])

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """Return the result of ``work`` once it has succeeded on every rank.

        Raises:
            RanksError: it failed on another rank with an error which can be reported; rank 0 raises its own error.
        """
        result = None
        failure = None
        try:
            result = work()
        except (UserError, RunFailedError, OSError) as error:
            failure = error
        own_message = None if failure is None else str(failure)
        messages = self.cpu_group.all_gather_object(own_message)
        if failure is not None and self.is_first:
            raise failure
        for rank, message in enumerate(messages):
            if message is not None:
                raise RanksError(f"rank {rank}: {message}") from failure
        return cast(T, result)

    def assert_consistent(self, facts: Mapping[str, Any]) -> None:
        """Check that all ranks agree.

        Args:
            facts: values by name, small and comparable.

        Raises:
            RanksError: two ranks differ; the message names the first difference.
        """
        of_ranks = self.cpu_group.all_gather_object(dict(facts))
        for rank, theirs in enumerate(of_ranks):
            for name in sorted(of_ranks[0].keys() | theirs.keys()):
                one = of_ranks[0].get(name)
                other = theirs.get(name)
                if one != other:
                    raise RanksError(
                        f"rank 0 has {name} = {one!r}, and rank {rank} has {other!r}: expected the same of all "
                        "processes of a run: start all with the same command line, code and data"
                    )


@contextmanager
def init_from_torchrun(environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """Connect the processes which torchrun started; without torchrun, give a single process.

    Args:
        environment: variables by which torchrun says which process this is.

    Raises:
        UserError: some of the variables are missing.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    missing = [name for name in REQUIRED if name not in environment]
    if missing:
        raise UserError(
            f"WORLD_SIZE = {size} and no {missing[0]} in the environment: expected what torchrun sets: start with "
            "torchrun --nproc-per-node=2 -m tokenv train with ..., or unset WORLD_SIZE to train in one process"
        )
    local_rank = int(environment["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda and local_rank < torch.cuda.device_count():
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        rank = dist.get_rank()
        cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield Ranks(Group(rank, size, dist.group.WORLD), Group(rank, size, cpu_group), local_rank)
    finally:
        dist.destroy_process_group()
