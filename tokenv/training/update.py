"""One update: the gradients of its rollouts, and further epochs on them."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config.components import Components
from tokenv.config.schema import Config, LossConfig
from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, use_group
from tokenv.core.expectations import masked_mean
from tokenv.env.rescoring import rescore, rescore_head
from tokenv.training.data_parallel import DataParallelGroup
from tokenv.training.losses import TOKEN_COUNTS, compute_losses, rollout_metrics, total_loss
from tokenv.training.metrics import MetricsBuffer
from tokenv.training.optimizers import grad_norm, optimizer_step

POLICY_METRICS = ("clip_fraction", "kl_approx")  # diagnostics of an estimator's further steps
GRAD_NORMS = {"grad_norm_lm": "lm.", "grad_norm_policy": "agent."}  # metric to the prefix of its parameters' names


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of a pass's noise, which depends on the run's seed, the step and the pass's number alone."""
    return (seed * 2_147_483_629 + number * 998_244_353 + step) % 2**62


def backward(
    one_pass: Callable[[], TensorDictBase], components: Components, weights: LossConfig, *, passes: int = 1
) -> tuple[TensorDictBase, dict[str, Tensor]]:
    """Add the gradients of one of an update's ``passes`` rollouts to those of the parameters.

    Returns:
        The rollout, and its losses, those of the whole batch.
    """
    losses: dict[str, Tensor] = {}
    rollouts: list[TensorDictBase] = []

    def loss() -> Tensor:
        rollouts.append(one_pass())
        losses.update(compute_losses(rollouts[0], components))
        return total_loss(losses, weights) / passes

    components.with_full_parameters(loss).backward()
    return rollouts[0], dict(zip(losses, all_reduce_sum(*(each.detach() for each in losses.values())), strict=True))


def accumulate_gradients(
    one_pass: Callable[[int], TensorDictBase], components: Components, weights: LossConfig, group: DataParallelGroup
) -> tuple[MetricsBuffer, list[TensorDictBase]]:
    """Sum the gradients of an update over its passes and over all ranks.

    Args:
        one_pass: function from a pass's number to its rollout.
        components: language model, agent and estimator.
        weights: weights of the losses.
        group: this rank's passes, and the other ranks.

    Returns:
        Metrics, averaged over the update's rollouts (tokens summed), with loss and gradients watched; and this rank's
        rollouts, detached, if further epochs use them.
    """
    sums: dict[str, Tensor] = {}
    rollouts, passes = [], group.assignment.accumulate
    with use_group(group.pass_group):
        for number in group.assignment.passes:
            td, losses = backward(partial(one_pass, number), components, weights, passes=passes)
            for name, value in rollout_metrics(td, losses, components).items():
                if name not in TOKEN_COUNTS:
                    value = value / passes
                sums[name] = sums.get(name, 0) + value
            if components.num_epochs > 1 or components.head_epochs:
                rollouts.append(td.detach())
    parameters = components.named_parameters()
    group.all_reduce_gradients(parameters.values())
    sums = group.all_reduce_metrics(sums)
    device = sums["tokens"].device
    norms = {metric: grad_norm(parameters, prefix, device) for metric, prefix in GRAD_NORMS.items()}
    return MetricsBuffer(sums | norms, watched=(components.lm.codec.unit, *norms)), rollouts


def policy_epochs(
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[TensorDictBase],
    components: Components,
    config: Config,
    group: DataParallelGroup,
) -> MetricsBuffer | None:
    """Make the further steps which the estimator requires, on the rollouts of ``accumulate_gradients``.

    Returns:
        ``POLICY_METRICS``, means over the steps; None without further steps.
    """
    parameters, passes = components.named_parameters(), group.assignment.accumulate
    steps = components.num_epochs - 1 + components.head_epochs
    sums: dict[str, Tensor] = {}
    for rescored in rescored_rollouts(components, rollouts):
        with use_group(group.pass_group):
            for one_pass in rescored:
                td, _ = backward(one_pass, components, config.loss, passes=passes)
                for name in POLICY_METRICS:
                    if (each := td.get((keys.DIAGNOSTICS, name), None)) is None:  # another surrogate's steps
                        continue
                    value = masked_mean(each.double(), td[keys.DECISION_MASK])
                    sums[name] = sums.get(name, 0) + value / (passes * steps)
        group.all_reduce_gradients(parameters.values())
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)
    return MetricsBuffer(group.all_reduce_metrics(sums), watched=()) if sums else None


def rescored_rollouts(
    components: Components, rollouts: Sequence[TensorDictBase]
) -> Iterator[list[Callable[[], TensorDictBase]]]:
    """Yield the rollouts of every further step of an update, each scored again when it is called.

    Args:
        components: language model, agent and estimator.
        rollouts: the update's rollouts, detached.

    Yields:
        The rollouts of one further step; after the epochs follow the steps of the policy alone, with kept encodings.
    """
    for _ in range(components.num_epochs - 1):
        yield [partial(rescore, components.lm, components.agent, td) for td in rollouts]
    for _ in range(components.head_epochs):
        yield [partial(rescore_head, components.agent, td) for td in rollouts]
