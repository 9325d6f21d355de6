"""A policy that draws an exact number of boundaries in every sequence."""

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from tokenv.agents.base import (
    BoundaryDistribution,
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

    With r boundaries left to be drawn in m places, ``l_i = l_learned + log(r / (m - r)) - logit(rate)``: never where
    r = 0, always where r = m. Without a preference (l_learned = logit(rate)) this draws uniformly without
    replacement. The log-probability is exactly this law's own, so score-function estimators stay unbiased for it.
    (Strictly enforced compression as in ReinPatch, arXiv 2603.26097, which does not say how.)

    **It spends its count early**, whatever the discount: what is left per place that is left stays put on average only
    while the odds ``exp(l_learned) (1 - rate) / rate`` are 1 on average, and both an even push on all logits, which an
    earlier boundary's longer use rewards, and mere contrast between them raise these (docs/series.md, Exactly k
    boundaries). Where the whole history is known, ``Conditional`` has no such direction.

    What it is not: the learned policy's own law *given* the count. That law weighs every decision by all that the
    rest of the sequence would like, which a causal model may not know. Its decisions depend on earlier ones through
    the count, whatever the window; estimators for policies that ignore their past refuse it. Drawing is sequential.
    The rate needs no pressure: set ``loss.rate=0``.

    Args:
        width: model width D.
        rate: boundaries per symbol.
        seq_len: symbols N of a sequence; floor(N * rate) boundaries are drawn, the first symbol's included.
        window: see ``Learned``; so for ``scale`` and ``softcap``.
        rates: see there; every sequence then has its own number.
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
        self.places, self.count = boundary_count(rate if rates is None else rates.min, seq_len)

    @property
    def autoregressive(self) -> bool:
        """Always: through the count."""
        return True

    def _counts(self, observation: TensorDictBase) -> int | Tensor:
        """Boundaries of the whole sequence."""
        return self.count if self.rates is None else boundary_counts(observation[keys.TARGET_RATE], self.seq_len)

    def _tilt(self, logits: Tensor, observation: TensorDictBase, token_count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tilted logits, where somebody decides at all, and what is done where nobody does."""
        left = (self._counts(observation) - token_count).clamp(min=0)
        places = (self.places - observation[keys.POSITION]).clamp(min=1)
        free = (left > 0) & (left < places)
        odds = left.clamp(min=1) / (places - left).clamp(min=1)
        start = self.bias if self.rates is None else self._start(observation)
        return logits + odds.to(logits.dtype).log() - start, free, (left >= places).long()

    def _distribution(self, logits: Tensor, observation: TensorDictBase, token_count: Tensor) -> BoundaryDistribution:
        decides = observation[keys.DECISION_MASK]
        tilted, free, rest = self._tilt(logits, observation, token_count)
        forced = torch.where(decides, rest, forced_action(observation).expand(rest.shape))
        return BoundaryDistribution(tilted, decides & free, forced)

    @torch.no_grad()
    def _solve_actions(self, projected: Tensor, noise: Tensor, observation: TensorDictBase) -> Tensor:
        """One position after the other: the count so far decides, and it changes too often for Jacobi rounds."""
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

    def _given(self, projected: Tensor, action: Tensor, observation: TensorDictBase) -> BoundaryDistribution:
        logits = self._logits(projected, self._earlier(action)).expand(action.shape)
        return self._distribution(logits, observation, action.cumsum(-1) - action)

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Log-probabilities and their like of given boundaries, in parallel: int64 [.., B, T].

        Raises:
            ValueError: this policy would never draw them.
        """
        with torch.no_grad():
            dist = self._given(self._condition_on_rate(observation), action, observation)
        check_exact_count(dist, action, "strict", self.count if self.rates is None else "the asked number of")
        return super().score(observation, action)

    def get_dist(self, tensordict: TensorDictBase) -> BoundaryDistribution:
        """The distribution of the actions, given stored observations of any batch shape (TorchRL's actor face)."""
        logits = super().get_dist(tensordict).logits
        return self._distribution(logits, tensordict, tensordict[keys.TOKEN_COUNT])
