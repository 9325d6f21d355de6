"""Documents, and the chunks of fixed length which are cut from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from tokenv.core.sequences import SequenceBatch

SEPARATOR = b"\n"


@dataclass(frozen=True)
class Document:
    """Document of a corpus.

    Attributes:
        name: description of its origin.
        content: bytes of the document.
        gold: as many bytes as `content`, 1 where a true token ends and 0 elsewhere; None if unknown.
    """

    name: str
    content: bytes | memoryview
    gold: bytes | None = None


class ChunkSource(Protocol):
    """Sequences of one length which are cut from some data."""

    def __len__(self) -> int: ...

    def take(self, index_B: np.ndarray[Any, Any]) -> SequenceBatch:
        """Return the sequences with indices `index_B` (integers [B]), in that order."""


@dataclass(frozen=True)
class Chunks:
    """All P chunks of N bytes from some documents, in one contiguous array.

    Attributes:
        symbol_PN: bytes, uint8 [P, N].
        gold_PN: True at the last byte of every true token, bool [P, N]; None if the truth is unknown.
        document_P: entry of `names` and `ids` in which a chunk starts, int64 [P].
        offset_P: byte of that document at which a chunk starts, int64 [P].
        names: names of the documents.
        ids: indices of the documents, as batches report them.
    """

    symbol_PN: np.ndarray[Any, Any]
    gold_PN: np.ndarray[Any, Any] | None
    document_P: np.ndarray[Any, Any]
    offset_P: np.ndarray[Any, Any]
    names: list[str]
    ids: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.symbol_PN)

    def take(self, index_B: np.ndarray[Any, Any]) -> SequenceBatch:
        """Return the chunks with indices `index_B` (integers [B]), in that order."""
        entry_B = self.document_P[index_B]
        places = zip(entry_B, self.offset_P[index_B], strict=True)
        gold_BN = None
        if self.gold_PN is not None:
            gold_BN = torch.from_numpy(self.gold_PN[index_B])
        return SequenceBatch(
            symbol_BN=torch.from_numpy(self.symbol_PN[index_B].astype(np.int64)),
            origin=[f"{self.names[document]} @ {offset}" for document, offset in places],
            gold_BN=gold_BN,
            document_B=torch.from_numpy(self.ids[entry_B]),
        )


def chunk_documents(
    documents: Sequence[Document], *, seq_len: int, cut: str, ids: Sequence[int] | None = None
) -> Chunks:
    """Cut documents into chunks of exactly `seq_len` bytes.

    `chunk` joins the documents by one newline each, cuts the stream every `seq_len` bytes and drops the remainder.
    `document` takes the first `seq_len` bytes of every document that is long enough. A newline between documents of
    known truth is a token of its own.

    Args:
        documents: documents, in the order in which they are joined.
        seq_len: bytes of a chunk.
        cut: `chunk` or `document`.
        ids: indices of the documents in batches; 0, 1, 2, … by default.

    Returns:
        The chunks; none if the documents are too short.
    """
    contents = [document.content for document in documents]
    golds = [document.gold for document in documents if document.gold is not None]
    if cut == "document":
        long = [d for d, content in enumerate(contents) if len(content) >= seq_len]
        document_P = np.array(long, dtype=np.int64)
        offset_P = np.zeros_like(document_P)
        stream: bytes | memoryview = b"".join(contents[d][:seq_len] for d in long)
        gold_stream = b"".join(golds[d][:seq_len] for d in long if golds)
    else:
        if len(contents) == 1:
            (stream,) = contents  # not copied: the copy of a large document would double the memory
        else:
            stream = SEPARATOR.join(contents)
        gold_stream = b"\x01".join(golds)
        length_D = np.array([len(content) + len(SEPARATOR) for content in contents], dtype=np.int64)
        begin_D = np.cumsum(length_D) - length_D
        begin_P = np.arange(len(stream) // seq_len, dtype=np.int64) * seq_len
        document_P = np.searchsorted(begin_D, begin_P, side="right") - 1
        offset_P = begin_P - begin_D[document_P]
    gold_PN = None
    if golds:
        gold_PN = _rows(gold_stream, len(document_P), seq_len).astype(bool)
    if ids is None:
        ids = range(len(documents))
    return Chunks(
        symbol_PN=_rows(stream, len(document_P), seq_len),
        gold_PN=gold_PN,
        document_P=document_P,
        offset_P=offset_P,
        names=[document.name for document in documents],
        ids=np.array(ids, dtype=np.int64),
    )


def _rows(stream: bytes | memoryview, count: int, seq_len: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(stream, dtype=np.uint8)[: count * seq_len].reshape(count, seq_len)
