"""Sequence packing: the tokens of all sequences in one pack, so that the token-level layers compute no padding.

A pack holds C tokens, all of sequence 0, then all of sequence 1, and so on; the remaining slots are empty. C takes few
values, so that compiled layers keep their shapes although the number of tokens differs between batches.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenv.lm.attention import BLOCK, AttentionFn, causal_attention, flex_with_mask


def bucket_size(total: int) -> int:
    """Return the slots C for ``total`` tokens: a multiple of ``BLOCK``, at most a sixteenth more than the tokens.

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
    def of(cls, count_B: Tensor, longest: int, bucket_size: int) -> "Pack":
        """Pack sequences of ``count_B`` tokens.

        Args:
            count_B: tokens of each sequence, at most ``longest``.
            longest: M, number of tokens after padding.
            bucket_size: C, at least the sum of the tokens.
        """
        batch, device = len(count_B), count_B.device
        end_B = count_B.cumsum(0)
        index_M = torch.arange(longest, device=device)
        slot_BM = ((end_B - count_B)[:, None] + index_M).where(index_M < count_B[:, None], 0)
        slot_C = torch.arange(bucket_size, device=device)
        row_C = torch.searchsorted(end_B, slot_C, right=True)
        first_C = torch.cat([end_B - count_B, end_B[-1:]])[row_C]
        source_C = (row_C * longest + slot_C - first_C).where(row_C < batch, 0)
        return cls(row_C, first_C, source_C, slot_BM)

    def packed(self, x_BM: Tensor) -> Tensor:
        """Pack padded tokens: [B, M, ..] -> [1, C, ..]."""
        return x_BM.flatten(0, 1).index_select(0, self.source_C).unsqueeze(0)

    def padded(self, x_1C: Tensor) -> Tensor:
        """Unpack tokens: [1, C, ..] -> [B, M, ..]; the padding repeats the first slot."""
        return x_1C[0].index_select(0, self.slot_BM.flatten()).unflatten(0, self.slot_BM.shape)

    def attention(self, softcap: float) -> AttentionFn:
        """Return causal attention within every sequence, for queries, keys and values [1, H, C, d]."""
        if self.row_C.is_cuda:
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
        partial = (index_Q >= lowest_Q[:, None]) & (index_Q < full_Q[:, None]) | diagonal
        full = (index_Q >= full_Q[:, None]) & (index_Q < index_Q[:, None])
        return BlockMask.from_kv_blocks(
            *_block_indices(partial), *_block_indices(full), BLOCK_SIZE=BLOCK, mask_mod=visible
        )


def _block_indices(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of chosen blocks in each row, and their indices first: [1, 1, Q], [1, 1, Q, K] of int32."""
    order_QK = chosen_QK.int().argsort(dim=1, descending=True, stable=True)
    return chosen_QK.sum(1, dtype=torch.int32)[None, None], order_QK.int()[None, None]


@torch.compiler.disable
def _padded_attention(q: Tensor, k: Tensor, v: Tensor, softcap: float, pack: Pack) -> Tensor:
    """Attend on a CPU, where dense blocks are fast: sequence by sequence, padded for the scores alone."""
    index, shape = pack.slot_BM.flatten(), pack.slot_BM.shape
    padded = [x[0].index_select(1, index).unflatten(1, shape) for x in (q, k, v)]
    attended_HBMd = causal_attention(padded[0], padded[1], padded[2], softcap)
    return attended_HBMd.flatten(1, 2).index_select(1, pack.source_C).unsqueeze(0)
