"""A model whose parameters, gradients and moments are dealt out over processes (torch's FSDP2).

FSDP gathers what a module needs when its ``forward`` begins, and reduces gradients when the backward pass has left it.
Our passes call many methods of the model, so the root is a module whose ``forward`` is a whole pass, losses included;
each layer gathers its own parameters besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from tokenv.config.components import Components
from tokenv.config.schema import Config
from tokenv.core.distributed import shard_like
from tokenv.storage import checkpoints
from tokenv.training.process_group import Ranks
from tokenv.training.update import make_optimizer

T = TypeVar("T")


class _RootModule(nn.Module):
    """Runs what it is given while the model's parameters are there."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def apply_fsdp(
    parts: Components, optimizer: torch.optim.Optimizer, config: Config, ranks: Ranks
) -> torch.optim.Optimizer:
    """Deal the language model out over ``hardware.apply_fsdp`` successive ranks each; all ranks must do so together.

    Args:
        parts: the whole of which every rank has; its model is dealt out in place.
        optimizer: with the moments of the whole.
        config: the run.
        ranks: its processes.

    Returns:
        An optimiser with the moments of what is here.
    """
    lm, size = parts.lm, config.hardware.fsdp_size
    moments = checkpoints.optimizer_tensors(optimizer, parts.named_parameters())
    replicas = ranks.size // size
    shape, names = ((replicas, size), ("replicate", "shard")) if replicas > 1 else ((size,), ("shard",))
    mesh = init_device_mesh(lm.head.weight.device.type, shape, mesh_dim_names=names)
    for layer in (*lm.down, *lm.mid, *lm.up):
        fully_shard(layer, mesh=mesh)
    root = _RootModule(lm)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # each rank's loss is a part: gradients are summed
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def whole(work: Callable[[], T]) -> T:
        found: T = root(work)
        if not torch.is_grad_enabled():  # else the backward pass does
            cast(FSDPModule, root).reshard()
        return found

    parts.whole = whole
    parameters = parts.named_parameters()
    fresh = make_optimizer(config.train, parameters)
    for name, tensor in moments.items():
        owner, _, key = name.rpartition("/")
        fresh.state[parameters[owner]][key] = tensor if key == "step" else shard_like(tensor, parameters[owner])
    return fresh
