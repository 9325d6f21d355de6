"""Near-duplicate documents: find groups of them, and measure how much held-out text occurs in training text.

Documents are compared by their windows of 32 bytes (shingles; Broder 1997, "On the resemblance and containment of
documents"). Only windows whose hash is a multiple of a power of two are kept (FracMinHash; Irber et al. 2022): the
same windows in every document, so that shares of the sample estimate shares of all windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse

from tokenv.data.chunks import Document

Array: TypeAlias = np.ndarray[Any, Any]
WINDOW = 32  # bytes; a power of two
MOST_SAMPLES = 2**21
BLOCK = 2**16  # bytes hashed at a time
NEIGHBOURS = 16  # documents with the same window that a document is compared with
CONTAINMENT = 0.2  # share of the smaller document's windows from which on two documents are near-duplicates
LEAST_BYTES, LEAST_SAMPLES = 256, 4  # that near-duplicates share
LARGEST_GROUP = 0.25  # of all bytes


@dataclass(frozen=True)
class WindowSample:
    """A sample of the 32-byte windows of D documents, sorted by hash, then by document.

    Attributes:
        hash_S: hashes of the windows, uint64 [S].
        document_S: index of the document in which the window occurs, int64 [S].
        length_D: bytes of every document, int64 [D].
        every: reciprocal of the sampled share, a power of two.
    """

    hash_S: Array
    document_S: Array
    length_D: Array
    every: int

    @classmethod
    def of(cls, documents: Sequence[Document]) -> WindowSample:
        """Sample at most about two million windows of `documents`."""
        length_D = np.array([len(document.content) for document in documents], dtype=np.int64)
        every = 1
        while length_D.sum() > every * MOST_SAMPLES:
            every *= 2
        samples = list(_sample_windows(documents, every))
        hash_S = np.concatenate([hashes for hashes, _ in samples] or [np.zeros(0, np.uint64)])
        document_S = np.concatenate([indices for _, indices in samples] or [np.zeros(0, np.int64)])
        order_S = np.lexsort((document_S, hash_S))
        return cls(hash_S[order_S], document_S[order_S], length_D, every)

    def groups(self) -> Array:
        """Assign every document to a group of near-duplicates.

        Two documents are near-duplicates if they share at least 256 windows and a fifth of the windows of the smaller
        one. A window which occurs in many documents compares each with the next 16 of them. Groups are the connected
        components. If one would hold more than a quarter of all bytes, the text repeats itself throughout and no
        split could separate it: then every document is a group of its own.

        Returns:
            The index of every document's group, int64 [D].
        """
        documents = len(self.length_D)
        new_S = np.ones(len(self.hash_S), dtype=bool)
        new_S[1:] = (np.diff(self.hash_S) != 0) | (np.diff(self.document_S) != 0)
        hash_S, document_S = self.hash_S[new_S], self.document_S[new_S]
        windows_D = np.bincount(document_S, minlength=documents)
        shared = sparse.csr_matrix((documents, documents), dtype=np.int64)
        for ahead in range(1, NEIGHBOURS + 1):
            same = hash_S[ahead:] == hash_S[:-ahead]
            if not same.any():
                break
            pairs = document_S[:-ahead][same], document_S[ahead:][same]
            shared = shared + sparse.coo_matrix((np.ones(len(pairs[0]), np.int64), pairs), shared.shape).tocsr()
        shared = shared.tocoo()
        smaller = np.minimum(windows_D[shared.row], windows_D[shared.col])
        near = (shared.data >= max(LEAST_SAMPLES, LEAST_BYTES // self.every)) & (shared.data >= CONTAINMENT * smaller)
        links = sparse.coo_matrix((shared.data[near], (shared.row[near], shared.col[near])), shared.shape)
        group_D = sparse.csgraph.connected_components(links, directed=False)[1]
        if np.bincount(group_D, self.length_D).max(initial=0) > LARGEST_GROUP * self.length_D.sum():
            return np.arange(documents)
        return np.asarray(group_D, dtype=np.int64)

    def overlap(self, validation_D: Array, train_D: Array) -> float:
        """Return the share of the held-out documents' windows which also occur in a training document.

        Args:
            validation_D: True for held-out documents, bool [D].
            train_D: True for training documents, bool [D].

        Returns:
            In [0, 1]; NaN if no held-out window is in the sample.
        """
        validation_S = validation_D[self.document_S]
        if not validation_S.any():
            return float("nan")
        return float(np.isin(self.hash_S[validation_S], self.hash_S[train_D[self.document_S]]).mean())


def _sample_windows(documents: Sequence[Document], every: int) -> Iterator[tuple[Array, Array]]:
    """Yield hashes and document indices of the sampled windows, a block of documents at a time."""
    first = 0
    while first < len(documents):
        last, size = first, 0
        while last < len(documents) and size < BLOCK:
            size += len(documents[last].content)
            last += 1
        contents = [document.content for document in documents[first:last]]
        content = contents[0] if len(contents) == 1 else b"".join(contents)
        end_D = np.cumsum([len(each) for each in contents])
        for begin in range(0, size, BLOCK):
            hash_W = _window_hashes(content[begin : begin + BLOCK + WINDOW - 1])
            begin_S = np.flatnonzero(hash_W % np.uint64(every) == 0)
            index_S = np.searchsorted(end_D, begin + begin_S, side="right")
            inside_S = begin + begin_S + WINDOW <= end_D[index_S]
            yield hash_W[begin_S[inside_S]], first + index_S[inside_S]
        first = last


def _window_hashes(content: bytes | memoryview) -> Array:
    """Hash every window of 32 bytes: uint64 [len(content) - 31], polynomials of the bytes whose bits are then mixed."""
    hash_W = np.frombuffer(content, dtype=np.uint8).astype(np.uint64)
    if len(hash_W) < WINDOW:
        return hash_W[:0]
    length = 1
    while length < WINDOW:
        factor = np.uint64(pow(0x9E3779B97F4A7C15, length, 2**64))
        hash_W = hash_W[:-length] * factor + hash_W[length:]
        length *= 2
    for _ in range(2):  # the low bits of a polynomial depend on the low bits of the bytes alone
        hash_W ^= hash_W >> np.uint64(32)
        hash_W *= np.uint64(0xD6E8FEB86659FD93)
    return hash_W ^ (hash_W >> np.uint64(32))
