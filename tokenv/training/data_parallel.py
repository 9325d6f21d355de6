"""Data parallelism: which sequences of an update belong to which rank, and sums of gradients and metrics over ranks.

Every rank computes gradients on its own sequences (``RankStream``); ``DataParallelGroup`` sums them, so that all ranks
make the same update. ``tokenv.core.distributed`` computes the statistics of a batch which several ranks share.

Fully sharded data parallelism is torch's FSDP2: parameters, gradients and moments are sharded over processes. FSDP
gathers the parameters of a module when its ``forward`` begins, and reduces gradients after its backward pass. One pass
of this project calls many methods of the model, so the root is ``tokenv.training.update.TrainingStep``, whose
``forward`` runs a whole pass, including its losses; in addition, each layer gathers its own parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tokenv.config.components import Components
from tokenv.config.hardware import BatchAssignment
from tokenv.config.schema import Config, TrainConfig
from tokenv.core import checkpoints
from tokenv.core.distributed import SINGLE_PROCESS, Group, shard_like
from tokenv.core.sequences import SequenceBatch
from tokenv.data.stream import Streams
from tokenv.training.optimizers import make_optimizer
from tokenv.training.process_group import TIMEOUT, Ranks

BUCKET_SIZE = 2**25  # gradient entries sent at a time


@dataclass(frozen=True)
class DataParallelGroup:
    """How the processes of a run share its updates.

    Attributes:
        ranks: all processes.
        assignment: this rank's sequences of every update.
        pass_group: ranks which share their passes with this one.
    """

    ranks: Ranks
    assignment: BatchAssignment
    pass_group: Group

    @classmethod
    def create(
        cls, ranks: Ranks, config: TrainConfig, *, split_each_pass: bool
    ) -> DataParallelGroup:
        """Share updates among ranks; all ranks must call this together.

        Args:
            ranks: all processes.
            config: number of passes and sequences of an update.
            split_each_pass: whether all ranks share every pass.

        Raises:
            UserError: the sequences cannot be shared evenly among so many ranks.
        """
        assignment = BatchAssignment.of(
            config, ranks.rank, ranks.size, split_each_pass=split_each_pass
        )
        if assignment.members == 1:
            return cls(ranks, assignment, SINGLE_PROCESS)
        pass_group = SINGLE_PROCESS
        for first in range(0, ranks.size, assignment.members):
            members = list(range(first, first + assignment.members))
            handle = (
                dist.new_group(members, timeout=TIMEOUT)
                if len(members) < ranks.size
                else ranks.device_group.handle
            )
            if ranks.rank in members:
                pass_group = Group(ranks.rank - first, len(members), handle)
        return cls(ranks, assignment, pass_group)

    def all_reduce_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over all ranks; a parameter which has none on any rank keeps none.

        The backward pass has summed those of sharded parameters already (``tokenv.training.data_parallel``).
        """
        if self.ranks.size == 1:
            return
        parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        has_gradient = torch.tensor([int(parameter.grad is not None) for parameter in parameters])
        counts = self.ranks.cpu_group.all_reduce_(has_gradient).tolist()
        gradients = []
        for parameter, count in zip(parameters, counts, strict=True):
            if count:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
        for bucket in _buckets(gradients):
            total = self.ranks.device_group.all_reduce_(
                torch.cat([gradient.flatten() for gradient in bucket])
            )
            pieces = total.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))

    def all_reduce_metrics(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Add up sums over each rank's passes; of ranks which share a pass, only the first one's count."""
        if self.ranks.size == 1:
            return dict(sums)
        own = torch.stack([value.double() for value in sums.values()])
        if self.pass_group.rank != 0:
            own = torch.zeros_like(own)
        total = self.ranks.device_group.all_reduce_(own)
        return dict(zip(sums, total.unbind(), strict=True))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield gradients of one type, at most ``BUCKET_SIZE`` entries at a time."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        bucket: list[Tensor] = []
        for gradient in gradients:
            if gradient.dtype == dtype:
                if bucket and sum(map(Tensor.numel, bucket)) + gradient.numel() > BUCKET_SIZE:
                    yield bucket
                    bucket = []
                bucket.append(gradient)
        if bucket:
            yield bucket


class RankStream:
    """A rank's sequences of the streams which all ranks read: row r of a pass is the same text for any number of ranks.

    Each of S streams provides those sequences of an update which a rank of S would read: if W ranks divide S, each rank
    reads S / W streams, which no other rank reads. Otherwise ranks share a stream, and each skips the sequences of the
    others.

    After an update's last pass the streams stand behind the whole update, so that their state is independent of ranks.

    Args:
        streams: streams of the run; those of other ranks are never read.
        assignment: this rank's sequences of every update.
    """

    def __init__(self, streams: Streams, assignment: BatchAssignment) -> None:
        self.seq_len = streams.seq_len
        self._streams = streams
        self._assignment = assignment
        count = len(streams.streams)
        self._sequences_per_stream = assignment.accumulate * assignment.batch_size // count
        # from a pass and a row to a stream and the sequence's number among the stream's
        self._source = {}
        for stream in range(count):
            each = replace(assignment, rank=stream, world=count)
            for number, index in enumerate(itertools.product(each.passes, each.rows)):
                self._source[index] = (stream, number)
        self._used = frozenset(
            self._source[index][0]
            for index in itertools.product(assignment.passes, assignment.rows)
        )
        self._next = 0  # number of the next one among this rank's passes
        # in each stream, since the beginning of the update
        self._position = dict.fromkeys(self._used, 0)

    def next(self, count: int) -> SequenceBatch:
        """Return all ``count`` sequences of this rank's next pass."""
        assignment = self._assignment
        batches = []
        assert count == len(assignment.rows), (count, assignment.rows)
        own = [self._source[assignment.passes[self._next], row] for row in assignment.rows]
        for stream, sequences in itertools.groupby(own, key=itemgetter(0)):
            numbers = [number for _, number in sequences]
            self._skip_to(stream, numbers[0])
            batches.append(self._streams.streams[stream].next(len(numbers)))
            self._position[stream] += len(numbers)
        self._next += 1
        if self._next == len(assignment.passes):
            for stream in self._used:
                self._skip_to(stream, self._sequences_per_stream)
            self._next = 0
            self._position = dict.fromkeys(self._used, 0)
        return SequenceBatch.join(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's streams after an update; ``Streams.merge_states`` merges all ranks'."""
        return self._streams.state_dict(self._used)

    def _skip_to(self, stream: int, position: int) -> None:
        self._streams.streams[stream].skip(position - self._position[stream])
        self._position[stream] = position


@contextmanager
def unsharded(step: nn.Module) -> Iterator[None]:
    """Gather the parameters outside of decoder layers for the calls in this context; each layer gathers its own.

    Args:
        step: what ``apply_fsdp`` has sharded, after its first forward pass; another module is left alone.
    """
    if not isinstance(step, FSDPModule):
        yield
        return
    step.unshard()
    try:
        yield
    finally:
        step.reshard()


def apply_fsdp(
    step: nn.Module,
    components: Components,
    optimizer: torch.optim.Optimizer,
    config: Config,
    ranks: Ranks,
) -> torch.optim.Optimizer:
    """Shard the language model over groups of ``hardware.fsdp_size`` successive ranks; all ranks call this together.

    Args:
        step: module whose forward pass is a pass of an update: ``tokenv.training.update.TrainingStep``. The language
            model is its only submodule, which is sharded in place.
        components: components with the full model.
        optimizer: optimizer with the full moments; of no use afterwards.
        config: configuration of the run.
        ranks: processes of the run.

    Returns:
        An optimizer of the sharded parameters, with sharded moments.
    """
    lm = components.lm
    size = config.hardware.fsdp_size
    moments = checkpoints.optimizer_tensors(optimizer, components.named_parameters())
    replicas = ranks.size // size
    shape, names = (
        ((replicas, size), ("replicate", "shard")) if replicas > 1 else ((size,), ("shard",))
    )
    mesh = init_device_mesh(lm.head.weight.device.type, shape, mesh_dim_names=names)
    for layer in (*lm.down, *lm.mid, *lm.up):
        fully_shard(layer, mesh=mesh)
    fully_shard(step, mesh=mesh)
    for module in step.modules():
        # a rank's loss is its share of the batch's: gradients are summed
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    parameters = components.named_parameters()
    sharded = make_optimizer(config.train, parameters)
    for name, tensor in moments.items():
        owner, _, key = name.rpartition("/")
        sharded.state[parameters[owner]][key] = (
            tensor if key == "step" else shard_like(tensor, parameters[owner])
        )
    return sharded
