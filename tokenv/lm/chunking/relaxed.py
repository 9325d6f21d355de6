"""Let tokens exist to a degree: the moving average, and the middle as a function of gates."""

import math
from collections.abc import Callable

import torch
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


def relaxed_attention(q: Tensor, k: Tensor, v: Tensor, softcap: float, gate_BN: Tensor) -> Tensor:
    """Causal attention to keys that exist to some degree.

    ``w_ij = s_j exp(score_ij) / sum_{j' <= i} s_j' exp(score_ij')``, scores soft-capped as in ``lm.attention``.
    Multiplying by s instead of adding log s keeps value and gradient finite at s = 0. Time and memory O(N^2).

    Args:
        q: queries, [B, H, N, d].
        k: keys.
        v: values.
        softcap: bound of the scores.
        gate_BN: s in [0, 1]; column 0 must be positive, so that every query has a key.

    Returns:
        Attended values, [B, H, N, d].
    """
    length = q.shape[-2]
    fine = torch.promote_types(q.dtype, torch.float32)
    scores = softcap * torch.tanh((q @ k.mT).to(fine) / (math.sqrt(q.shape[-1]) * softcap))
    strength = gate_BN[:, None, None, :].to(fine)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
    # The largest score that counts becomes exp(0). Others may exceed it: those of strength 0, whose exp is a factor
    # of the gradient only and bounded against overflow, and later ones, which are wiped.
    largest = scores.detach().masked_fill(later | (strength == 0), -math.inf).amax(-1, keepdim=True)
    bound = 0.9 * math.log(torch.finfo(fine).max)
    weight = (strength * (scores - largest).clamp(max=bound).exp()).masked_fill(later, 0.0)
    return (weight / weight.sum(-1, keepdim=True)).to(v.dtype) @ v


def relaxed_tokens(x_BTD: Tensor, gate_BT: Tensor, apply_token_layers: Callable[..., Tensor]) -> Tensor:
    """The token each byte sees, of candidates that exist to some degree.

    All T bytes run through the token-level layers, attending as ``relaxed_attention`` says, to Y'; then
    ``y_t = s_t Y'_t + (1 - s_t) y_{t-1}``.

    Args:
        x_BTD: the encoder's output.
        gate_BT: s in [0, 1]; column 0 must be 1.
        apply_token_layers: the token-level layers; see ``UNet.apply_token_layers``.

    Returns:
        y, [B, T, D].
    """
    position_BT = torch.arange(x_BTD.shape[1], device=x_BTD.device).expand(gate_BT.shape)
    token_BTD = apply_token_layers(x_BTD, position_BT, gate_BT)
    fine = torch.promote_types(x_BTD.dtype, torch.float32)
    return ema(gate_BT.to(fine), token_BTD.to(fine)).to(x_BTD.dtype)
