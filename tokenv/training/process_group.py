"""The processes that train one run together, as torchrun starts them; alone, nothing is sent.

Every rank holds the whole model and makes the same updates; ``tokenv.training.data_parallel`` says which sequences
are whose, and ``tokenv.core.distributed`` joins what is said of a batch. Rank 0 alone writes and speaks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from tokenv.config.batch_assignment import BatchAssignment
from tokenv.config.hardware import resolve_device
from tokenv.config.schema import TrainConfig
from tokenv.core.distributed import SINGLE_PROCESS, Group
from tokenv.core.errors import RunFailedError, UserError

T = TypeVar("T")
TIMEOUT = timedelta(minutes=10)  # after which a rank that does not answer is given up
BUCKET = 2**25  # gradients sent at a time
NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RanksError(UserError):
    """What every rank raises alike, so that one of them need tell it."""


@dataclass(frozen=True)
class Ranks:
    """All processes of a run.

    Attributes:
        world: sends tensors of the device that the model is on.
        control: sends small things from CPU to CPU.
        local: number of this process on its machine.
    """

    world: Group = SINGLE_PROCESS
    control: Group = SINGLE_PROCESS
    local: int = 0

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.world.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self.world.size

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and speaks."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """This process's device: of several on a machine, each has a GPU of its own.

        Raises:
            UserError: there is none for it.
        """
        device = resolve_device(name)
        if self.size == 1 or device.type != "cuda":
            return device
        if device.index is not None:
            raise UserError(
                f"hardware.device = {name!r} with {self.size} processes: expected auto, cuda or cpu, for every process "
                "takes a GPU of its own"
            )
        if self.local >= torch.cuda.device_count():
            raise UserError(
                f"process {self.local} of this machine finds {torch.cuda.device_count()} GPUs: expected one for each: "
                "lower torchrun's --nproc-per-node, or choose hardware.device=cpu"
            )
        return torch.device("cuda", self.local)

    def team(self, config: TrainConfig, *, together: bool) -> DataParallelGroup:
        """How an update is shared out; all ranks must ask together.

        Args:
            config: how many passes and sequences an update has.
            together: whether all ranks share every pass.

        Raises:
            UserError: it cannot be shared out among so many.
        """
        slots = BatchAssignment.of(config, self.rank, self.size, together=together)
        return DataParallelGroup(self, slots, self._sharers(slots))

    def _sharers(self, slots: BatchAssignment) -> Group:
        if slots.members == 1:
            return SINGLE_PROCESS
        mine = None
        for first in range(0, self.size, slots.members):
            members = list(range(first, first + slots.members))
            handle = dist.new_group(members) if len(members) < self.size else self.world.handle
            if self.rank in members:
                mine = Group(self.rank - first, len(members), handle)
        assert mine is not None
        return mine

    def broadcast_parameters(self, modules: Iterable[torch.nn.Module]) -> None:
        """Give all ranks rank 0's parameters and buffers."""
        for module in modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self.world.broadcast_(tensor.detach())

    def all_reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over all ranks; a parameter that has none on any rank keeps none.

        Of what is dealt out over processes (``tokenv.training.fsdp``) the backward pass has done so.
        """
        if self.size == 1:
            return
        parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        having = self.control.all_reduce_(torch.tensor([int(p.grad is not None) for p in parameters])).tolist()
        gradients = []
        for parameter, ranks in zip(parameters, having, strict=True):
            if ranks:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            total = self.world.all_reduce_(torch.cat([gradient.flatten() for gradient in bucket]))
            pieces = total.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return bool(self.control.all_reduce_(torch.tensor(int(flag))))

    def from_rank0(self, work: Callable[[], T], *, all_work: bool = False) -> T:
        """What ``work`` gives on rank 0, where alone it is done unless all must; small, and can be pickled."""
        return cast(T, self.control.all_gather_object(work() if self.is_first or all_work else None)[0])

    def run_on_all_ranks(self, work: Callable[[], T]) -> T:
        """What ``work`` gives, once it has succeeded on every rank.

        Raises:
            RanksError: it failed elsewhere for a reason that can be told; rank 0 raises its own error.
        """
        found, failed = None, None
        try:
            found = work()
        except (UserError, RunFailedError, OSError) as error:
            failed = error
        messages = self.control.all_gather_object(None if failed is None else str(failed))
        if failed is not None and self.is_first:
            raise failed
        for rank, message in enumerate(messages):
            if message is not None:
                raise RanksError(f"rank {rank}: {message}") from failed
        return cast(T, found)

    def assert_consistent(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that differ.

        Args:
            facts: by name, small and comparable.

        Raises:
            RanksError: the message names the first difference.
        """
        everyone = self.control.all_gather_object(dict(facts))
        for rank, theirs in enumerate(everyone):
            for name in sorted(everyone[0].keys() | theirs.keys()):
                one, other = everyone[0].get(name), theirs.get(name)
                if one != other:
                    raise RanksError(
                        f"rank 0 has {name} = {one!r}, and rank {rank} has {other!r}: expected the same of all "
                        "processes of a run: start all with the same command line, code and data"
                    )


@dataclass(frozen=True)
class DataParallelGroup:
    """How a run's processes share out its updates.

    Attributes:
        ranks: the processes.
        slots: this one's sequences of every update.
        sharers: who shares its passes with it.
    """

    ranks: Ranks
    slots: BatchAssignment
    sharers: Group

    def all_reduce_metrics(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum what was added up over each rank's passes; of those who share a pass, the first tells of it."""
        if self.ranks.size == 1:
            return dict(sums)
        own = torch.stack([value.double() for value in sums.values()])
        total = self.ranks.world.all_reduce_(own if self.sharers.rank == 0 else torch.zeros_like(own))
        return dict(zip(sums, total.unbind(), strict=True))


@contextmanager
def init_from_torchrun(environment: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """The processes that torchrun started, or this one alone.

    Args:
        environment: where torchrun says which process this is.

    Raises:
        UserError: it says half of it.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        raise UserError(
            f"WORLD_SIZE = {size} and no {missing[0]} in the environment: expected what torchrun sets: start with "
            "torchrun --nproc-per-node=2 -m tokenv train with ..., or unset WORLD_SIZE to train in one process"
        )
    local, cuda = int(environment["LOCAL_RANK"]), torch.cuda.is_available()
    if cuda and local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    try:
        rank = dist.get_rank()
        control = dist.new_group(backend="gloo", timeout=TIMEOUT)
        yield Ranks(Group(rank, size, dist.group.WORLD), Group(rank, size, control), local)
    finally:
        dist.destroy_process_group()


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Some gradients of one type at a time."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        for gradient in gradients:
            if gradient.dtype == dtype:
                if bucket and sum(map(Tensor.numel, bucket)) + gradient.numel() > BUCKET:
                    yield bucket
                    bucket = []
                bucket.append(gradient)
        if bucket:
            yield bucket
