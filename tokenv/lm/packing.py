"""Tokens of all sequences in one pack: the token-level layers then spend nothing on padding to the longest.

A pack holds C tokens, all of sequence 0, then all of sequence 1, and so on; what is left over belongs to nobody. C
takes few values, so that compiled layers keep their shapes although every batch has another number of tokens.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenv.lm.attention import BLOCK, AttentionFn, causal_attention, flex_with_mask


def bucket_size(total: int) -> int:
    """Places C for so many tokens: one of 16 sizes an octave, so at most a sixteenth is spare; multiples of ``BLOCK``.

    A batch's number of tokens moves by a few hundredths from step to step, which is one size or two.
    """
    multiple = max(BLOCK, 1 << max(total.bit_length() - 5, 0))
    return -(-total // multiple) * multiple


class Pack(NamedTuple):
    """Where tokens stand in a pack, and where they come from.

    Attributes:
        row_C: the sequence of each place; B where it is nobody's.
        first_C: the place of the first token of the same sequence.
        source_C: place m + b M of each token in [B, M] that are padded; 0 where it is nobody's.
        place_BM: the place of each padded token in the pack; 0 for padding.
    """

    row_C: Tensor
    first_C: Tensor
    source_C: Tensor
    place_BM: Tensor

    @classmethod
    def of(cls, count_B: Tensor, longest: int, bucket_size: int) -> "Pack":
        """Pack sequences of ``count_B`` tokens.

        Args:
            count_B: tokens of each sequence, at most ``longest``.
            longest: M, to which they are padded.
            bucket_size: C, at least their sum.
        """
        batch, device = len(count_B), count_B.device
        end_B = count_B.cumsum(0)
        slot_M = torch.arange(longest, device=device)
        place_BM = ((end_B - count_B)[:, None] + slot_M).where(slot_M < count_B[:, None], 0)
        place_C = torch.arange(bucket_size, device=device)
        row_C = torch.searchsorted(end_B, place_C, right=True)
        first_C = torch.cat([end_B - count_B, end_B[-1:]])[row_C]
        source_C = (row_C * longest + place_C - first_C).where(row_C < batch, 0)
        return cls(row_C, first_C, source_C, place_BM)

    def packed(self, x_BM: Tensor) -> Tensor:
        """[B, M, ..] -> [1, C, ..]."""
        return x_BM.flatten(0, 1).index_select(0, self.source_C).unsqueeze(0)

    def padded(self, x_1C: Tensor) -> Tensor:
        """[1, C, ..] -> [B, M, ..]; padding holds the first place's."""
        return x_1C[0].index_select(0, self.place_BM.flatten()).unflatten(0, self.place_BM.shape)

    def attention(self, softcap: float) -> AttentionFn:
        """Full causal attention within every sequence: queries, keys and values [1, H, C, d]."""
        if self.row_C.is_cuda:
            return functools.partial(flex_with_mask, softcap=softcap, mask=self.block_mask())
        return functools.partial(_padded_attention, softcap=softcap, pack=self)

    def block_mask(self) -> Any:
        """What ``flex_attention`` computes: blocks from that of a sequence's first token on, and which of them wholly.

        Made of the places alone, without looking at C x C entries and without a compilation.
        """
        from torch.nn.attention.flex_attention import BlockMask

        row_C = self.row_C

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (row_C[i] == row_C[j]) & (j <= i)

        blocks = len(row_C) // BLOCK
        number_Q = torch.arange(blocks, device=row_C.device)
        lowest_Q = self.first_C[::BLOCK] // BLOCK
        # All of a block's queries see all keys of the blocks that begin in the sequence of the last query.
        whole_Q = -(-self.first_C[BLOCK - 1 :: BLOCK] // BLOCK)
        whole_Q = whole_Q.clamp(max=number_Q)
        partly = (number_Q >= lowest_Q[:, None]) & (number_Q < whole_Q[:, None]) | torch.eye(
            blocks, dtype=torch.bool, device=row_C.device
        )
        wholly = (number_Q >= whole_Q[:, None]) & (number_Q < number_Q[:, None])
        counted = [_listed(chosen_QK) for chosen_QK in (partly, wholly)]
        return BlockMask.from_kv_blocks(*counted[0], *counted[1], BLOCK_SIZE=BLOCK, mask_mod=visible)


def _listed(chosen_QK: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks are chosen in each row, and their numbers first: [1, 1, Q] and [1, 1, Q, K] of int32."""
    order_QK = chosen_QK.int().argsort(dim=1, descending=True, stable=True)
    return chosen_QK.sum(1, dtype=torch.int32)[None, None], order_QK.int()[None, None]


@torch.compiler.disable
def _padded_attention(q: Tensor, k: Tensor, v: Tensor, softcap: float, pack: Pack) -> Tensor:
    """For a CPU, where dense blocks are fast: sequence by sequence, padded for the scores alone."""
    index, shape = pack.place_BM.flatten(), pack.place_BM.shape
    padded = [x[0].index_select(1, index).unflatten(1, shape) for x in (q, k, v)]
    attended_HBMd = causal_attention(padded[0], padded[1], padded[2], softcap)
    return attended_HBMd.flatten(1, 2).index_select(1, pack.source_C).unsqueeze(0)
