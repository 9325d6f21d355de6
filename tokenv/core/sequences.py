"""Batches of sequences, and the sources which environments read them from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences to read, on the CPU.

    Attributes:
        symbol_BN: bytes 0 to 255, int64 [B, N] (uint8 where `tokenv.data.corpus` has staged them for a GPU); of
            series float64 [B, N, C, 5], see `tokenv.series.windows`.
        origin: one "document name @ byte offset" per sequence, for its first byte.
        gold_BN: True at the last byte of every true token, bool [B, N]; None if the truth is unknown.
        document_B: index of the document in which a sequence starts, int64 [B]. It distinguishes the documents of
            one split and stays the same over epochs.
    """

    symbol_BN: Tensor
    origin: list[str]
    gold_BN: Tensor | None
    document_B: Tensor

    def __len__(self) -> int:
        return len(self.origin)

    def __getitem__(self, rows: slice) -> SequenceBatch:
        gold_BN = None if self.gold_BN is None else self.gold_BN[rows]
        return SequenceBatch(
            self.symbol_BN[rows], self.origin[rows], gold_BN, self.document_B[rows]
        )

    def symbols_on(self, device: torch.device) -> Tensor:
        """Return the symbols on a device, as a model reads them: bytes as int64."""
        symbol_BN = self.symbol_BN.to(device, non_blocking=True)
        if symbol_BN.dtype == torch.uint8:
            return symbol_BN.long()
        return symbol_BN

    @staticmethod
    def join(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        """Concatenate at least one batch of one corpus."""
        if len(batches) == 1:
            return batches[0]
        golds = [batch.gold_BN for batch in batches if batch.gold_BN is not None]
        gold_BN = torch.cat(golds) if golds else None
        return SequenceBatch(
            symbol_BN=torch.cat([batch.symbol_BN for batch in batches]),
            origin=[origin for batch in batches for origin in batch.origin],
            gold_BN=gold_BN,
            document_B=torch.cat([batch.document_B for batch in batches]),
        )


class Source(Protocol):
    """Endless supply of sequences of ``seq_len`` symbols."""

    seq_len: int

    def next(self, count: int) -> SequenceBatch:
        """Return the next ``count`` sequences."""


# a factory opens a source for a seed: CorpusFactory
SourceOrFactory: TypeAlias = Source | Callable[[int], Source]


class HeldOutData(Protocol):
    """Data set with validation sequences, such as ``tokenv.data.corpus.Corpus``."""

    name: str

    def validation(self, max_sequences: int | None = None) -> SequenceBatch:
        """Return the validation sequences, or the first ``max_sequences`` of them."""


class TensorSource:
    """Source which repeats given sequences in order.

    Args:
        symbol_BN: sequences, [B, N, *symbol_shape].

    Raises:
        ValueError: there is no sequence, or the sequences have fewer than two symbols.
    """

    def __init__(self, symbol_BN: Tensor) -> None:
        if symbol_BN.dim() < 2 or symbol_BN.shape[0] < 1 or symbol_BN.shape[1] < 2:
            raise ValueError(
                f"sequences of shape {tuple(symbol_BN.shape)}: expected [B, N] with B >= 1 and N >= 2"
            )
        self.symbol_BN = symbol_BN
        self.seq_len = symbol_BN.shape[1]
        self.position = 0

    def next(self, count: int) -> SequenceBatch:
        """Return the next ``count`` sequences; the first sequence follows the last one."""
        index_B = torch.arange(self.position, self.position + count) % len(self.symbol_BN)
        self.position = (self.position + count) % len(self.symbol_BN)
        return SequenceBatch(
            self.symbol_BN[index_B], [f"sequence {i}" for i in index_B.tolist()], None, index_B
        )


def elapsed_symbols(action: Tensor) -> Tensor:
    """Return the symbols since the newest boundary, 0 at a boundary: [.., T] -> int64 [.., T].

    Before a row's first boundary they are counted from its first symbol.
    """
    position_T = torch.arange(action.shape[-1], device=action.device)
    newest = torch.where(action.bool(), position_T, 0).cummax(-1).values
    return position_T - newest
