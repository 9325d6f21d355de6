"""Estimators by name: a few lines of parts each."""

from estimators.base import Chain, chain
from estimators.baselines import BatchCentre
from estimators.credit import Discount
from estimators.rewards import EarlyExit
from estimators.surrogates import ScoreFunction


def reinforce(gamma: float = 0.99) -> Chain:
    """The paper's estimator: early-exit rewards, discounted, centred over the batch (arXiv 2602.13940, eq. 14-18).

    Bias: that of the discount for gamma < 1, and a factor (B - 1) / B; for every policy.
    Cost: one forward and one backward pass, shared with the language model's; memory O(B T).

    Args:
        gamma: discount factor.
    """
    return chain(EarlyExit(), Discount(gamma), BatchCentre(), ScoreFunction())
