"""Which actions a reward is credited to."""

import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor

from estimators.base import Part
from tokenv import keys


def discounted_sum(reward_T: Tensor, gamma: float) -> Tensor:
    """``G_i = sum_{j>=0} gamma^j r_{i+j}`` along the last dimension, [.., T] -> [.., T].

    A scan by doubling: log2(T) elementwise passes, in any precision, without powers that underflow.
    """
    total, step = reward_T, 1
    while step < reward_T.shape[-1]:
        total = total + gamma**step * F.pad(total[..., step:], (0, step))
        step *= 2
    return total


class Discount(Part):
    """Credit action a_i with the discounted rewards that follow it.

    ``G_i = sum_{j>=0} gamma^j R_{i+j+1}`` (arXiv 2602.13940, eq. 16). The first reward that a_i can touch is the
    prediction of x_{i+1}, which TorchRL stores at step i.

    Bias: none for gamma = 1; below, rewards at distance j are counted only gamma^j of their worth, and the gradient
    is that of an objective with a shorter sight. Cost: O(T log T) elementwise.

    Args:
        gamma: discount factor in [0, 1].

    Raises:
        ValueError: ``gamma`` outside [0, 1].
    """

    in_keys = [keys.REWARD]
    out_keys = [keys.ADVANTAGE]

    def __init__(self, gamma: float = 0.99) -> None:
        super().__init__()
        if not 0 <= gamma <= 1:
            raise ValueError(f"gamma = {gamma}: expected a discount factor in [0, 1], such as 0.99")
        self.gamma = gamma

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``advantage``: [.., T] in nats."""
        return tensordict.set(keys.ADVANTAGE, discounted_sum(tensordict[keys.REWARD].squeeze(-1), self.gamma))
