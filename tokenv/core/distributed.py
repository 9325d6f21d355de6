"""Share a batch among several processes: noise drawn for all of it, sums over all of it, sharded tensors.

Every process holds the same number of rows. Means over the batch are computed with ``all_reduce_sum``, so that they are
means over the whole batch; ``tokenv.core.expectations`` does so.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from tokenv.core.devices import to_device_async
from tokenv.core.errors import RunFailedError


class LostRankError(RunFailedError):
    """Another process of the run has ended or does not answer."""


@dataclass(frozen=True)
class Group:
    """Group of processes of a run.

    Attributes:
        rank: rank of this process in the group.
        size: number of processes; a single process does not communicate.
        handle: torch's process group.
    """

    rank: int = 0
    size: int = 1
    handle: Any = None

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the processes, without gradient: [..] -> [..]."""
        if self.size == 1:
            return x
        return self.all_reduce_(x.detach().clone(memory_format=torch.contiguous_format))

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum a contiguous tensor without gradient over the processes, in place."""
        if self.size > 1:
            with translate_distributed_errors():
                dist.all_reduce(x, group=self.handle)
        return x

    def broadcast_(self, x: Tensor) -> None:
        """Overwrite a contiguous tensor without gradient with rank 0's."""
        if self.size > 1:
            with translate_distributed_errors():
                dist.broadcast(x, group=self.handle, group_src=0)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """Concatenate the tensors of all processes in the order of ranks, without gradient."""
        if self.size == 1:
            return x
        local = x.detach().contiguous()
        sent = local.view(torch.uint8) if local.dtype == torch.bool else local
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with translate_distributed_errors():
            dist.all_gather(received, sent, group=self.handle)
        return torch.cat([each.view(local.dtype) for each in received], dim)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the small, picklable values of all processes in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with translate_distributed_errors():
            dist.all_gather_object(values, value, group=self.handle)
        return values


SINGLE_PROCESS = Group()
_current_group: ContextVar[Group] = ContextVar("current_group", default=SINGLE_PROCESS)


@contextmanager
def use_group(group: Group) -> Iterator[None]:
    """Declare that ``group`` shares the current batch: rank 0 holds the first rows, and so on."""
    token = _current_group.set(group)
    try:
        yield
    finally:
        _current_group.reset(token)


def current_group() -> Group:
    """Return the processes which share the current batch."""
    return _current_group.get()


def all_reduce_sum(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Sum tensors over the processes which share the batch; shapes stay the same.

    Gradients flow. The processes' losses are summands of one loss: the gradient of a summand is the sum of all
    processes' gradients of the sum.
    """
    group = current_group()
    if group.size == 1:
        return tensors
    total = _AllReduceSum.apply(torch.cat([each.flatten() for each in tensors]), group)
    sums = total.split([each.numel() for each in tensors])
    return tuple(
        sum_.view(each.shape).to(each.dtype) for sum_, each in zip(sums, tensors, strict=True)
    )


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0]), None


def local_rows(x: Tensor, dim: int = -2) -> Tensor:
    """Return this process's rows of a tensor for the whole batch."""
    group = current_group()
    rows = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * rows, rows)


def uniform_like(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw uniform numbers in (0, 1) of the noise's shape, type and device: [.., B, T].

    They are drawn for the whole batch on the generator's device, so that a row's numbers depend neither on the number
    of processes which share the batch nor on their devices.
    """
    *samples, rows, steps = noise.shape if noise.dim() > 1 else (1, *noise.shape)
    device = noise.device if generator is None else generator.device
    shape = (*samples, rows * current_group().size, steps)
    fresh = torch.rand(shape, dtype=noise.dtype, device=device, generator=generator)
    return to_device_async(local_rows(fresh).reshape(noise.shape), noise.device)


@contextmanager
def translate_distributed_errors(*, sure: bool = True) -> Iterator[None]:
    """Raise a ``LostRankError`` instead of torch's error when another process is gone.

    Args:
        sure: whether the code only communicates; otherwise only errors which mention communication are translated.
    """
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # of gloo and of NCCL alike
        if not sure and re.search("gloo|NCCL|nccl|Connection", str(error)) is None:
            raise
        # without the place in gloo's source
        message = re.sub(r"^\[[^]]*\] *", "", str(error).strip())
        reason = re.split(r"\n|\. ", message)[0]
        raise LostRankError(
            f"another process of this run has ended or does not answer ({reason})"
        ) from error


def full_tensor(tensor: Tensor) -> Tensor:
    """Return an unsharded tensor; all processes which hold a shard must call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a tensor which every process holds, sharded as ``like`` is."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gather_full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return unsharded tensors, on the CPU if they were sharded; all ranks must call this together."""
    return {
        name: each.full_tensor().cpu() if isinstance(each, DTensor) else each
        for name, each in tensors.items()
    }
