"""Draw an exact number of boundaries in a known history by the conditional Bernoulli law.

Independent decisions with odds ``w_i = exp(l_i)``, given that k of them are 1 (Chen & Liu 1997, Statistica Sinica 7,
875-892; Chen, Dempster & Liu 1994). All that is needed of it are sums over all subsets of a suffix,

    ``R(c, i) = sum of prod_{j in S} w_j over S among the places from i on with |S| = c``
    ``R(c, i) = R(c, i + 1) + w_i R(c - 1, i + 1)``,

for a subset of k places has the probability ``prod_{j in S} w_j / R(k, 0)``, and, drawn from left to right with c left,
``P(a_i = 1 | earlier) = w_i R(c - 1, i + 1) / R(c, i)``. Adding one number to all l_i changes nothing.
"""

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv.agents.base import BoundaryDistribution, Policy, boundary_count, check_exact_count, forced_action
from tokenv.core import keys

NEVER = -1e30  # log of a sum without a term, and log odds of what cannot be; finite, so that gradients are numbers


def log_elementary_symmetric(log_odds: Tensor, most: int) -> Tensor:
    """``log R(c, i)`` of all suffixes and counts c up to ``most``: a loop over T of vectors of ``most + 1``.

    Args:
        log_odds: l, [.., T]; ``NEVER`` where nothing can be drawn.
        most: largest count.

    Returns:
        [.., T + 1, most + 1], of the precision of l; about ``NEVER`` or less where no subset has that many places.
    """
    never = torch.full_like(log_odds[..., :1], NEVER)
    row = torch.cat([torch.zeros_like(never), never.expand(*never.shape[:-1], most)], -1)
    rows = [row]
    for here in log_odds.split(1, -1)[::-1]:
        row = torch.logaddexp(row, torch.cat([never, row[..., :-1] + here], -1))
        rows.append(row)
    return torch.stack(rows[::-1], -2)


def decision_logits(log_odds: Tensor, after: Tensor, left: Tensor) -> Tensor:
    """Log odds of every decision, drawn from left to right: ``l_i + log R(c - 1, i + 1) - log R(c, i + 1)``.

    They mean nothing where there is nothing to decide: where no place is left to be drawn, or all are.

    Args:
        log_odds: l, [.., B, T].
        after: ``log R(., i + 1)`` of every place, [.., B, T, most + 1].
        left: c, how many are left to be drawn at each place, int64 [.., K, B, T] with more leading dimensions or none.

    Returns:
        Of the shape of ``left``.
    """
    after = after.expand(*left.shape, after.shape[-1])
    with_one, without = (after.gather(-1, c.unsqueeze(-1)).squeeze(-1) for c in ((left - 1).clamp(min=0), left))
    return log_odds + with_one - without


class ConditionalBernoulli(Policy):
    """The conditional Bernoulli law: independent decisions, given that floor(N * rate) of them are boundaries.

    Of all ways to draw that many, each has a probability proportional to ``prod_i exp(a_i l_i)``; drawing and
    log-probability are exact (``tokenv.agents.conditional``). The probability that is told of a decision is that
    given all
    earlier ones, so that their product is the law's own and score-function estimators are unbiased; the gradient of the
    whole draw's log-probability by l_i is a_i less the chance that i is drawn at all. An even push on all logits
    changes nothing: unlike ``Strict`` it cannot spend its count early by being generous.

    **It reads ahead**: l_i is made of the encodings on both sides of i, of their mean over the history, and of how far
    the history's end is, and even without that a decision knows all later logits through the law. So it is for direct
    forecasts (``model.direct``), where nothing of the history is predicted; elsewhere it is refused, and so is acting
    one position at a time.

    Where fewer places are left than the count asks for (padding), all are drawn. The rate needs no pressure: set
    ``loss.rate=0``. At its start all draws are equally likely. Cost: a loop over the places, of vectors of the count.

    Args:
        width: model width D.
        seq_len: symbols N, of which floor(N * rate) are boundaries, the first one included and the last one excluded.
        rate: boundaries per symbol.
        reach: places on each side whose encodings are read one by one.
        hidden: units of the network that reads.
        softcap: bound of the logits.

    Raises:
        ValueError: a size below 1, or ``softcap`` not positive; see ``boundary_count`` for ``rate``.
    """

    in_keys = [keys.ENCODING, keys.POSITION, keys.DECISION_MASK]
    whole = True

    def __init__(
        self, width: int, seq_len: int, rate: float = 0.2, reach: int = 8, hidden: int = 32, softcap: float = 10.0
    ) -> None:
        super().__init__()
        if reach < 1 or hidden < 1:
            raise ValueError(f"agent.reach = {reach}, agent.hidden = {hidden}: expected at least 1")
        if softcap <= 0:
            raise ValueError(f"agent.softcap = {softcap}: expected a positive number")
        self.places, self.count = boundary_count(rate, seq_len)
        self.reach, self.softcap = reach, softcap
        self.read = nn.Linear(width, hidden, bias=False)
        self.near = nn.Parameter(torch.randn(2 * reach + 1, hidden) * (2 * reach + 1) ** -0.5)
        self.place = nn.Linear(2, hidden)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.out = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    @property
    def autoregressive(self) -> bool:
        """Always: through the count."""
        return True

    def _log_odds(self, observation: TensorDictBase) -> Tensor:
        """Log odds of every place, from all encodings of symbols that are decided at, and of the first: [.., T]."""
        decides = observation[keys.DECISION_MASK]
        known = (decides | (observation[keys.POSITION] == 0)).unsqueeze(-1)
        number = known.sum(-2, keepdim=True)
        encoding = observation[keys.ENCODING].to(self.read.weight.dtype)
        read = self.read(F.layer_norm(encoding, encoding.shape[-1:])) * known
        padded = F.pad(read, (0, 0, self.reach, self.reach))
        near = torch.stack([padded[..., j : j + read.shape[-2], :] * tap for j, tap in enumerate(self.near)]).sum(0)
        ahead = (number - observation[keys.POSITION].unsqueeze(-1)).clamp(min=1).to(read.dtype)
        place = self.place(torch.cat([ahead / number, ahead.log() / number.to(read.dtype).log1p()], -1))
        seen = F.gelu(near + place) * known
        mean = (seen.sum(-2, keepdim=True) / number).expand_as(seen)
        logits = self.out(F.gelu(self.mix(torch.cat([seen, mean], -1)))).squeeze(-1)
        return torch.where(decides, self.softcap * torch.tanh(logits / self.softcap), NEVER)

    def _law(self, observation: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Log odds [.., T], and ``log R(., i + 1)`` [.., T, count]: one boundary is the first symbol's."""
        log_odds = self._log_odds(observation)
        return log_odds, log_elementary_symmetric(log_odds, self.count - 1)[..., 1:, :]

    def _distribution(
        self, observation: TensorDictBase, log_odds: Tensor, after: Tensor, left: Tensor
    ) -> BoundaryDistribution:
        """Of every decision given all earlier ones: ``left`` boundaries are still to be drawn, [.., T]."""
        decides = observation[keys.DECISION_MASK]
        remain = decides.flip(-1).cumsum(-1).flip(-1)
        free = decides & (left > 0) & (left < remain)
        logits = torch.where(free, decision_logits(log_odds, after, left), 0.0)
        rest = (decides & (left > 0) & (left >= remain)).long()
        return BoundaryDistribution(logits, free, torch.where(decides, rest, forced_action(observation)))

    def _left(self, observation: TensorDictBase, action: Tensor) -> Tensor:
        """Boundaries that are still to be drawn at each place; 0 where more were drawn than there should be."""
        wanted = observation[keys.DECISION_MASK].sum(-1, keepdim=True).clamp(max=self.count - 1)
        drawn = action * observation[keys.DECISION_MASK]
        return (wanted - (drawn.cumsum(-1) - drawn)).clamp(min=0)

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries, one position after the other: the count so far decides."""
        log_odds, after = self._law(observation)
        action = self._solve_actions(observation, log_odds.detach(), after.detach(), noise)
        return self._given(observation, log_odds, after, action).answer(action)

    @torch.no_grad()
    def _solve_actions(self, observation: TensorDictBase, log_odds: Tensor, after: Tensor, noise: Tensor) -> Tensor:
        decides, first = observation[keys.DECISION_MASK], forced_action(observation)
        remain = decides.flip(-1).cumsum(-1).flip(-1)
        threshold = torch.logit(noise)
        left = remain[..., 0].clamp(max=self.count - 1).expand(noise.shape[:-1])
        actions = []
        for i in range(noise.shape[-1]):
            drawn = decision_logits(log_odds[..., i], after[..., i, :], left) > threshold[..., i]
            wanted = (left > 0) & (drawn | (left >= remain[..., i]))
            action = torch.where(decides[..., i], wanted.long(), first[..., i])
            left = left - action * decides[..., i]
            actions.append(action)
        return torch.stack(actions, -1)

    def _given(
        self, observation: TensorDictBase, log_odds: Tensor, after: Tensor, action: Tensor
    ) -> BoundaryDistribution:
        return self._distribution(observation, log_odds, after, self._left(observation, action))

    def score(self, observation: TensorDictBase, action: Tensor) -> TensorDict:
        """Log-probabilities and their like of given boundaries, in parallel: int64 [.., B, T].

        Raises:
            ValueError: this policy would never draw them.
        """
        dist = self._given(observation, *self._law(observation), action)
        check_exact_count(dist, action, "conditional", self.count)
        return dist.answer(action)

    def get_dist(self, tensordict: TensorDictBase) -> BoundaryDistribution:
        """Refuse to judge single observations.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "agent.name=conditional decides by the whole history, of which an observation holds one symbol: roll out "
            "in one pass, or choose another agent, such as strict, to step with"
        )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Refuse to act at one position.

        Raises:
            ValueError: always.
        """
        self.get_dist(tensordict)
        return tensordict
