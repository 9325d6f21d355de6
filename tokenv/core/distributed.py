"""Share a batch among several processes: noise drawn for all of it, sums over all of it, sharded tensors.

Each process holds as many rows. Whoever takes a mean over the batch adds up over the processes with
``all_reduce_sum``, so that the batch's statistics are those of the whole batch; ``tokenv.estimators.statistics`` does.
"""

from __future__ import annotations

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

from tokenv.core.errors import RunFailedError


class LostRankError(RunFailedError):
    """Another process of the run has ended, or does not answer."""


@dataclass(frozen=True)
class Group:
    """Some of a run's processes.

    Attributes:
        rank: of this one among them.
        size: how many they are; one sends nothing.
        handle: torch's process group.
    """

    rank: int = 0
    size: int = 1
    handle: Any = None

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes, without gradient: [..] -> [..]."""
        if self.size == 1:
            return x
        return self.all_reduce_(x.detach().clone(memory_format=torch.contiguous_format))

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The same, in the place of ``x``, which is contiguous and without gradient."""
        if self.size > 1:
            with translate_distributed_errors():
                dist.all_reduce(x, group=self.handle)
        return x

    def first(self, x: Tensor) -> None:
        """Put what rank 0 holds in the place of ``x``, which is contiguous and without gradient."""
        if self.size > 1:
            with translate_distributed_errors():
                dist.broadcast(x, group=self.handle, group_src=0)

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """What all processes hold, behind one another in the order of their ranks, without gradient."""
        if self.size == 1:
            return x
        plain = x.detach().contiguous()
        sent = plain.view(torch.uint8) if plain.dtype == torch.bool else plain
        parts = [torch.empty_like(sent) for _ in range(self.size)]
        with translate_distributed_errors():
            dist.all_gather(parts, sent, group=self.handle)
        return torch.cat([part.view(plain.dtype) for part in parts], dim)

    def all_gather_object(self, mine: Any) -> list[Any]:
        """What all processes hold, which is small and can be pickled, in the order of their ranks."""
        if self.size == 1:
            return [mine]
        all_of_them: list[Any] = [None] * self.size
        with translate_distributed_errors():
            dist.all_gather_object(all_of_them, mine, group=self.handle)
        return all_of_them


SINGLE_PROCESS = Group()
_sharers: ContextVar[Group] = ContextVar("sharers", default=SINGLE_PROCESS)


@contextmanager
def use_group(group: Group) -> Iterator[None]:
    """While entered, the batch at hand is one that ``group`` shares: rank 0 holds the first rows, and so on."""
    token = _sharers.set(group)
    try:
        yield
    finally:
        _sharers.reset(token)


def current_group() -> Group:
    """Who shares the batch at hand."""
    return _sharers.get()


def all_reduce_sum(*parts: Tensor) -> tuple[Tensor, ...]:
    """Sums over all who share the batch: each of its shape.

    Gradients flow. What each process makes of a sum is taken for a part of one loss, so that the gradient of a summand
    is the sum of all that the processes say of the sum.
    """
    group = current_group()
    if group.size == 1:
        return parts
    total = _AllReduceSum.apply(torch.cat([part.flatten() for part in parts]), group)
    pieces = total.split([part.numel() for part in parts])
    return tuple(piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True))


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0]), None


def local_rows(x: Tensor, dim: int = -2) -> Tensor:
    """This process's rows of what stands for the whole batch."""
    group = current_group()
    rows = x.shape[dim] // group.size
    return x.narrow(dim, group.rank * rows, rows)


def uniform_like(noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fresh uniform numbers in (0, 1): [.., B, T] of the noise's shape, type and device.

    Drawn for the whole batch and on the generator's device, so that a row's numbers depend neither on how many
    processes share the batch nor on where they compute.
    """
    *samples, rows, steps = noise.shape if noise.dim() > 1 else (1, *noise.shape)
    place = noise.device if generator is None else generator.device
    shape = (*samples, rows * current_group().size, steps)
    fresh = torch.rand(shape, dtype=noise.dtype, device=place, generator=generator)
    return local_rows(fresh).reshape(noise.shape).to(noise.device)


@contextmanager
def translate_distributed_errors(*, sure: bool = True) -> Iterator[None]:
    """What torch raises where another process is gone becomes a ``LostRankError``.

    Args:
        sure: whether nothing but sending happens here; else errors count that speak of it.
    """
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:  # of gloo and of NCCL alike
        if not sure and re.search("gloo|NCCL|nccl|Connection", str(error)) is None:
            raise
        told = re.sub(r"^\[[^]]*\] *", "", str(error).strip())  # where in gloo
        reason = re.split(r"\n|\. ", told)[0]
        raise LostRankError(f"another process of this run has ended or does not answer ({reason})") from error


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor, in each of the processes that hold it; these must ask together. Others are whole as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor that every process has the part that it has of ``like``; all of it where that is not dealt out."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def gather_full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors, on the CPU where they were dealt out; all ranks must ask together."""
    return {
        name: tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
    }
