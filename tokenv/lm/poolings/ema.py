"""The exponential moving average with a rate of its own at every step."""

import torch.nn.functional as F
from torch import Tensor


def ema(prob_BM: Tensor, x_BMD: Tensor) -> Tensor:
    """``z_k = p_k x_k + (1 - p_k) z_{k-1}``, ``z_{-1} = 0``: [B, M, D].

    A scan by doubling, O(M log M D) in plain operations: after r rounds every z_k has read its 2^r nearest x. Only
    products and sums of numbers in [0, 1] appear, so that p = 0 and p = 1 are exact, with exact gradients.

    Args:
        prob_BM: p, in [0, 1].
        x_BMD: what is averaged.
    """
    prob_BM1 = prob_BM.unsqueeze(-1)
    keep_BM1, z_BMD = 1 - prob_BM1, prob_BM1 * x_BMD
    shift = 1
    while shift < x_BMD.shape[1]:
        z_BMD = z_BMD + keep_BM1 * _delay(z_BMD, shift)
        keep_BM1 = keep_BM1 * _delay(keep_BM1, shift)
        shift *= 2
    return z_BMD


def _delay(x_BMD: Tensor, steps: int) -> Tensor:
    return F.pad(x_BMD[:, :-steps], (0, 0, steps, 0))
