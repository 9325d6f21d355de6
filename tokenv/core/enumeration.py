"""All boundaries of a short sequence, once: expectations over them are exact, without sampling."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor


def all_boundaries(length: int, batch: int = 1) -> Tensor:
    """All joint actions of B sequences of N symbols, int64 [C, B, T], C = 2^(B (N - 2)), T = N - 1.

    The first symbol's boundary is forced and the last one's predicts nothing, so N - 2 are free in each.

    Args:
        length: symbols N.
        batch: sequences B.
    """
    free = length - 2
    bits = torch.tensor(list(itertools.product((0, 1), repeat=batch * free))).view(-1, batch, free)
    return F.pad(bits, (1, 0), value=1)


def forcing_noise(action: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Noise that decides so, whatever the policy: 0 forces a boundary, 1 forces none; [..] -> [..]."""
    return (1 - action).to(dtype)
