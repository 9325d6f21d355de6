"""Remedies which are to keep the seeds of a run together after it has imitated whitespace, each as a plug-in.

``PYTHONPATH=examples tokenv compare with examples/remedies.yaml jobs=2`` compares them; docs/results.md says what came
out.
"""

import torch
import torch.nn.functional as F
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from tokenv import keys
from tokenv.agents.heuristic import Whitespace
from tokenv.agents.learned import Learned
from tokenv.estimators import Chain, Discount, EarlyExit, ScoreFunction, chain
from tokenv.estimators.baselines import BatchCentre
from tokenv.estimators.rate_targets import LogitPressure
from tokenv.estimators.surrogates import Imitation


class Progress(nn.Module):
    """The share of the first rollouts of training which are over; those of an imitation do not count.

    Args:
        rollouts: rollouts until the share is 1.
    """

    def __init__(self, rollouts: int) -> None:
        super().__init__()
        self.rollouts = rollouts
        self.rollouts_done: Tensor = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self) -> float:
        """Return the share, from 0 to 1; in training mode, count the rollout."""
        share = min(self.rollouts_done.item() / self.rollouts, 1.0)
        if self.training:
            self.rollouts_done += 1
        return share


class RampedPressure(LogitPressure):
    """``LogitPressure`` whose target moves linearly from ``start`` to ``rate`` over the first rollouts.

    Args:
        rate: last target, boundaries per symbol.
        start: first target, such as the rate of an imitated rule.
        rollouts: rollouts until the target is ``rate``.
    """

    def __init__(self, rate: float, start: float = 0.12, rollouts: int = 400) -> None:
        super().__init__(rate)
        self.start = start
        self.last = rate
        self.progress = Progress(rollouts)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T]."""
        self.rate = self.start + self.progress() * (self.last - self.start)
        return super().forward(tensordict)


class AveragedPolicy(Learned):
    """The windowed policy, whose boundaries are drawn with the mean of its earlier parameters.

    ``w <- decay w + (1 - decay) W`` whenever boundaries are scored in training, those of an imitated agent included;
    boundaries are drawn with w, and W learns from their score function. In evaluation the policy is that of w.

    Bias: that of boundaries which another policy drew, without likelihood ratios. Cost: O(T D w).

    Args:
        width: see ``Learned``.
        rate: see ``Learned``.
        window: see ``Learned``.
        scale: see ``Learned``.
        softcap: see ``Learned``.
        decay: share of the mean which is kept.
    """

    def __init__(
        self,
        width: int,
        rate: float = 0.2,
        window: int = 1,
        scale: float = 4.0,
        softcap: float = 15.0,
        decay: float = 0.99,
    ) -> None:
        super().__init__(width, rate, window, scale, softcap)
        self.decay = decay
        self.average: Tensor = nn.Buffer(self.projection.weight.detach().clone())

    def _project(self, encoding: Tensor) -> Tensor:
        weight = self.projection.weight
        if self.training:
            self.average.lerp_(weight.detach(), 1 - self.decay)
        else:
            weight = self.average + (weight - weight.detach())  # the mean's values, with a gradient
        return F.linear(encoding.to(weight.dtype), weight)

    def draw(self, observation: TensorDictBase, noise: Tensor) -> TensorDict:
        """Draw all boundaries at once, in training with the averaged parameters."""
        if not self.training:
            return super().draw(observation, noise)
        encoding = observation[keys.ENCODING].detach()
        projected = F.linear(encoding.to(self.average.dtype), self.average)
        return self.score(observation, self._solve_actions(projected, noise, observation))


class AnnealedImitation(Imitation):
    """Add the cross-entropy of an imitation to the loss of each decision, with a weight which falls to 0.

    Bias: towards the teacher, at first. Cost: as ``Imitation``.

    Args:
        weight: initial weight, in units of the policy loss.
        rollouts: rollouts until the weight is 0.
    """

    in_keys = [keys.LOSS_POLICY, keys.DEMONSTRATION_LOG_PROB]

    def __init__(self, weight: float, rollouts: int) -> None:
        super().__init__(Whitespace())
        self.weight = weight
        self.progress = Progress(rollouts)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add to ``loss_policy``: [.., T]."""
        weight = self.weight * (1 - self.progress())
        of_rewards = tensordict[keys.LOSS_POLICY]
        nats = super().forward(tensordict)[keys.LOSS_POLICY]
        return tensordict.set(keys.LOSS_POLICY, of_rewards + weight * nats)


def annealed_imitation(gamma: float = 0.9, weight: float = 0.1, rollouts: int = 400) -> Chain:
    """``reinforce``, which goes on imitating whitespace at first."""
    return chain(
        EarlyExit(),
        Discount(gamma),
        BatchCentre(),
        ScoreFunction(),
        AnnealedImitation(weight, rollouts),
    )
