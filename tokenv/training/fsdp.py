"""Fully sharded data parallelism (torch's FSDP2): parameters, gradients and moments are sharded over processes.

FSDP gathers the parameters of a module when its ``forward`` begins, and reduces gradients after its backward pass. One
pass of this project calls many methods of the model, so the root is a module whose ``forward`` runs a whole pass,
including its losses; in addition, each layer gathers its own parameters.
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
from tokenv.training.optimizers import make_optimizer
from tokenv.training.process_group import Ranks

T = TypeVar("T")


class _RootModule(nn.Module):
    """Run a function while the parameters of the model are gathered."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def apply_fsdp(
    components: Components, optimizer: torch.optim.Optimizer, config: Config, ranks: Ranks
) -> torch.optim.Optimizer:
    """Shard the language model over groups of ``hardware.fsdp_size`` successive ranks; all ranks call this together.

    Args:
        components: components with the full model, which is sharded in place.
        optimizer: optimizer with the full moments; of no use afterwards.
        config: configuration of the run.
        ranks: processes of the run.

    Returns:
        An optimizer of the sharded parameters, with sharded moments.
    """
    lm, size = components.lm, config.hardware.fsdp_size
    moments = checkpoints.optimizer_tensors(optimizer, components.named_parameters())
    replicas = ranks.size // size
    shape, names = ((replicas, size), ("replicate", "shard")) if replicas > 1 else ((size,), ("shard",))
    mesh = init_device_mesh(lm.head.weight.device.type, shape, mesh_dim_names=names)
    for layer in (*lm.down, *lm.mid, *lm.up):
        fully_shard(layer, mesh=mesh)
    root = _RootModule(lm)
    fully_shard(root, mesh=mesh)
    for module in root.modules():
        if isinstance(module, FSDPModule):  # a rank's loss is its share of the batch's: gradients are summed
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    def run_with_full_parameters(work: Callable[[], T]) -> T:
        result: T = root(work)
        if not torch.is_grad_enabled():  # otherwise the backward pass reshards
            cast(FSDPModule, root).reshard()
        return result

    components.whole = run_with_full_parameters
    parameters = components.named_parameters()
    sharded = make_optimizer(config.train, parameters)
    for name, tensor in moments.items():
        owner, _, key = name.rpartition("/")
        sharded.state[parameters[owner]][key] = tensor if key == "step" else shard_like(tensor, parameters[owner])
    return sharded
