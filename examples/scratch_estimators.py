"""Estimators for a start from scratch, each with a stage of twenty lines: less noise, or no early collapse.

``PYTHONPATH=examples tokenv train with small estimator.name=scratch_estimators:optimal_token`` trains with one;
docs/bench.md says what they are worth.
"""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.estimators import Chain, Discount, EarlyExit, ScoreFunction, Stage, chain
from tokenv.estimators.baselines import LeaveOneOutBatch
from tokenv.estimators.statistics import leave_one_out_mean, masked_mean


class FittedEarlyExit(Stage):
    """Reward relative to a multiple of the early exit's likelihood: ``R = log p - c log p_early``.

    ``c = Cov(log p, log p_early) / Var(log p_early)`` over decisions, the coefficient of a control variate with the
    least variance, from running means over earlier rollouts; 1 before the first. The paper has c = 1.

    Bias: none, for every policy: c depends on earlier rollouts only, and the early exit reads no boundary. Cost: that
    of ``EarlyExit``.
    """

    in_keys = [keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY, keys.DECISION_MASK]
    out_keys = [keys.REWARD]

    def __init__(self, decay: float = 0.95) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("moments", torch.zeros(2))  # covariance and variance

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")`` [.., T, 1]; in training mode, then update c."""
        full, early = (tensordict[key].detach() for key in self.in_keys[:2])
        covariance, variance = self.moments
        c = torch.where(variance > 0, covariance / variance.where(variance > 0, 1.0), 1.0).to(
            full.dtype
        )
        mask = tensordict[keys.DECISION_MASK]
        centred = early - masked_mean(early, mask)
        if self.training:
            now = torch.stack([masked_mean(centred * x, mask) for x in (full, early)])
            self.moments.lerp_(now.to(self.moments.dtype), 1 - self.decay)
        tensordict.set((keys.DIAGNOSTICS, "early_coefficient"), c.expand(full.shape))
        return tensordict.set(keys.REWARD, (full - c * early).unsqueeze(-1))


class OptimalTokenBaseline(Stage):
    """Subtract a weighted mean over the other sequences, position by position.

    ``b_i = sum_{b' != b} W_{i,b'} G_{i,b'} / sum_{b' != b} W_{i,b'}``, ``W_i = sum_{j<=i} (a_j - p_j)^2``: the optimal
    token baseline (Li et al. 2026, arXiv 2602.07078), whose gradient norms are those of the logits. Without
    ``cumulative``, W_i is the last term alone.

    Bias: none, for every policy: the other sequences' actions are independent of this one's. Cost: O(T) elementwise.
    """

    in_keys = [keys.ADVANTAGE, keys.ACTION, keys.BOUNDARY_PROB, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def __init__(self, cumulative: bool = True) -> None:
        super().__init__()
        self.cumulative = cumulative

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., B, T]."""
        advantage, mask = tensordict[keys.ADVANTAGE], tensordict[keys.DECISION_MASK]
        score = tensordict[keys.ACTION] - tensordict[keys.BOUNDARY_PROB].detach()
        energy = score.square().where(mask, 0.0)
        weight = energy.cumsum(-1).where(mask, 0.0) if self.cumulative else energy
        return tensordict.set(keys.ADVANTAGE, advantage - leave_one_out_mean(advantage, weight, -2))


class ResampledBlocks(Stage):
    """Draw a second sample which differs in every other block of positions, and compare the two there.

    In resampled blocks ``A_1 = G_1 - G_2`` and ``A_2 = G_2 - G_1``, as in RLOO; the noise of all other blocks is shared
    by both samples and cancels as far as it does not depend on these. In the other blocks the baseline is the mean over
    the other sequences.

    Bias: none, for every policy: given the shared noise, the other sample does not depend on a resampled decision.
    Cost: as ``rloo`` with two samples and ``reward_only``.

    Args:
        size: positions of a block.
    """

    in_keys = [keys.ADVANTAGE, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]
    samples = 2
    reward_only = True

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.size = size

    def resampled(self, noise: Tensor) -> Tensor:
        """Return whether a position lies in a resampled block, bool [B, T]; every other row begins with one."""
        rows, steps = (torch.arange(n, device=noise.device) for n in noise.shape[-2:])
        return (steps // self.size + rows[:, None]) % 2 == 0

    def couple(
        self, noise: Tensor, decision_mask: Tensor, generator: torch.Generator | None
    ) -> Tensor:
        """Share the noise of the blocks which are not resampled: [2, B, T]."""
        first, second = noise.unbind(-3)
        return torch.stack([first, second.where(self.resampled(noise), first)], -3)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Centre ``advantage``: [.., 2, B, T]."""
        advantage = tensordict[keys.ADVANTAGE]
        difference = advantage - advantage.flip(-3)
        texts = advantage - leave_one_out_mean(advantage, tensordict[keys.DECISION_MASK], -2)
        return tensordict.set(keys.ADVANTAGE, difference.where(self.resampled(advantage), texts))


class AnnealedKL(Stage):
    """Add ``beta KL(pi(. | x_<=i, a_<i) || Bernoulli(rate))`` to the loss of each decision, at first.

    beta falls linearly from ``weight`` to 0 over ``rollouts`` rollouts. The policy, which at first has noisy rewards of
    a model that knows little, cannot collapse meanwhile. The gradient is exact given the earlier decisions.

    Bias: that of another objective, while beta > 0. Cost: O(T) elementwise.

    Args:
        rate: boundaries per symbol.
        weight: initial beta, in units of the policy loss.
        rollouts: rollouts until beta is 0.
    """

    in_keys = [keys.LOSS_POLICY, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]
    out_keys = [keys.LOSS_POLICY]
    unbiased = False

    def __init__(self, rate: float, weight: float = 3.0, rollouts: int = 300) -> None:
        super().__init__()
        self.rate, self.weight, self.rollouts = rate, weight, rollouts
        self.register_buffer("rollouts_done", torch.zeros(()))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add to ``loss_policy``: [.., T]; in training mode, count the rollout."""
        policy = torch.distributions.Bernoulli(logits=tensordict[keys.BOUNDARY_LOGITS])
        prior = torch.distributions.Bernoulli(torch.full_like(policy.logits, self.rate))
        divergence = torch.distributions.kl_divergence(policy, prior).where(
            tensordict[keys.DECISION_MASK], 0.0
        )
        beta = self.weight * (1 - self.rollouts_done / self.rollouts).clamp(min=0).to(
            divergence.dtype
        )
        if self.training:
            self.rollouts_done += 1
        return tensordict.set(keys.LOSS_POLICY, tensordict[keys.LOSS_POLICY] + beta * divergence)


def fitted_early_exit(gamma: float = 0.99) -> Chain:
    """``leave_one_out`` with a fitted coefficient of the early exit."""
    return chain(FittedEarlyExit(), Discount(gamma), LeaveOneOutBatch(), ScoreFunction())


def optimal_token(gamma: float = 0.99, cumulative: bool = True) -> Chain:
    """``leave_one_out`` with the optimal token baseline."""
    return chain(EarlyExit(), Discount(gamma), OptimalTokenBaseline(cumulative), ScoreFunction())


def blocks(gamma: float = 0.99, size: int = 32) -> Chain:
    """``rloo`` whose second sample is drawn anew in every other block only."""
    return chain(
        EarlyExit(), Discount(gamma), ResampledBlocks(size), ScoreFunction(), num_samples=2
    )


def annealed_kl(
    rate: float, gamma: float = 0.99, weight: float = 3.0, rollouts: int = 300
) -> Chain:
    """``leave_one_out``, kept near even odds of the rate at first."""
    parts: list[Any] = [EarlyExit(), Discount(gamma), LeaveOneOutBatch(), ScoreFunction()]
    return chain(*parts, AnnealedKL(rate, weight, rollouts))
