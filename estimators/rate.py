"""What keeps the boundary rate near its target."""

from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv import keys
from tokenv.estimators.base import Part
from tokenv.estimators.statistics import masked_mean, mean_over


class RateTarget(Part):
    """Common to all rate targets. None estimates a gradient of the reward: they move the policy, at whatever cost.

    Args:
        rate: target boundaries per symbol, in (0, 1).

    Raises:
        ValueError: ``rate`` outside (0, 1).
    """

    out_keys = [keys.LOSS_RATE]
    unbiased = False

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 < rate < 1:
            raise ValueError(f"rate = {rate}: expected boundaries per symbol in (0, 1), such as 0.2")
        self.rate = rate


class LogitPressure(RateTarget):
    """An even push on all logits, up or down.

    ``L = mean(l) detach(mean(p) - target)`` (arXiv 2602.13940, eq. 24), with means over all decisions of the batch.
    Cost: O(T) elementwise. For ``rate``, see ``RateTarget``.
    """

    in_keys = [keys.BOUNDARY_LOGITS, keys.BOUNDARY_PROB, keys.DECISION_MASK]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L."""
        mask = tensordict[keys.DECISION_MASK]
        excess = masked_mean(tensordict[keys.BOUNDARY_PROB].detach(), mask) - self.rate
        return tensordict.set(keys.LOSS_RATE, tensordict[keys.BOUNDARY_LOGITS] * excess * mask)


class BinomialPrior(RateTarget):
    """How improbable a sequence's number of boundaries is under a binomial law (Nawrot et al. 2023, 2211.09761).

    ``L = -1/n log Binomial(n, target)(sum_i a_i)`` per sequence of n decisions, averaged over the batch. The gradient
    passes through the sum: through ``boundary`` where the estimator relaxes it, else straight through to
    ``p_i`` (value a_i, gradient of p_i). Cost: O(T) elementwise.
    """

    in_keys = [keys.ACTION, keys.BOUNDARY_LOGITS, keys.DECISION_MASK]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L where all sequences are equally long."""
        mask = tensordict[keys.DECISION_MASK]
        boundary = tensordict.get(keys.BOUNDARY, None)
        if boundary is None:
            prob = tensordict[keys.BOUNDARY_LOGITS].sigmoid()
            boundary = tensordict[keys.ACTION] + prob - prob.detach()
        count = (boundary * mask).sum(-1, keepdim=True)
        trials = mask.sum(-1, keepdim=True).to(count.dtype)
        binomial = torch.distributions.Binomial(trials, probs=torch.tensor(self.rate).to(count), validate_args=False)
        loss = -binomial.log_prob(count) / trials.clamp(min=1)
        return tensordict.set(keys.LOSS_RATE, loss * mask)


class RatioLoss(RateTarget):
    """H-Net's ratio loss (Hwang et al. 2025, arXiv 2507.07955).

    ``L = n / (n - 1) ((n - 1) F G + (1 - F)(1 - G))`` with ``n = 1 / target``, F the fraction of boundaries drawn and G
    the mean probability; L = 1 at F = G = target. The gradient passes through G. Cost: O(T).

    The published loss (github.com/goombalab/hnet, utils/train.py) averages over the whole minibatch, the first symbols
    with their certain boundaries included, so that only the batch must keep to the target.

    Args:
        rate: target boundaries per symbol, in (0, 1).
        over: ``batch``, as published, padding left out; or ``sequence``: F and G of each sequence, over its decisions,
            which holds every sequence to the target.

    Raises:
        ValueError: ``rate`` outside (0, 1), or another ``over``.
    """

    in_keys = [keys.ACTION, keys.BOUNDARY_LOGITS, keys.POSITION, keys.DECISION_MASK]

    def __init__(self, rate: float, over: Literal["batch", "sequence"] = "batch") -> None:
        super().__init__(rate)
        if over not in ("batch", "sequence"):
            raise ValueError(f"over = {over!r}: expected 'batch' or 'sequence'")
        self.over = over

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loss_rate``: [.., T], whose mean over the decisions is L.

        With ``over=sequence`` sequences weigh by their decisions.
        """
        mask, prob = tensordict[keys.DECISION_MASK], tensordict[keys.BOUNDARY_LOGITS].sigmoid()
        action = tensordict[keys.ACTION].to(prob.dtype)
        if self.over == "sequence":
            drawn, meant = mean_over(action, mask, -1), mean_over(prob, mask, -1)
        else:
            counted = mask | (tensordict[keys.POSITION] == 0)
            drawn, meant = masked_mean(action, counted), masked_mean(prob.where(mask, 1.0), counted)
        return tensordict.set(keys.LOSS_RATE, ratio_loss(drawn, meant, self.rate) * mask)


def ratio_loss(drawn: Tensor, meant: Tensor, rate: float) -> Tensor:
    """``n / (n - 1) ((n - 1) F G + (1 - F)(1 - G))`` with n = 1 / rate, elementwise."""
    n = 1 / rate
    return n / (n - 1) * ((n - 1) * drawn * meant + (1 - drawn) * (1 - meant))
