"""From boundaries to tokens: segments, their relaxation (every byte is a token with a gate in [0, 1]), and packs.

A pack holds C tokens, all of sequence 0, then all of sequence 1, and so on; the remaining slots are empty, so that
token-level layers compute no padding. C takes few values, so that compiled layers keep their shapes although the number
of tokens differs between batches.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenv.core.devices import compiles, is_accelerator
from tokenv.lm.attention import BLOCK, AttentionFn, causal_attention, flex_with_mask


def bucket_size(total: int) -> int:
    """Return the slots C for ``total`` tokens: a multiple of ``BLOCK``.

    At most a sixteenth of the slots is empty, or, with few tokens, fewer than ``BLOCK`` are.

    There are 16 sizes per octave. The tokens of a batch change by a few percent from step to step: one size or two.
    """
    multiple = max(BLOCK, 1 << max(total.bit_length() - 5, 0))
    return -(-total // multiple) * multiple


class Pack(NamedTuple):
    """Slots of the tokens in a pack, and their sources.

    Attributes:
        row_C: sequence of each slot; B if the slot is empty.
        first_C: slot of the first token of the same sequence.
        source_C: index m + b M of each token among the padded ones, [B, M]; 0 if the slot is empty.
        slot_BM: slot of each padded token in the pack; 0 for padding.
    """

    row_C: Tensor
    first_C: Tensor
    source_C: Tensor
    slot_BM: Tensor

    @classmethod
    def of(cls, count_B: Tensor, longest: int, bucket_size: int) -> Pack:
        """Pack sequences of ``count_B`` tokens.

        Args:
            count_B: tokens of each sequence, at most ``longest``.
            longest: M, number of tokens after padding.
            bucket_size: C, at least the sum of the tokens.
        """
        batch = len(count_B)
        device = count_B.device
        end_B = count_B.cumsum(0)
        index_M = torch.arange(longest, device=device)
        start_B = end_B - count_B
        exists_BM = index_M < count_B[:, None]
        slot_BM = (start_B[:, None] + index_M).where(exists_BM, 0)
        slot_C = torch.arange(bucket_size, device=device)
        row_C = torch.searchsorted(end_B, slot_C, right=True)
        first_C = torch.cat([start_B, end_B[-1:]])[row_C]
        source_C = row_C * longest + slot_C - first_C
        source_C = source_C.where(row_C < batch, 0)
        return cls(row_C, first_C, source_C, slot_BM)

    def packed(self, x_BM: Tensor) -> Tensor:
        """Pack padded tokens: [B, M, ..] -> [1, C, ..]."""
        flat = x_BM.flatten(0, 1)
        return flat.index_select(0, self.source_C).unsqueeze(0)

    def padded(self, x_1C: Tensor) -> Tensor:
        """Unpack tokens: [1, C, ..] -> [B, M, ..]; the padding repeats the first slot."""
        flat = x_1C[0].index_select(0, self.slot_BM.flatten())
        return flat.unflatten(0, self.slot_BM.shape)

    def attention(self, softcap: float) -> AttentionFn:
        """Return causal attention within every sequence, for queries, keys and values [1, H, C, d]."""
        if compiles(self.row_C.device):
            return functools.partial(flex_with_mask, softcap=softcap, mask=self.block_mask())
        return functools.partial(_padded_attention, softcap=softcap, pack=self)

    def block_mask(self) -> Any:
        """Return the ``BlockMask`` of ``flex_attention``: blocks to compute in part, and blocks to compute as a whole.

        It is computed from the slots alone, without C x C entries and without a compilation.
        """
        from torch.nn.attention.flex_attention import BlockMask

        row_C = self.row_C

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (row_C[i] == row_C[j]) & (j <= i)

        blocks = len(row_C) // BLOCK
        index_Q = torch.arange(blocks, device=row_C.device)
        lowest_Q = self.first_C[::BLOCK] // BLOCK
        # All queries of a block see all keys of the blocks which begin in the sequence of the last query.
        full_Q = -(-self.first_C[BLOCK - 1 :: BLOCK] // BLOCK)
        full_Q = full_Q.clamp(max=index_Q)
        diagonal = torch.eye(blocks, dtype=torch.bool, device=row_C.device)
        before_full = (index_Q >= lowest_Q[:, None]) & (index_Q < full_Q[:, None])
        full = (index_Q >= full_Q[:, None]) & (index_Q < index_Q[:, None])
        return BlockMask.from_kv_blocks(
            *_block_indices(before_full | diagonal),
            *_block_indices(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=visible,
        )


def _block_indices(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks in each row, and their indices first: [1, 1, Q], [1, 1, Q, K] of int32."""
    order_QK = chosen_QK.int().argsort(dim=1, descending=True, stable=True)
    count_Q = chosen_QK.sum(1, dtype=torch.int32)
    return count_Q[None, None], order_QK.int()[None, None]


@torch.compiler.disable
def _padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    pack: Pack,
) -> Tensor:
    """Attend on a CPU, where dense blocks are fast: sequence by sequence, padded for the scores alone."""
    index = pack.slot_BM.flatten()
    shape = pack.slot_BM.shape

    def padded(x: Tensor) -> Tensor:
        return x[0].index_select(1, index).unflatten(1, shape)

    attended_HBMd = causal_attention(padded(q), padded(k), padded(v), softcap)
    return attended_HBMd.flatten(1, 2).index_select(1, pack.source_C).unsqueeze(0)


class Segments(NamedTuple):
    """Positions of token boundaries.

    Attributes:
        boundary_BM: position of the byte which closed token m; padding repeats position 0.
        token_index_BT: index of the newest token closed at or before each byte.
        count_B: tokens of each sequence.
        total: tokens of all sequences.
    """

    boundary_BM: Tensor
    token_index_BT: Tensor
    count_B: Tensor
    total: int


def segment(action_BT: Tensor, multiple: int = 1) -> Segments:
    """Turn boundary decisions into token positions.

    The longest token sequence of the batch determines M. Reading it and the total is the only host synchronisation of
    a pass.

    Args:
        action_BT: 1 where a token ends; column 0 must be 1, so that every byte has a token to read.
        multiple: M is padded to a multiple of this number.
    """
    batch, length = action_BT.shape
    token_index_BT = action_BT.cumsum(1) - 1
    count_B = token_index_BT[:, -1] + 1
    most, total = torch.stack([count_B.max(), count_B.sum()]).tolist()
    longest = -(-most // multiple) * multiple
    slot_BT = torch.where(action_BT.bool(), token_index_BT, longest)
    position_BT = torch.arange(length, device=action_BT.device).expand(batch, length)
    boundary = action_BT.new_zeros(batch, longest + 1, dtype=torch.long)
    boundary.scatter_(1, slot_BT, position_BT)
    return Segments(boundary[:, :longest], token_index_BT, count_B, total)


def _gather_rows(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """Return ``out[b, m] = x[b, index[b, m]]``; a flat index_select is several times faster than gather on a CPU."""
    batch, length, width = x_BND.shape
    offset_B1 = torch.arange(batch, device=x_BND.device).unsqueeze(1) * length
    index = (index_BM + offset_B1).flatten()
    return x_BND.reshape(-1, width).index_select(0, index).view(batch, -1, width)


def select(x_BTD: Tensor, segments: Segments) -> Tensor:
    """Downsample: token m is the byte vector at its boundary (eq. 7). [B, T, D] -> [B, M, D]."""
    return _gather_rows(x_BTD, segments.boundary_BM)


def distribute(token_BMD: Tensor, segments: Segments) -> Tensor:
    """Upsample: every byte receives the newest token closed at or before it (eq. 9). [B, M, D] -> [B, T, D]."""
    if is_accelerator(token_BMD.device):
        return SortedGather.apply(token_BMD, segments.token_index_BT)
    return _gather_rows(token_BMD, segments.token_index_BT)


class SortedGather(torch.autograd.Function):
    """``out[b, t] = x[b, index[b, t]]`` for rows of ``index`` which never decrease, with a deterministic gradient.

    The bytes of a token are adjacent, so its gradient is the sum of a segment, in float32 or finer. The gradient of
    index_select adds in the model's precision and, on a GPU, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x_BMD: Tensor, index_BT: Tensor) -> Tensor:
        """Gather: [B, M, D], [B, T] -> [B, T, D]."""
        ctx.save_for_backward(index_BT)
        ctx.count = x_BMD.shape[1]
        return _gather_rows(x_BMD, index_BT)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of each token's bytes: [B, M, D]."""
        (index_BT,) = ctx.saved_tensors
        batch = len(index_BT)
        bytes_BM = torch.zeros(batch, ctx.count, dtype=torch.long, device=index_BT.device)
        bytes_BM.scatter_add_(1, index_BT, torch.ones_like(index_BT))
        fine = torch.promote_types(grad_BTD.dtype, torch.float32)
        grad = grad_BTD.to(fine).flatten(0, 1)
        total = torch.segment_reduce(
            grad,
            "sum",
            lengths=bytes_BM.flatten(),
            unsafe=True,
        )
        total_BMD = total.view(batch, ctx.count, -1)
        return total_BMD.to(grad_BTD.dtype), None


def ema(prob_BM: Tensor, x_BMD: Tensor) -> Tensor:
    """Return the moving average ``z_k = p_k x_k + (1 - p_k) z_{k-1}``, ``z_{-1} = 0``: [B, M, D].

    It is a scan by doubling in O(M log M D): after r rounds every z_k has read its 2^r nearest x. Only products and
    sums of numbers in [0, 1] appear, so that p = 0 and p = 1 are exact, with exact gradients.

    Args:
        prob_BM: p, in [0, 1].
        x_BMD: x.
    """
    prob_BM1 = prob_BM.unsqueeze(-1)
    keep_BM1 = 1 - prob_BM1
    z_BMD = prob_BM1 * x_BMD
    shift = 1
    while shift < x_BMD.shape[1]:
        z_BMD = z_BMD + keep_BM1 * _delay(z_BMD, shift)
        keep_BM1 = keep_BM1 * _delay(keep_BM1, shift)
        shift *= 2
    return z_BMD


def _delay(x_BMD: Tensor, steps: int) -> Tensor:
    return F.pad(x_BMD[:, :-steps], (0, 0, steps, 0))


def relaxed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    gate_BN: Tensor,
) -> Tensor:
    """Attend causally to keys with gates.

    ``w_ij = s_j exp(score_ij) / sum_{j' <= i} s_j' exp(score_ij')``, scores soft-capped as in ``tokenv.lm.attention``.
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
    scale = math.sqrt(q.shape[-1]) * softcap
    scores = softcap * torch.tanh((q @ k.mT).to(fine) / scale)
    gate = gate_BN[:, None, None, :].to(fine)
    every = torch.ones(length, length, dtype=torch.bool, device=q.device)
    later = every.triu_(1)
    # The largest score with a weight becomes exp(0). Others may exceed it: those of gate 0, whose exp is a factor of
    # the gradient only and is bounded against overflow, and later ones, which are masked.
    weightless = later | (gate == 0)
    largest = scores.detach().masked_fill(weightless, -math.inf).amax(-1, keepdim=True)
    bound = 0.9 * math.log(torch.finfo(fine).max)
    relative = (scores - largest).clamp(max=bound)
    weight = gate * relative.exp()
    weight = weight.masked_fill(later, 0.0)
    share = weight / weight.sum(-1, keepdim=True)
    return share.to(v.dtype) @ v


def relaxed_tokens(
    x_BTD: Tensor, gate_BT: Tensor, apply_token_layers: Callable[..., Tensor]
) -> Tensor:
    """Return the token which each byte reads, if all bytes are tokens with gates.

    All T bytes run through the token-level layers with ``relaxed_attention``, to Y'; then
    ``y_t = s_t Y'_t + (1 - s_t) y_{t-1}``.

    Args:
        x_BTD: output of the encoder.
        gate_BT: s in [0, 1]; column 0 must be 1.
        apply_token_layers: token-level layers; see ``UNet.apply_token_layers``.

    Returns:
        y, [B, T, D].
    """
    position_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    position_BT = position_T.expand(gate_BT.shape)
    token_BTD = apply_token_layers(x_BTD, position_BT, gate_BT)
    fine = torch.promote_types(x_BTD.dtype, torch.float32)
    y_BTD = ema(gate_BT.to(fine), token_BTD.to(fine))
    return y_BTD.to(x_BTD.dtype)
