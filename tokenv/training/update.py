"""One update: the gradients of its rollouts, and further epochs on them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.config.components import Components
from tokenv.config.schema import LossConfig
from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, use_group
from tokenv.core.expectations import masked_mean
from tokenv.env.random_inputs import derive_seed, sample_target_rates
from tokenv.env.rescoring import rescore, rescore_head
from tokenv.env.rollout import rollout
from tokenv.training.data_parallel import DataParallelGroup
from tokenv.training.losses import TOKEN_COUNTS, compute_losses, rollout_metrics, total_loss
from tokenv.training.metrics import MetricsBuffer
from tokenv.training.optimizers import grad_norm, optimizer_step

POLICY_METRICS = ("clip_fraction", "kl_approx")  # diagnostics of an estimator's further steps
# metric to the prefix of its parameters' names
GRAD_NORMS = {"grad_norm_lm": "lm.", "grad_norm_policy": "agent."}


def micro_batch_seed(seed: int, step: int, number: int) -> int:
    """Return the seed of a pass's noise, which depends on the run's seed, the step and the pass's number alone."""
    return (seed * 2_147_483_629 + number * 998_244_353 + step) % 2**62


class PassInput(NamedTuple):
    """What a pass of an update reads.

    Attributes:
        symbol_BN: sequences on the model's device, [B, N, *symbol_shape].
        seed: seed of the noise and of the target rates.
        length_B: symbols of each sequence if they differ; the rest of a row is padding.
        noise: uniform numbers which decide the actions; None draws them.
    """

    symbol_BN: Tensor
    seed: int
    length_B: Tensor | None = None
    noise: Tensor | None = None


class StoredPass(NamedTuple):
    """A pass which is scored again, after agent or model have changed.

    Attributes:
        rollout: rollout of the pass, detached.
        head_only: whether only the agent has changed.
    """

    rollout: TensorDictBase
    head_only: bool


class PassLosses(NamedTuple):
    """Losses of a pass.

    Attributes:
        total: what is differentiated: this process's share of the weighted sum.
        shares: this process's shares of all losses, detached, by name.
        rollout: the pass's rollout, detached.
    """

    total: Tensor
    shares: dict[str, Tensor]
    rollout: TensorDictBase


class TrainingStep(nn.Module):
    """What an update differentiates: one pass through model, agent and estimator, and its losses.

    All of it happens in ``forward``, where FSDP gathers the parameters of a model which is sharded over processes.

    Args:
        components: language model, agent, estimator and rate target.
        weights: weights of the losses.

    Attributes:
        components: what the next pass uses; the model must stay the same.
        weights: weights of the next pass.
    """

    def __init__(self, components: Components, weights: LossConfig) -> None:
        super().__init__()
        self.lm = components.lm  # the agent, which FSDP does not shard, is no submodule
        self.components = components
        self.weights = weights

    def forward(self, batch: PassInput | StoredPass) -> PassLosses:
        """Compute the losses of new sequences, or those of stored boundaries under the present policy."""
        if isinstance(batch, PassInput):
            td = self._roll_out(batch)
        elif batch.head_only:
            td = rescore_head(self.components.agent, batch.rollout)
        else:
            td = rescore(
                self.lm,
                self.components.agent,
                batch.rollout,
                detach_encoder=self.components.detach_encoder,
            )
        losses = compute_losses(td, self.components)
        total = total_loss(losses, self.weights)
        shares = {name: loss.detach() for name, loss in losses.items()}
        return PassLosses(total, shares, td.detach())

    def _roll_out(self, batch: PassInput) -> TensorDictBase:
        agent = self.components.agent
        symbol_BN = batch.symbol_BN
        rate_B = None
        if agent.rates is not None:
            rate_generator = torch.Generator().manual_seed(derive_seed(batch.seed))
            rate_B = sample_target_rates(
                agent.rates, len(symbol_BN), symbol_BN.device, rate_generator
            )
        return rollout(
            self.lm,
            agent,
            symbol_BN,
            self.components.sampling,
            noise=batch.noise,
            length_B=batch.length_B,
            generator=torch.Generator().manual_seed(batch.seed),
            rate=rate_B,
        )


def accumulate_gradients(
    step: TrainingStep, batches: Iterable[PassInput], group: DataParallelGroup
) -> tuple[MetricsBuffer, list[TensorDictBase]]:
    """Sum the gradients of an update over its passes and over all ranks.

    Args:
        step: what is differentiated.
        batches: this rank's passes.
        group: this rank, and the others.

    Returns:
        Metrics, averaged over the update's rollouts (tokens summed), with loss and gradients watched; and this rank's
        rollouts, detached, if further epochs use them.
    """
    sums: dict[str, Tensor] = {}
    rollouts = []
    components = step.components
    passes = group.assignment.accumulate
    with use_group(group.pass_group):
        for batch in batches:
            losses = step(batch)
            (losses.total / passes).backward()
            joined = all_reduce_sum(*losses.shares.values())
            of_batch = dict(zip(losses.shares, joined, strict=True))
            for name, value in rollout_metrics(losses.rollout, of_batch, components).items():
                if name not in TOKEN_COUNTS:
                    value = value / passes
                sums[name] = sums.get(name, 0) + value
            if components.further_steps:
                rollouts.append(losses.rollout)
    parameters = components.named_parameters()
    group.all_reduce_gradients(parameters.values())
    sums = group.all_reduce_metrics(sums)
    device = sums["tokens"].device
    norms = {metric: grad_norm(parameters, prefix, device) for metric, prefix in GRAD_NORMS.items()}
    return MetricsBuffer(sums | norms, watched=(components.lm.codec.unit, *norms)), rollouts


def policy_epochs(
    step: TrainingStep,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[TensorDictBase],
    group: DataParallelGroup,
    max_grad_norm: float,
) -> MetricsBuffer | None:
    """Make the further steps which the estimator requires, on the rollouts of ``accumulate_gradients``.

    After the epochs follow the steps of the policy alone, with kept encodings.

    Returns:
        ``POLICY_METRICS``, means over the steps; None without further steps.
    """
    components = step.components
    parameters = components.named_parameters()
    passes = group.assignment.accumulate
    epochs = components.further_steps
    sums: dict[str, Tensor] = {}
    for head_only in epochs:
        with use_group(group.pass_group):
            for td in rollouts:
                losses = step(StoredPass(td, head_only))
                (losses.total / passes).backward()
                for name, value in _policy_metrics(losses.rollout).items():
                    sums[name] = sums.get(name, 0) + value / (passes * len(epochs))
        group.all_reduce_gradients(parameters.values())
        optimizer_step(optimizer, parameters, max_grad_norm)
    if not sums:
        return None
    return MetricsBuffer(group.all_reduce_metrics(sums), watched=())


def _policy_metrics(td: TensorDictBase) -> dict[str, Tensor]:
    """Return those of ``POLICY_METRICS`` which the estimator's surrogate writes."""
    found = {}
    for name in POLICY_METRICS:
        each = td.get((keys.DIAGNOSTICS, name), None)
        if each is not None:
            found[name] = masked_mean(each.double(), td[keys.DECISION_MASK])
    return found
