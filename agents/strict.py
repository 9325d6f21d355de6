"""A policy which draws an exact number of boundaries in every sequence."""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.agents.base import (
    BoundaryDistribution,
    Observation,
    boundary_count,
    boundary_counts,
    check_exact_count,
    forced_action,
)
from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.rates import RateRange


class ExactCount(Learned):
    """``Learned``, tilted by how many boundaries are left: exactly floor(N * rate) in every sequence.

    With r boundaries left to draw in m positions, ``l_i = l_learned + log(r / (m - r)) - logit(rate)``: never where
    r = 0, always where r = m. Without a preference (l_learned = logit(rate)) this draws uniformly without
    replacement. The log-probability is exactly this law's own, so score-function estimators stay unbiased for it.
    (Strictly enforced compression as in ReinPatch, arXiv 2603.26097, which does not say how.)

    **It uses up its count early**, whatever the discount: the fraction of the remaining positions that become
    boundaries is constant on average only while the odds ``exp(l_learned) (1 - rate) / rate`` are 1 on average. Both an
    even increase of all logits, which is rewarded because an earlier boundary is used for longer, and mere contrast
    between them raise these odds (docs/series.md, Exactly k boundaries). ``ConditionalBernoulli``, for histories which
    are known as a whole, has no such direction.

    It is not the learned policy's own law *given* the count. In that law every decision depends on the preferences in
    the rest of the sequence, which a causal model may not know. Its decisions depend on earlier ones through the
    count, whatever the window; estimators for policies which ignore their past reject it. Drawing is sequential. A rate
    target is not needed: set ``loss.rate=0``.

    Args:
        width: model width D.
        rate: boundaries per symbol.
        seq_len: symbols N of a sequence; floor(N * rate) boundaries are drawn, the first symbol's included.
        window: earlier boundaries w >= 0 which a decision reads; see ``Learned`` for ``scale`` and ``softcap``.
        rates: range of the target rates; every sequence then has its own number.
    """

    in_keys = [keys.ENCODING, keys.LAST_ACTIONS, keys.POSITION, keys.DECISION_MASK, keys.TOKEN_COUNT]

    def __init__(
        self,
        width: int,
        seq_len: int,
        rate: float = 0.2,
        window: int = 8,
        scale: float = 16.0,
        softcap: float = 15.0,
        rates: RateRange | None = None,
    ) -> None:
        super().__init__(width, rate, window, scale, softcap, rates=rates)
        self.seq_len = seq_len
        self.num_positions, self.count = boundary_count(rate if rates is None else rates.min, seq_len)

    @property
    def autoregressive(self) -> bool:
        """Always True: decisions depend on earlier ones through the count."""
        return True

    def _counts(self, observation: Observation) -> int | Tensor:
        """Return the number of boundaries of the whole sequence."""
        return self.count if self.rates is None else boundary_counts(observation[keys.TARGET_RATE], self.seq_len)

    def _tilt(self, logits: Tensor, observation: Observation, token_count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tilted logits, where a decision is free, and the actions where it is not."""
        left = (self._counts(observation) - token_count).clamp(min=0)
        positions = (self.num_positions - observation[keys.POSITION]).clamp(min=1)
        free = (left > 0) & (left < positions)
        odds = left.clamp(min=1) / (positions - left).clamp(min=1)
        start = self.bias if self.rates is None else self._initial_logit(observation)
        return logits + odds.to(logits.dtype).log() - start, free, (left >= positions).long()

    def _distribution(self, logits: Tensor, observation: Observation, token_count: Tensor) -> BoundaryDistribution:
        decision_mask = observation[keys.DECISION_MASK]
        tilted, free, forced = self._tilt(logits, observation, token_count)
        forced = torch.where(decision_mask, forced, forced_action(observation).expand(forced.shape))
        return BoundaryDistribution(tilted, decision_mask & free, forced)

    @torch.no_grad()
    def _solve_actions(self, projected: Tensor, noise: Tensor, observation: TensorDictBase) -> Tensor:
        """Draw one position after the other: the count so far matters, and changes too often for Jacobi iteration."""
        actions: list[Tensor] = []
        count = torch.zeros(noise.shape[:-1], dtype=torch.long, device=noise.device)
        nothing = torch.zeros_like(count)
        for i in range(noise.shape[-1]):
            earlier = [actions[i - j] if i >= j else nothing for j in range(1, self.window + 1)]
            logits = self._logits(projected[..., i, :], earlier).expand(noise.shape[:-1])
            action = self._distribution(logits, observation[..., i], count).from_noise(noise[..., i])
            count = count + action
            actions.append(action)
        return torch.stack(actions, -1)

    def _distribution_given(
        self, projected: Tensor, action: Tensor, observation: TensorDictBase
    ) -> BoundaryDistribution:
        logits = self._logits(projected, self._earlier(action)).expand(action.shape)
        return self._distribution(logits, observation, action.cumsum(-1) - action)

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs for given boundaries, int64 [.., B, T], in parallel.

        Raises:
            ValueError: this policy would never draw them.
        """
        with torch.no_grad():
            dist = self._distribution_given(self._condition_on_rate(observation), action, observation)
        check_exact_count(dist, action, "strict", self.count if self.rates is None else "the requested number of")
        return super().score(observation, action)

    def get_dist(self, tensordict: Observation) -> BoundaryDistribution:
        """Return the distribution of the actions for observations of any batch shape (TorchRL's actor interface)."""
        logits = super().get_dist(tensordict).logits
        return self._distribution(logits, tensordict, tensordict[keys.TOKEN_COUNT])
