"""Learn from boundaries which another policy drew."""

import math

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import mean_over


class FixedRateProposal(Stage):
    """Draw boundaries from a fixed-rate Bernoulli instead of the policy, and weigh rewards by importance.

    ``R_{t+1} <- R_{t+1} prod_{j=t-h..t} pi(a_j | .) / q(a_j)`` with q(1) = rate, so that
    ``E_q[weighted R_{t+1} grad log pi(a_i)] = E_pi[R_{t+1} grad log pi(a_i)]`` for i <= t (per-decision importance
    sampling, Precup et al. 2000). As a warm start: after ``rollouts`` rollouts the policy draws its own boundaries.
    The authors' early code (github.com/SamD770/bitter-lesson-tokenization, June 2025) explored so.

    Bias: none with ``horizon=None`` (all decisions before a reward are weighed), for every policy, but the variance of
    the weights then grows exponentially with T; with a horizon h, decisions more than h steps before a reward have no
    weight. Cost: one pass. Logs ``effective_sample_size``, ``(sum w)^2 / sum w^2`` over the batch, averaged over
    positions, as a fraction of the batch. The language model learns from the boundaries as drawn.

    Args:
        rate: boundary probability of the proposal, in (0, 1).
        horizon: decisions h before a reward which are weighed besides its own; None for all.
        rollouts: number of rollouts which the proposal draws; None for all.

    Raises:
        ValueError: ``rate`` outside (0, 1), a negative ``horizon`` or ``rollouts``.
    """

    in_keys = [keys.REWARD, keys.ACTION, keys.ACTION_LOG_PROB, keys.DECISION_MASK]
    out_keys = [keys.REWARD]

    def __init__(self, rate: float, horizon: int | None = 8, rollouts: int | None = None) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"rate = {rate}: expected boundaries per symbol in (0, 1), such as 0.2")
        for name, value in (("horizon", horizon), ("rollouts", rollouts)):
            if value is not None and value < 0:
                raise ValueError(f"{name} = {value}: expected None or 0 or more")
        self.rate, self.horizon, self.rollouts = rate, horizon, rollouts
        self.unbiased = horizon is None
        self.rollouts_done: Tensor
        self.register_buffer("rollouts_done", torch.zeros((), dtype=torch.long))

    def _on_policy(self) -> bool:
        return self.rollouts is not None and int(self.rollouts_done) >= self.rollouts

    def propose(self, noise: Tensor) -> Tensor | None:
        """Return ``[u < rate]``, or None after the warm start."""
        return None if self._on_policy() else (noise < self.rate).long()

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Weigh ``("next", "reward")``: [.., T, 1]."""
        if self._on_policy():
            return tensordict
        mask = tensordict[keys.DECISION_MASK]
        action = tensordict[keys.ACTION].to(tensordict[keys.ACTION_LOG_PROB].dtype)
        proposal_log_prob = action * math.log(self.rate) + (1 - action) * math.log(1 - self.rate)
        log_ratio = (tensordict[keys.ACTION_LOG_PROB].detach() - proposal_log_prob).where(mask, 0.0)
        log_weight = log_ratio.cumsum(-1)
        if self.horizon is not None and self.horizon + 1 < log_weight.shape[-1]:
            log_weight = log_weight - F.pad(log_weight, (self.horizon + 1, 0))[..., : log_weight.shape[-1]]
        weight = log_weight.exp()
        size = mean_over(weight, mask, -2).square() / mean_over(weight.square(), mask, -2).clamp(min=1e-30)
        tensordict.set((keys.DIAGNOSTICS, "effective_sample_size"), size.expand(weight.shape))
        if self.training:
            self.rollouts_done += 1
        return tensordict.set(keys.REWARD, tensordict[keys.REWARD] * weight.unsqueeze(-1))
