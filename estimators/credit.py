"""Compute the reward of a prediction, and credit rewards to actions."""

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.core import keys
from tokenv.core.errors import COUNT, FRACTION, NOT_NEGATIVE, check_value
from tokenv.core.rewards import relative_log_likelihood
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import leave_one_out_mean, log_explained_variance


class Likelihood(Stage):
    """The plain reward: ``R_{i+1} = log p(x_{i+1} | x_<=i, a_<=i)``, detached (arXiv 2602.13940, eq. 12).

    Bias: none. Cost: none. Its variance includes that of the difficulty of the text, whatever the boundaries.
    """

    in_keys = [keys.LOG_LIKELIHOOD]
    out_keys = [keys.REWARD]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")``: [.., T, 1] in nats."""
        return tensordict.set(keys.REWARD, tensordict[keys.LOG_LIKELIHOOD].detach().unsqueeze(-1))


class EarlyExit(Stage):
    """Reward relative to the model's own early exit.

    ``R_{i+1} = log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)``, detached (Dauncey & Wattenhofer
    2026, arXiv 2602.13940, eq. 15). This subtracts the part of the reward which does not depend on boundaries.

    Bias: none. The early exit reads no boundary, so what is subtracted does not depend on the actions.
    Cost: the early-exit head. This is the environment's own reward; with this stage a chain states it explicitly.
    """

    in_keys = [keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY]
    out_keys = [keys.REWARD]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``("next", "reward")``: [.., T, 1] in nats."""
        reward = relative_log_likelihood(
            tensordict[keys.LOG_LIKELIHOOD], tensordict[keys.LOG_LIKELIHOOD_EARLY]
        )
        return tensordict.set(keys.REWARD, reward)


def discounted_sum(reward_T: Tensor, gamma: float) -> Tensor:
    """Return ``G_i = sum_{j>=0} gamma^j r_{i+j}`` along the last dimension, [.., T] -> [.., T].

    It is a scan by doubling: log2(T) elementwise passes, in any precision, without powers which underflow.
    """
    total = reward_T
    step = 1
    while step < reward_T.shape[-1]:
        total = total + gamma**step * F.pad(total[..., step:], (0, step))
        step *= 2
    return total


class Discount(Stage):
    """Credit action a_i with the discounted rewards which follow it.

    ``G_i = sum_{j>=0} gamma^j R_{i+j+1}`` (arXiv 2602.13940, eq. 16). The first reward which a_i can affect is the
    prediction of x_{i+1}, which TorchRL stores at step i.

    Bias: none for gamma = 1; below, rewards at distance j have the weight gamma^j, and the gradient is that of an
    objective with a shorter horizon. Cost: O(T log T) elementwise.

    G is a sum of about 1 / (1 - gamma) rewards, so that gamma also changes the weight of the policy loss relative to
    the rate target's. ``scaled`` corrects this: ``A_i = (1 - gamma) G_i`` has the scale of one reward for any gamma.

    Args:
        gamma: discount factor in [0, 1].
        scaled: whether to multiply by 1 - gamma.

    Raises:
        ValueError: ``gamma`` outside [0, 1], or 1 and ``scaled``.
    """

    in_keys = [keys.REWARD]
    out_keys = [keys.ADVANTAGE]

    def __init__(self, gamma: float = 0.99, scaled: bool = False) -> None:
        super().__init__()
        check_value("gamma", gamma, FRACTION)
        if scaled and gamma == 1:
            raise ValueError(
                "scaled = True with gamma = 1 gives advantages of 0: expected gamma below 1, or scaled = False"
            )
        self.gamma = gamma
        self.scaled = scaled
        self.unbiased = gamma == 1

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``advantage``: [.., T] in nats."""
        credit = discounted_sum(tensordict[keys.REWARD].squeeze(-1), self.gamma)
        if self.scaled:
            credit = (1 - self.gamma) * credit
        return tensordict.set(keys.ADVANTAGE, credit)


class BoundaryCredit(Stage):
    """Credit action a_i with the rewards before the k-th next boundary.

    ``G_i = sum_{j=0..m-i-1} gamma^j R_{i+j+1}``, m the position of the k-th boundary after i (no end if there are
    fewer). It includes a boundary's effect on the next k tokens, without the noise of the later text (ours).

    Bias: rewards from the k-th next boundary on are left out. While the policy is uniform this is large, because its
    boundaries do not yet mark where an effect ends, so the cut can be annealed in: over the first ``anneal`` rollouts
    ``A = (1 - alpha) Discount + alpha G`` with alpha rising from 0 to 1. Cost: O(T log T) elementwise; its state is the
    number of rollouts, which checkpoints hold.

    Args:
        gamma: discount factor in [0, 1].
        boundaries: number k of boundaries until which rewards are credited.
        anneal: rollouts until alpha is 1; 0 for alpha = 1 from the start.

    Raises:
        ValueError: ``gamma`` outside [0, 1], ``boundaries`` below 1 or ``anneal`` below 0.
    """

    in_keys = [keys.REWARD, keys.ACTION]
    out_keys = [keys.ADVANTAGE]
    unbiased = False

    def __init__(self, gamma: float = 0.95, boundaries: int = 3, anneal: int = 0) -> None:
        super().__init__()
        check_value("gamma", gamma, FRACTION)
        check_value("boundaries", boundaries, COUNT)
        check_value("anneal", anneal, NOT_NEGATIVE)
        self.gamma = gamma
        self.boundaries = boundaries
        self.anneal = anneal
        self.rollouts_done: Tensor = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``advantage``: [.., T] in nats; in training mode, count the rollout."""
        credit = discounted_sum(tensordict[keys.REWARD].squeeze(-1), self.gamma)
        drawn = tensordict[keys.ACTION].cumsum(-1)
        end = torch.searchsorted(drawn, drawn + self.boundaries)  # T if there is no such boundary
        distance = end - torch.arange(drawn.shape[-1], device=drawn.device)
        beyond = F.pad(credit, (0, 1)).gather(-1, end) * torch.pow(
            self.gamma, distance.to(credit.dtype)
        )
        alpha = (self.rollouts_done / max(self.anneal, 1)).clamp(max=1) if self.anneal else 1.0
        if self.training:
            self.rollouts_done += 1
        return tensordict.set(keys.ADVANTAGE, credit - alpha * beyond)


class LambdaReturn(Stage):
    """Generalised advantage estimation with the mean over the batch as critic: no network, two hyperparameters.

    ``A_i = sum_{j>=0} (gamma lambda)^j (R_{i+j+1} + gamma V_{i+j+1} - V_{i+j})``, generalised advantage estimation
    (Schulman et al. 2016, arXiv 1506.02438) with V_i the mean over the *other* sequences of their discounted
    returns from i on. lambda = 1 is ``Discount(gamma)`` less the leave-one-out batch mean; lambda = 0 credits the
    next reward only, and the difference of two means. Logs ``explained_variance``, of the returns by V.

    Bias: that of the discount; V does not depend on the sequence's own actions, so it adds none for lambda = 1, and
    for lambda < 1 rewards at distance j count only (gamma lambda)^j. Cost: O(B T log T) elementwise.

    Args:
        gamma: discount factor in [0, 1].
        lam: lambda in [0, 1].

    Raises:
        ValueError: ``gamma`` or ``lam`` outside [0, 1].
    """

    in_keys = [keys.REWARD, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def __init__(self, gamma: float = 0.99, lam: float = 0.95) -> None:
        super().__init__()
        check_value("gamma", gamma, FRACTION)
        check_value("lam", lam, FRACTION)
        self.gamma = gamma
        self.lam = lam
        self.unbiased = gamma * lam == 1

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``advantage``: [.., B, T] in nats."""
        reward = tensordict[keys.REWARD].squeeze(-1)
        mask = tensordict[keys.DECISION_MASK]
        returns = discounted_sum(reward, self.gamma)
        value = leave_one_out_mean(returns, mask, -2)
        log_explained_variance(tensordict, returns, returns - value)
        td_error = reward + self.gamma * F.pad(value[..., 1:], (0, 1)) - value
        return tensordict.set(keys.ADVANTAGE, discounted_sum(td_error, self.gamma * self.lam))
