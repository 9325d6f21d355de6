"""Documents, the fixed-length pieces cut from them, and the batches made of pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

SEPARATOR = b"\n"


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        name: Where it comes from, for people.
        content: Its bytes.
        gold: As many bytes as `content`, 1 where a true token ends and 0 elsewhere; None if unknown.
    """

    name: str
    content: bytes | memoryview
    gold: bytes | None = None


@dataclass(frozen=True)
class SequenceBatch:
    """Sequences to read, on the CPU.

    Attributes:
        symbol_BN: int64 [B, N], the bytes, 0 to 255 (uint8 where `tokenv.data.sources` has staged them for a GPU); of
            series float64 [B, N, C, 5], see `tokenv.data.series.windows`.
        origin: One "document name @ byte offset" a sequence, of its first byte.
        gold_BN: bool [B, N], True at the last byte of every true token; None if the truth is unknown.
        document_B: int64 [B], the index of the document that a sequence starts in. It tells the documents
            of one split apart and stays the same over epochs.
    """

    symbol_BN: torch.Tensor
    origin: list[str]
    gold_BN: torch.Tensor | None
    document_B: torch.Tensor

    def __len__(self) -> int:
        return len(self.origin)

    def __getitem__(self, some: slice) -> SequenceBatch:
        return SequenceBatch(
            symbol_BN=self.symbol_BN[some],
            origin=self.origin[some],
            gold_BN=None if self.gold_BN is None else self.gold_BN[some],
            document_B=self.document_B[some],
        )

    @staticmethod
    def join(batches: Sequence[SequenceBatch]) -> SequenceBatch:
        """Put batches of one corpus behind one another; `batches` holds at least one."""
        if len(batches) == 1:
            return batches[0]
        golds = [batch.gold_BN for batch in batches if batch.gold_BN is not None]
        return SequenceBatch(
            symbol_BN=torch.cat([batch.symbol_BN for batch in batches]),
            origin=[origin for batch in batches for origin in batch.origin],
            gold_BN=torch.cat(golds) if golds else None,
            document_B=torch.cat([batch.document_B for batch in batches]),
        )


class ChunkSource(Protocol):
    """Sequences of one length, cut from some data."""

    def __len__(self) -> int: ...

    def take(self, index_B: np.ndarray[Any, Any]) -> SequenceBatch:
        """Return the sequences at `index_B` (integers [B]), in that order."""


@dataclass(frozen=True)
class Chunks:
    """All P pieces of N bytes cut from some documents, in one contiguous array.

    Attributes:
        symbol_PN: uint8 [P, N], the bytes.
        gold_PN: bool [P, N], True at the last byte of every true token; None if the truth is unknown.
        place_P: int64 [P], which entry of `names` and `ids` the piece starts in.
        offset_P: int64 [P], where in that document it starts.
        names: The documents' names.
        ids: The documents' indices, as batches report them.
    """

    symbol_PN: np.ndarray[Any, Any]
    gold_PN: np.ndarray[Any, Any] | None
    place_P: np.ndarray[Any, Any]
    offset_P: np.ndarray[Any, Any]
    names: list[str]
    ids: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.symbol_PN)

    def take(self, index_B: np.ndarray[Any, Any]) -> SequenceBatch:
        """Return the pieces at `index_B` (integers [B]), in that order."""
        place_B = self.place_P[index_B]
        offset_B = self.offset_P[index_B]
        return SequenceBatch(
            symbol_BN=torch.from_numpy(self.symbol_PN[index_B].astype(np.int64)),
            origin=[f"{self.names[d]} @ {at}" for d, at in zip(place_B, offset_B, strict=True)],
            gold_BN=None if self.gold_PN is None else torch.from_numpy(self.gold_PN[index_B]),
            document_B=torch.from_numpy(self.ids[place_B]),
        )


def chunk_documents(
    documents: Sequence[Document], *, seq_len: int, cut: str, ids: Sequence[int] | None = None
) -> Chunks:
    """Cut documents into pieces of exactly `seq_len` bytes.

    `chunk` joins the documents by one newline each and cuts the stream every `seq_len` bytes; what is left
    at the end is dropped. `document` takes the first `seq_len` bytes of every document that has them. A
    newline between documents of known truth is a token of its own.

    Args:
        documents: The documents, in the order in which they are to be joined.
        seq_len: Bytes in a piece.
        cut: `chunk` or `document`.
        ids: The documents' indices in batches; 0, 1, 2, … by default.

    Returns:
        The pieces; none if the documents are too short.
    """
    golds = [document.gold for document in documents if document.gold is not None]
    if cut == "document":
        long = [d for d, document in enumerate(documents) if len(document.content) >= seq_len]
        place_P = np.array(long, dtype=np.int64)
        offset_P = np.zeros_like(place_P)
        stream: bytes | memoryview = b"".join(documents[d].content[:seq_len] for d in long)
        gold_stream = b"".join(golds[d][:seq_len] for d in long) if golds else None
    else:
        # A single document is used as it is: a copy of a large one would take its size in memory again.
        contents = [document.content for document in documents]
        stream = contents[0] if len(contents) == 1 else SEPARATOR.join(contents)
        gold_stream = b"\x01".join(golds) if golds else None
        length_D = np.array([len(document.content) + len(SEPARATOR) for document in documents], dtype=np.int64)
        begin_D = np.cumsum(length_D) - length_D
        begin_P = np.arange(len(stream) // seq_len, dtype=np.int64) * seq_len
        place_P = np.searchsorted(begin_D, begin_P, side="right") - 1
        offset_P = begin_P - begin_D[place_P]
    return Chunks(
        symbol_PN=_rows(stream, len(place_P), seq_len),
        gold_PN=None if gold_stream is None else _rows(gold_stream, len(place_P), seq_len).astype(bool),
        place_P=place_P,
        offset_P=offset_P,
        names=[document.name for document in documents],
        ids=np.arange(len(documents)) if ids is None else np.array(ids, dtype=np.int64),
    )


def _rows(stream: bytes | memoryview, count: int, seq_len: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(stream, dtype=np.uint8)[: count * seq_len].reshape(count, seq_len)
