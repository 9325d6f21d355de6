"""From bytes to tokens and back: select, and distribute-then-add (paper, eq. 7-9)."""

from typing import NamedTuple

import torch
from torch import Tensor


class Segments(NamedTuple):
    """Which bytes closed a token, and which token each byte sees.

    Attributes:
        boundary_BM: position of the byte that closed token m; padding repeats position 0.
        newest_BT: number of the newest token closed at or before each byte.
        count_B: tokens of each sequence.
    """

    boundary_BM: Tensor
    newest_BT: Tensor
    count_B: Tensor


def segment(action_BT: Tensor, multiple: int = 1) -> Segments:
    """Turn boundary decisions into token positions.

    The longest token sequence of the batch fixes M; learning it is the only host synchronisation of a pass.

    Args:
        action_BT: 1 where a token ends; column 0 must be 1, so that every byte has a token to see.
        multiple: M is padded to a multiple of this.
    """
    batch, length = action_BT.shape
    newest_BT = action_BT.cumsum(1) - 1
    count_B = newest_BT[:, -1] + 1
    longest = -(-int(count_B.max()) // multiple) * multiple
    slot_BT = torch.where(action_BT.bool(), newest_BT, longest)
    position_BT = torch.arange(length, device=action_BT.device).expand(batch, length)
    boundary = torch.zeros(batch, longest + 1, dtype=torch.long, device=action_BT.device)
    return Segments(boundary.scatter_(1, slot_BT, position_BT)[:, :longest], newest_BT, count_B)


def _gather_rows(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """``out[b, m] = x[b, index[b, m]]``; a flat index_select is several times faster than gather on a CPU."""
    batch, length, width = x_BND.shape
    offset_B1 = torch.arange(batch, device=x_BND.device).unsqueeze(1) * length
    flat = x_BND.reshape(-1, width).index_select(0, (index_BM + offset_B1).flatten())
    return flat.view(batch, -1, width)


def select(x_BTD: Tensor, segments: Segments) -> Tensor:
    """Downsample: token m is the byte vector at its boundary (eq. 7). [B, T, D] -> [B, M, D]."""
    return _gather_rows(x_BTD, segments.boundary_BM)


def distribute(token_BMD: Tensor, segments: Segments) -> Tensor:
    """Upsample: every byte receives the newest token closed at or before it (eq. 9). [B, M, D] -> [B, T, D]."""
    return _gather_rows(token_BMD, segments.newest_BT)
