"""Attention by its definition, against which the fast ones are tested."""

import math

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    window: int | None = None,
) -> Tensor:
    """Compute attention by its definition, with a mask on the N x N matrix: time and memory O(N^2)."""
    length = q.shape[-2]
    scale = math.sqrt(q.shape[-1]) * softcap
    scores = softcap * torch.tanh(q @ k.mT / scale)
    i = torch.arange(length)[:, None]
    j = torch.arange(length)[None, :]
    hidden = j > i
    if window is not None:
        hidden = hidden | (j <= i - window)
    scores = scores.masked_fill(hidden.to(q.device), -math.inf)
    return scores.softmax(-1) @ v
