"""Policies which draw an exact number of boundaries in every sequence.

``ExactCount`` (the agent ``exact_count``) draws while the sequence is read: it tilts the learned policy by how many
boundaries are left. ``ConditionalBernoulli`` (the agent ``conditional``) draws for a history which is known:
independent decisions with odds ``w_i = exp(l_i)``, given that k of them are 1 (Chen & Liu 1997, Statistica Sinica 7,
875-892; Chen, Dempster & Liu 1994). It is computed from sums over all subsets of a suffix,

    ``R(c, i) = sum of prod_{j in S} w_j over S among the positions from i on with |S| = c``
    ``R(c, i) = R(c, i + 1) + w_i R(c - 1, i + 1)``,

for a subset of k positions has the probability ``prod_{j in S} w_j / R(k, 0)``, and, drawn from left to right with c
left, ``P(a_i = 1 | earlier) = w_i R(c - 1, i + 1) / R(c, i)``. A constant added to all l_i changes nothing.
"""

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import (
    BoundaryDistribution,
    Observation,
    Policy,
    boundary_count,
    boundary_counts,
    check_exact_count,
    forced_action,
)
from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.errors import COUNT, POSITIVE, check_value
from tokenv.core.rates import RateRange

# log of 0: of empty sums, and of impossible odds; finite, so that gradients are not NaN
NEVER = -1e30


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

    in_keys = [
        keys.ENCODING,
        keys.LAST_ACTIONS,
        keys.POSITION,
        keys.DECISION_MASK,
        keys.TOKEN_COUNT,
    ]
    fixed_count = True

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
        self.num_positions, self.count = boundary_count(rate, seq_len, rates)

    @property
    def autoregressive(self) -> bool:
        """Always True: decisions depend on earlier ones through the count."""
        return True

    def _counts(self, observation: Observation) -> int | Tensor:
        """Return the number of boundaries of the whole sequence."""
        if self.rates is None:
            return self.count
        return boundary_counts(observation[keys.TARGET_RATE], self.seq_len)

    def _tilt(
        self, logits: Tensor, observation: Observation, token_count: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tilted logits, where a decision is free, and the actions where it is not."""
        left = (self._counts(observation) - token_count).clamp(min=0)
        positions = (self.num_positions - observation[keys.POSITION]).clamp(min=1)
        free = (left > 0) & (left < positions)
        odds = left.clamp(min=1) / (positions - left).clamp(min=1)
        start = self.bias if self.rates is None else self._initial_logit(observation)
        return logits + odds.to(logits.dtype).log() - start, free, (left >= positions).long()

    def _distribution(
        self, logits: Tensor, observation: Observation, token_count: Tensor
    ) -> BoundaryDistribution:
        decision_mask = observation[keys.DECISION_MASK]
        tilted, free, forced = self._tilt(logits, observation, token_count)
        forced = torch.where(decision_mask, forced, forced_action(observation).expand(forced.shape))
        return BoundaryDistribution(tilted, decision_mask & free, forced)

    @torch.no_grad()
    def _solve_actions(
        self, projected: Tensor, noise: Tensor, observation: TensorDictBase
    ) -> Tensor:
        """Draw one position after the other: the count so far matters, and changes too often for Jacobi iteration."""
        actions: list[Tensor] = []
        count = torch.zeros(noise.shape[:-1], dtype=torch.long, device=noise.device)
        nothing = torch.zeros_like(count)
        for i in range(noise.shape[-1]):
            earlier = [actions[i - j] if i >= j else nothing for j in range(1, self.window + 1)]
            logits = self._logits(projected[..., i, :], earlier).expand(noise.shape[:-1])
            action = self._distribution(logits, observation[..., i], count).from_noise(
                noise[..., i]
            )
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
            dist = self._distribution_given(
                self._condition_on_rate(observation), action, observation
            )
        count = self.count if self.rates is None else "the requested number of"
        check_exact_count(dist, action, "exact_count", count)
        return super().score(observation, action)

    def get_dist(self, tensordict: Observation) -> BoundaryDistribution:
        """Return the distribution of the actions for observations of any batch shape (TorchRL's actor interface)."""
        logits = super().get_dist(tensordict).logits
        return self._distribution(logits, tensordict, tensordict[keys.TOKEN_COUNT])


def log_elementary_symmetric(log_odds: Tensor, most: int) -> Tensor:
    """Return ``log R(c, i)`` of all suffixes and counts c up to ``most``: a loop over T of vectors of ``most + 1``.

    Args:
        log_odds: l, [.., T]; ``NEVER`` where no boundary can be drawn.
        most: largest count.

    Returns:
        [.., T + 1, most + 1], in the precision of l; about ``NEVER`` or less where no subset has that many positions.
    """
    never = torch.full_like(log_odds[..., :1], NEVER)
    row = torch.cat([torch.zeros_like(never), never.expand(*never.shape[:-1], most)], -1)
    rows = [row]
    for log_odds_i in log_odds.split(1, -1)[::-1]:
        row = torch.logaddexp(row, torch.cat([never, row[..., :-1] + log_odds_i], -1))
        rows.append(row)
    return torch.stack(rows[::-1], -2)


def decision_logits(log_odds: Tensor, after: Tensor, left: Tensor) -> Tensor:
    """Return the log odds of every decision, drawn from left to right: ``l_i + log R(c - 1, i + 1) - log R(c, i + 1)``.

    They are meaningless where no decision is left: where no further boundary is to be drawn, or one at every position.

    Args:
        log_odds: l, [.., B, T].
        after: ``log R(., i + 1)`` of every position, [.., B, T, most + 1].
        left: c, boundaries which are left to draw at each position, int64 [.., K, B, T] with more leading dimensions or
            none.

    Returns:
        The log odds, in the shape of ``left``.
    """
    after = after.expand(*left.shape, after.shape[-1])
    with_one, without = (
        after.gather(-1, c.unsqueeze(-1)).squeeze(-1) for c in ((left - 1).clamp(min=0), left)
    )
    return log_odds + with_one - without


class ConditionalBernoulli(Policy):
    """The conditional Bernoulli law: independent decisions, given that floor(N * rate) of them are boundaries.

    Each way to draw that many has a probability proportional to ``prod_i exp(a_i l_i)``; drawing and log-probability
    are exact (``tokenv.agents.exact_count``). The probability of a decision is that given all earlier ones, so that
    their product is that of the law and score-function estimators are unbiased; the gradient of the log-probability of
    a draw by l_i is a_i less the marginal probability of i. A constant added to all logits changes nothing: unlike
    ``ExactCount`` it cannot use up its count early by raising them.

    **It reads ahead**: l_i depends on the encodings on both sides of i, on their mean over the history, and on the
    distance to the history's end, and even without these a decision depends on all later logits through the law. So it
    is for direct forecasts (``codec.direct``), where nothing of the history is predicted; elsewhere it raises an error,
    and so does acting one position at a time.

    If fewer positions are left than the count (padding), a boundary is drawn at all of them. A rate target is not
    needed: set ``loss.rate=0``. Before training all draws are equally probable. Cost: a loop over the positions, of
    vectors of the count.

    Args:
        width: model width D.
        seq_len: symbols N, of which floor(N * rate) are boundaries, the first one included and the last one excluded.
        rate: boundaries per symbol.
        reach: receptive field: positions on each side whose encodings are read one by one.
        hidden: hidden units of the network.
        softcap: bound of the logits.

    Raises:
        ValueError: a size below 1, or ``softcap`` not positive; see ``boundary_count`` for ``rate``.
    """

    in_keys = [keys.ENCODING, keys.POSITION, keys.DECISION_MASK]
    non_causal = True
    fixed_count = True

    def __init__(
        self,
        width: int,
        seq_len: int,
        rate: float = 0.2,
        reach: int = 8,
        hidden: int = 32,
        softcap: float = 10.0,
    ) -> None:
        super().__init__()
        check_value("agent.reach", reach, COUNT)
        check_value("agent.hidden", hidden, COUNT)
        check_value("agent.softcap", softcap, POSITIVE)
        self.num_positions, self.count = boundary_count(rate, seq_len)
        self.reach = reach
        self.softcap = softcap
        self.read = nn.Linear(width, hidden, bias=False)
        self.near = nn.Parameter(torch.randn(2 * reach + 1, hidden) * (2 * reach + 1) ** -0.5)
        self.place = nn.Linear(2, hidden)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    @property
    def autoregressive(self) -> bool:
        """Always True: decisions depend on earlier ones through the count."""
        return True

    def _log_odds(self, observation: TensorDictBase) -> Tensor:
        """Return the log odds of every position, from the encodings of the history's symbols: [.., T]."""
        decision_mask = observation[keys.DECISION_MASK]
        known = (decision_mask | (observation[keys.POSITION] == 0)).unsqueeze(-1)
        number = known.sum(-2, keepdim=True)
        encoding = observation[keys.ENCODING].to(self.read.weight.dtype)
        read = self.read(F.layer_norm(encoding, encoding.shape[-1:])) * known
        padded = F.pad(read, (0, 0, self.reach, self.reach))
        near = torch.stack(
            [padded[..., j : j + read.shape[-2], :] * tap for j, tap in enumerate(self.near)]
        ).sum(0)
        distance = (number - observation[keys.POSITION].unsqueeze(-1)).clamp(min=1).to(read.dtype)
        position = self.place(
            torch.cat([distance / number, distance.log() / number.to(read.dtype).log1p()], -1)
        )
        hidden = F.gelu(near + position) * known
        mean = (hidden.sum(-2, keepdim=True) / number).expand_as(hidden)
        logits = self.out(F.gelu(self.mix(torch.cat([hidden, mean], -1)))).squeeze(-1)
        return torch.where(decision_mask, self.softcap * torch.tanh(logits / self.softcap), NEVER)

    def _conditional_law(self, observation: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return log odds [.., T] and ``log R(., i + 1)`` [.., T, count], without the first symbol's boundary."""
        log_odds = self._log_odds(observation)
        return log_odds, log_elementary_symmetric(log_odds, self.count - 1)[..., 1:, :]

    def _distribution_given(
        self, observation: TensorDictBase, log_odds: Tensor, after: Tensor, action: Tensor
    ) -> BoundaryDistribution:
        """Return the distribution of every decision, given all earlier ones of ``action``, [.., T]."""
        decision_mask = observation[keys.DECISION_MASK]
        total = decision_mask.sum(-1, keepdim=True).clamp(max=self.count - 1)
        drawn = action * decision_mask
        left = (total - (drawn.cumsum(-1) - drawn)).clamp(min=0)  # 0 if more were drawn
        remaining = decision_mask.flip(-1).cumsum(-1).flip(-1)
        free = decision_mask & (left > 0) & (left < remaining)
        logits = torch.where(free, decision_logits(log_odds, after, left), 0.0)
        forced = (decision_mask & (left > 0) & (left >= remaining)).long()
        return BoundaryDistribution(
            logits, free, torch.where(decision_mask, forced, forced_action(observation))
        )

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries, one position after the other, because the count so far matters."""
        log_odds, after = self._conditional_law(observation)
        action = self._solve_actions(observation, log_odds.detach(), after.detach(), noise)
        return self._distribution_given(observation, log_odds, after, action).to_tensordict(action)

    @torch.no_grad()
    def _solve_actions(
        self, observation: TensorDictBase, log_odds: Tensor, after: Tensor, noise: Tensor
    ) -> Tensor:
        decision_mask = observation[keys.DECISION_MASK]
        forced = forced_action(observation)
        remaining = decision_mask.flip(-1).cumsum(-1).flip(-1)
        threshold = torch.logit(noise)
        left = remaining[..., 0].clamp(max=self.count - 1).expand(noise.shape[:-1])
        actions = []
        for i in range(noise.shape[-1]):
            drawn = decision_logits(log_odds[..., i], after[..., i, :], left) > threshold[..., i]
            decision = (left > 0) & (drawn | (left >= remaining[..., i]))
            action = torch.where(decision_mask[..., i], decision.long(), forced[..., i])
            left = left - action * decision_mask[..., i]
            actions.append(action)
        return torch.stack(actions, -1)

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Return the outputs for given boundaries, int64 [.., B, T], in parallel.

        Raises:
            ValueError: this policy would never draw them.
        """
        dist = self._distribution_given(observation, *self._conditional_law(observation), action)
        check_exact_count(dist, action, "conditional", self.count)
        return dist.to_tensordict(action)

    def get_dist(self, tensordict: Observation) -> BoundaryDistribution:
        """Raise an error: this policy reads whole histories.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "agent.name=conditional decides by the whole history, of which an observation holds one symbol: roll out "
            "in one pass, or choose another agent, such as exact_count, to step with"
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Raise an error: this agent cannot act at one position.

        Raises:
            ValueError: always.
        """
        self.get_dist(tensordict)
        return tensordict
