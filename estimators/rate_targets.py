"""Rate targets: losses which keep the boundary rate near its target."""

from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.errors import POSITIVE, check_value, choice
from tokenv.core.rates import FIXED_RATE
from tokenv.estimators.base import Stage
from tokenv.estimators.statistics import kernel_weighted_mean, masked_mean, mean_over


class RateTarget(Stage):
    """Common to all rate targets, which move the policy without regard to the reward.

    If a rollout holds ``target_rate``, it is the target of each sequence, and ``rate`` is their average.

    Args:
        rate: target boundaries per symbol, in (0, 1).

    Attributes:
        varies: whether it reads ``target_rate``, which a run with a range of rates requires.

    Raises:
        ValueError: ``rate`` outside (0, 1).
    """

    out_keys = [keys.LOSS_RATE]
    unbiased = False
    varies = False

    def __init__(self, rate: float) -> None:
        super().__init__()
        check_value("rate", rate, FIXED_RATE)
        self.rate = rate


class _RateConditioned(RateTarget):
    """Common to rate targets for the mean over the batch; if targets differ, over sequences with similar targets.

    In a mean over the whole batch, too many boundaries in sequences with low targets would compensate for too few in
    those with high targets. A loss for each sequence alone would hold it to its target, whatever its text. So means are
    taken over the sequences with about the same target: ``kernel_weighted_mean`` at logit(target). Equal targets give
    the mean over the batch.

    Args:
        rate: target boundaries per symbol, in (0, 1).
        bandwidth: standard deviation of the kernel, in logits of the target.

    Raises:
        ValueError: ``rate`` outside (0, 1), or ``bandwidth`` not positive.
    """

    varies = True

    def __init__(self, rate: float, bandwidth: float = 0.5) -> None:
        super().__init__(rate)
        check_value("bandwidth", bandwidth, POSITIVE)
        self.bandwidth = bandwidth

    def _mean_of_similar(self, x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        """Return the mean over sequences with similar targets: [.., B, T], its mask and the targets -> [B, 1]."""
        target_B = target[(0,) * (target.dim() - 2)][:, 0]
        return kernel_weighted_mean(x, mask, torch.logit(target_B.to(x.dtype)), self.bandwidth)


class LogitPressure(_RateConditioned):
    """A gradient which is equal for all logits, up or down.

    ``L = mean(l) detach(mean(p) - target)`` (arXiv 2602.13940, eq. 24), with means over all decisions of the batch.
    If sequences have their own targets, ``L = mean_b(l_b detach(mean_similar_b(v(target) (p - target))))`` with
    ``v(r) = rate (1 - rate) / (r (1 - r))``: among sequences with similar targets the gradient is equal, and at every
    rate it is proportional to the deviation of the logits, because ``dp = p (1 - p) dl``. It vanishes at all rates only
    if the mean probability is the target at every rate: a kernel mean of a deviation is 0 everywhere only if the
    deviation is. Cost: O(T) elementwise.

    Args:
        rate: see ``_RateConditioned``.
        bandwidth: see ``_RateConditioned``.
        count_forced: whether mean(p) counts the forced boundaries of each sequence's first and last symbol, too, as in
            the authors' released code. Nothing follows a boundary at the last symbol: it has no other effect.
    """

    in_keys = [keys.BOUNDARY_LOGITS, keys.BOUNDARY_PROB, keys.DECISION_MASK]

    def __init__(self, rate: float, bandwidth: float = 0.5, count_forced: bool = False) -> None:
        super().__init__(rate, bandwidth)
        self.count_forced = count_forced

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L."""
        mask = tensordict[keys.DECISION_MASK]
        prob = tensordict[keys.BOUNDARY_PROB].detach()
        target = tensordict.get(keys.TARGET_RATE, None)
        counted = mask
        if self.count_forced:
            prob = F.pad(prob, (0, 2), value=1.0)
            counted = F.pad(mask, (0, 2), value=True)
        if target is None:
            excess = masked_mean(prob, counted) - self.rate
        else:
            target = target[..., :1]
            scale = self.rate * (1 - self.rate) / (target * (1 - target))
            excess = self._mean_of_similar(scale * (prob - target), counted, target)
        return tensordict.set(keys.LOSS_RATE, tensordict[keys.BOUNDARY_LOGITS] * excess * mask)


class BinomialPrior(RateTarget):
    """Negative log-likelihood of the number of boundaries under a binomial law (Nawrot et al. 2023, 2211.09761).

    ``L = -1/n log Binomial(n, target)(sum_i a_i)`` per sequence of n decisions, averaged over the batch. The gradient
    passes through the sum: through ``boundary`` if the estimator relaxes it, else straight through to
    ``p_i`` (value a_i, gradient of p_i). Cost: O(T) elementwise.
    """

    in_keys = [keys.ACTION, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]
    varies = True

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L if all sequences have the same length."""
        mask = tensordict[keys.DECISION_MASK]
        boundary = tensordict.get(keys.BOUNDARY, None)
        if boundary is None:
            prob = tensordict[keys.BOUNDARY_LOGITS].sigmoid()
            boundary = tensordict[keys.ACTION] + prob - prob.detach()
        count = (boundary * mask).sum(-1, keepdim=True)
        trials = mask.sum(-1, keepdim=True).to(count.dtype)
        target = tensordict.get(keys.TARGET_RATE, None)
        rate = count.new_full((), self.rate) if target is None else target[..., :1].to(count)
        binomial = torch.distributions.Binomial(trials, probs=rate, validate_args=False)
        loss = -binomial.log_prob(count) / trials.clamp(min=1)
        return tensordict.set(keys.LOSS_RATE, loss * mask)


class RatioLoss(_RateConditioned):
    """H-Net's ratio loss (Hwang et al. 2025, arXiv 2507.07955).

    ``L = n / (n - 1) ((n - 1) F G + (1 - F)(1 - G))`` with ``n = 1 / target``, F the fraction of boundaries drawn and G
    the mean probability; L = 1 at F = G = target. The gradient passes through G. Cost: O(T).

    The published loss (github.com/goombalab/hnet, utils/train.py) averages over the whole minibatch, the first symbols
    with their certain boundaries included, so that only the batch must keep to the target. If sequences have their own
    targets, F, G and 1 / n are means over sequences with similar ones.

    Args:
        rate: target boundaries per symbol, in (0, 1).
        over: ``batch``, as published, without padding; or ``sequence``: F and G of each sequence, over its decisions,
            which holds every sequence to the target.
        bandwidth: standard deviation of the kernel for ``over=batch``, in logits of the target.

    Raises:
        ValueError: ``rate`` outside (0, 1), ``bandwidth`` not positive, or another ``over``.
    """

    in_keys = [keys.ACTION, keys.BOUNDARY_LOGITS, keys.POSITION, keys.DECISION_MASK]

    def __init__(
        self, rate: float, over: Literal["batch", "sequence"] = "batch", bandwidth: float = 0.5
    ) -> None:
        super().__init__(rate, bandwidth)
        check_value("over", over, choice("batch", "sequence"))
        self.over = over

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L.

        With ``over=sequence`` the weight of a sequence is its number of decisions.
        """
        mask = tensordict[keys.DECISION_MASK]
        prob = tensordict[keys.BOUNDARY_LOGITS].sigmoid()
        action = tensordict[keys.ACTION].to(prob.dtype)
        target = tensordict.get(keys.TARGET_RATE, None)
        rate: float | Tensor = self.rate if target is None else target[..., :1].to(prob.dtype)
        if self.over == "sequence":
            fraction = mean_over(action, mask, -1)
            mean_prob = mean_over(prob, mask, -1)
        else:
            valid = mask | (tensordict[keys.POSITION] == 0)
            prob = prob.where(mask, 1.0)
            if target is None:
                fraction = masked_mean(action, valid)
                mean_prob = masked_mean(prob, valid)
            else:
                each = (action, prob, target.to(prob.dtype))
                fraction, mean_prob, rate = (self._mean_of_similar(x, valid, target) for x in each)
        return tensordict.set(keys.LOSS_RATE, ratio_loss(fraction, mean_prob, rate) * mask)


def ratio_loss(fraction: Tensor, mean_prob: Tensor, rate: float | Tensor) -> Tensor:
    """Return ``n / (n - 1) ((n - 1) F G + (1 - F)(1 - G))`` with n = 1 / rate, elementwise."""
    n = 1 / rate
    return n / (n - 1) * ((n - 1) * fraction * mean_prob + (1 - fraction) * (1 - mean_prob))
