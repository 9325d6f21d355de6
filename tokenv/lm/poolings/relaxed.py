"""Tokens that exist to some degree: the U-Net's middle as a differentiable function of boundary strengths.

Every byte j is a candidate token of strength s_j in [0, 1]. At s in {0, 1} all values are those of selecting and
distributing; in between it is smooth, so its gradient says what a little more or less of a boundary would do.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tokenv.lm.poolings.ema import ema


def relaxed_attention(q: Tensor, k: Tensor, v: Tensor, softcap: float, strength_BN: Tensor) -> Tensor:
    """Causal attention to keys that exist to some degree.

    ``w_ij = s_j exp(score_ij) / sum_{j' <= i} s_j' exp(score_ij')``, scores soft-capped as in ``lm.attention``.
    Multiplying by s instead of adding log s keeps value and gradient finite at s = 0. Time and memory O(N^2).

    Args:
        q: queries, [B, H, N, d].
        k: keys.
        v: values.
        softcap: bound of the scores.
        strength_BN: s in [0, 1]; column 0 must be positive, so that every query has a key.

    Returns:
        Attended values, [B, H, N, d].
    """
    length = q.shape[-2]
    fine = torch.promote_types(q.dtype, torch.float32)
    scores = softcap * torch.tanh((q @ k.mT).to(fine) / (math.sqrt(q.shape[-1]) * softcap))
    strength = strength_BN[:, None, None, :].to(fine)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    # The largest score that counts becomes exp(0). Others may exceed it: those of strength 0, whose exp is a factor
    # of the gradient only and bounded against overflow, and later ones, which are wiped.
    largest = scores.detach().masked_fill(later | (strength == 0), -math.inf).amax(-1, keepdim=True)
    bound = 0.9 * math.log(torch.finfo(fine).max)
    weight = (strength * (scores - largest).clamp(max=bound).exp()).masked_fill(later, 0.0)
    return (weight / weight.sum(-1, keepdim=True)).to(v.dtype) @ v


def relaxed_tokens(x_BTD: Tensor, strength_BT: Tensor, contextualise: Callable[..., Tensor]) -> Tensor:
    """The token each byte sees, of candidates that exist to some degree.

    All T bytes run through the token-level layers, attending as ``relaxed_attention`` says, to Y'; then
    ``y_t = s_t Y'_t + (1 - s_t) y_{t-1}``.

    Args:
        x_BTD: the encoder's output.
        strength_BT: s in [0, 1]; column 0 must be 1.
        contextualise: the token-level layers; see ``UNet.contextualise``.

    Returns:
        y, [B, T, D].
    """
    position_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device).expand(strength_BT.shape)
    token_BTD = contextualise(x_BTD, position_BT, strength_BT)
    fine = torch.promote_types(x_BTD.dtype, torch.float32)
    return ema(strength_BT.to(fine), token_BTD.to(fine)).to(x_BTD.dtype)
