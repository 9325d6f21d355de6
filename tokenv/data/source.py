"""What an environment asks of its sequences, and the simplest thing that answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from tokenv.data.pieces import SequenceBatch


class Source(Protocol):
    """An endless supply of sequences of ``seq_len`` symbols."""

    seq_len: int

    def next(self, count: int) -> SequenceBatch:
        """The next ``count`` sequences."""


SourceOrOpener: TypeAlias = Source | Callable[[int], Source]  # or what opens one for a seed, such as CorpusOpener


class TensorSource:
    """Goes round and round over given sequences, in order.

    Args:
        symbol_BN: the sequences, [B, N, *symbol_shape].

    Raises:
        ValueError: there is no sequence, or one of fewer than two symbols.
    """

    def __init__(self, symbol_BN: Tensor) -> None:
        if symbol_BN.dim() < 2 or symbol_BN.shape[0] < 1 or symbol_BN.shape[1] < 2:
            raise ValueError(f"sequences of shape {tuple(symbol_BN.shape)}: expected [B, N] with B >= 1 and N >= 2")
        self.symbol_BN, self.seq_len, self.position = symbol_BN, symbol_BN.shape[1], 0

    def next(self, count: int) -> SequenceBatch:
        """The next ``count`` sequences, from the start again after the last one."""
        index_B = torch.arange(self.position, self.position + count) % len(self.symbol_BN)
        self.position = (self.position + count) % len(self.symbol_BN)
        return SequenceBatch(self.symbol_BN[index_B], [f"sequence {i}" for i in index_B.tolist()], None, index_B)
