"""Split documents into training and validation by their contents alone, near-duplicates on one side.

Documents are compared by their windows of 32 bytes (shingles; Broder 1997, "On the resemblance and containment of
documents"). Only windows whose hash is a multiple of a power of two are kept (FracMinHash; Irber et al. 2022): the
same windows in every document, so that shares of the sample estimate shares of all windows.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
from scipy import sparse

from tokenv.data.chunks import SEPARATOR, Document
from tokenv.data.config import DataConfig

DIGEST_BYTES = 16
MAX_TAIL_SECTIONS = 32  # of the held-out tail of a single document
LINE_END_WITHIN = 4096  # bytes in which a line end is searched
Array: TypeAlias = np.ndarray[Any, Any]
WINDOW = 32  # bytes; a power of two
MOST_SAMPLES = 2**21
BLOCK = 2**16  # bytes hashed at a time
NEIGHBOURS = 16  # documents with the same window that a document is compared with
# share of the smaller document's windows from which on two documents are near-duplicates
CONTAINMENT = 0.2
LEAST_BYTES = 256  # that near-duplicates share
LEAST_SAMPLES = 4
LARGEST_GROUP = 0.25  # of all bytes


def digest(content: bytes | memoryview, seed: int) -> bytes:
    """Hash a document to uniform bytes which depend only on `content` and `seed`."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=str(seed).encode()).digest()


def threshold(fraction: float) -> bytes:
    """Return the digest below which a `fraction` of all digests lies."""
    return int(fraction * 2 ** (8 * DIGEST_BYTES)).to_bytes(DIGEST_BYTES, "big")


@dataclass(frozen=True)
class Split:
    """Documents for training and for validation, each in the order of their digests.

    Attributes:
        train: training documents.
        validation: held-out documents.
        digests: digests of both, for the fingerprint.
        overlap: share of the held-out 32-byte windows which also occur in training text: see `WindowSample.overlap`.
        excluded: number of documents on neither side, because they are duplicates of held-out ones.
    """

    train: list[Document]
    validation: list[Document]
    digests: tuple[bytes, bytes]
    overlap: float = float("nan")
    excluded: int = 0


def split_documents(documents: Iterable[Document], config: DataConfig) -> Split:
    """Hold out the documents whose digest is low.

    Equal documents stay together, and so do near-duplicates if `config.group_duplicates` (`WindowSample.groups`): the
    digest of the longest document decides for its group. Neither the split nor the order within it depends on the
    order of `documents`. If the fraction `config.validation` is too little for a single sequence, the documents with
    the next lowest digests are held out, too. A single document is split by position: see `split_tail`.

    Args:
        documents: documents; empty ones are dropped.
        config: fraction, seed and how sequences are cut.
    """
    documents = [document for document in documents if document.content]
    if len(documents) == 1 and len(documents[0].content) > 2 * config.seq_len:
        return split_tail(documents[0], config)
    ranked = _rank(documents, config.seed)
    windows = WindowSample.of([document for _, document in ranked])
    keys = _group_keys(ranked, windows, config)
    order_D = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    ordered = [keys[d] for d in order_D]
    held_out = bisect_left(ordered, threshold(config.validation))
    length_D = windows.length_D[order_D]
    if config.cut == "document":
        long_enough_D = np.maximum.accumulate(length_D) >= config.seq_len
    else:
        long_enough_D = np.cumsum(length_D + 1) - 1 >= config.seq_len
    if np.any(long_enough_D):
        held_out = max(held_out, int(np.argmax(long_enough_D)) + 1)
        held_out = bisect_right(ordered, ordered[held_out - 1])
    validation_D = np.zeros(len(ranked), dtype=bool)
    validation_D[order_D[:held_out]] = True
    return _split(ranked, validation_D, ~validation_D, windows)


def split_from(
    documents: Iterable[Document], validation: Iterable[Document], config: DataConfig
) -> Split:
    """Exclude from training the documents which equal one of `validation`, or, if grouped, share a group with one."""
    held_out = _rank(validation, config.seed)
    ranked = held_out + _rank(documents, config.seed)
    windows = WindowSample.of([document for _, document in ranked])
    keys = np.array(_group_keys(ranked, windows, config), dtype=f"S{DIGEST_BYTES}")
    digests = np.array([key for key, _ in ranked], dtype=f"S{DIGEST_BYTES}")
    validation_D = np.arange(len(ranked)) < len(held_out)
    duplicate_D = np.isin(digests, digests[validation_D]) | np.isin(keys, keys[validation_D])
    return _split(ranked, validation_D, ~duplicate_D, windows)


def split_tail(document: Document, config: DataConfig) -> Split:
    """Hold out the tail of a single document: the fraction `config.validation`, at least one sequence.

    The tail is cut into up to 32 sections of at least one sequence, which count as documents when standard errors are
    estimated. It is cut at line ends if there are any, so that the sections joined by newlines are the tail again.

    Args:
        document: document to split.
        config: fraction, seed and how sequences are cut.
    """
    length = len(document.content)
    tail = min(
        max(round(length * config.validation), config.seq_len + 1), length - config.seq_len - 1
    )
    step = max(tail // MAX_TAIL_SECTIONS, config.seq_len)
    cuts = [_line_end(document.content, at) for at in range(length - tail, length - step, step)]
    cuts = [at for at in cuts if at < length - config.seq_len] or [length - config.seq_len]
    sections = [_section(document, *ends) for ends in pairwise([0, *dict.fromkeys(cuts), length])]
    ranked = [(digest(section.content, config.seed), section) for section in sections]
    validation_D = np.arange(len(ranked)) > 0
    return _split(ranked, validation_D, ~validation_D, WindowSample.of(sections))


def _line_end(content: bytes | memoryview, at: int) -> int:
    """Return the end of the line at `at`, including its newline; `at` itself if the line is long."""
    newline = bytes(content[at : at + LINE_END_WITHIN]).find(SEPARATOR)
    if newline < 0:
        return at
    return at + newline + 1


def _section(document: Document, begin: int, end: int) -> Document:
    """Return the bytes from `begin` to `end` of a document, without a copy and without a newline at their end."""
    if (
        begin < end - 1
        and end < len(document.content)
        and document.content[end - 1] == SEPARATOR[0]
    ):
        end -= 1
    name = document.name
    if begin:
        name += f", bytes {begin} to {end}"
    gold = document.gold
    if gold is not None:
        gold = gold[begin:end]
    return Document(name, memoryview(document.content)[begin:end], gold)


def _rank(documents: Iterable[Document], seed: int) -> list[tuple[bytes, Document]]:
    ranked = [
        (digest(document.content, seed), document) for document in documents if document.content
    ]
    return sorted(ranked, key=lambda entry: (entry[0], entry[1].name))


def _group_keys(
    ranked: list[tuple[bytes, Document]], windows: WindowSample, config: DataConfig
) -> list[bytes]:
    """Return for every document the digest of its group's longest one, or its own if documents are not grouped."""
    own = [key for key, _ in ranked]
    if not config.group_duplicates:
        return own
    group_D = windows.groups()
    longest = {int(group_D[d]): own[d] for d in np.argsort(windows.length_D, kind="stable")}
    return [longest[int(group)] for group in group_D]


def _split(
    ranked: list[tuple[bytes, Document]],
    validation_D: np.ndarray[Any, Any],
    train_D: np.ndarray[Any, Any],
    windows: WindowSample,
) -> Split:
    train = [ranked[d] for d in np.flatnonzero(train_D)]
    validation = [ranked[d] for d in np.flatnonzero(validation_D)]
    return Split(
        train=[document for _, document in train],
        validation=[document for _, document in validation],
        digests=(b"".join(key for key, _ in train), b"".join(key for key, _ in validation)),
        overlap=windows.overlap(validation_D, train_D),
        excluded=len(ranked) - len(train) - len(validation),
    )


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
        order_S = np.argsort(hash_S, kind="stable")  # documents are in order
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
        hash_S = self.hash_S[new_S]
        document_S = self.document_S[new_S]
        windows_D = np.bincount(document_S, minlength=documents)
        shared = sparse.csr_matrix((documents, documents), dtype=np.int64)
        for ahead in range(1, NEIGHBOURS + 1):
            same = hash_S[ahead:] == hash_S[:-ahead]
            if not same.any():
                break
            pairs = document_S[:-ahead][same], document_S[ahead:][same]
            counts = np.ones(same.sum(), np.int64)
            shared = shared + sparse.coo_matrix((counts, pairs), shared.shape).tocsr()
        shared = shared.tocoo()
        smaller = np.minimum(windows_D[shared.row], windows_D[shared.col])
        least = max(LEAST_SAMPLES, LEAST_BYTES // self.every)
        near = (shared.data >= least) & (shared.data >= CONTAINMENT * smaller)
        pairs = shared.row[near], shared.col[near]
        links = sparse.coo_matrix((shared.data[near], pairs), shared.shape)
        _, group_D = sparse.csgraph.connected_components(links, directed=False)
        bytes_G = np.bincount(group_D, self.length_D)
        if bytes_G.max(initial=0) > LARGEST_GROUP * self.length_D.sum():
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
        # both sorted, so that no set of hashes need be made
        train_hashes = self.hash_S[train_D[self.document_S]]
        hashes = self.hash_S[validation_S]
        begin = np.searchsorted(train_hashes, hashes, side="left")
        end = np.searchsorted(train_hashes, hashes, side="right")
        return float((end > begin).mean())


def _sample_windows(documents: Sequence[Document], every: int) -> Iterator[tuple[Array, Array]]:
    """Yield hashes and document indices of the sampled windows, a block of documents at a time."""
    first = 0
    while first < len(documents):
        last = first
        size = 0
        while last < len(documents) and size < BLOCK:
            size += len(documents[last].content)
            last += 1
        contents = [document.content for document in documents[first:last]]
        content = contents[0]
        if len(contents) > 1:
            content = b"".join(contents)
        end_D = np.cumsum([len(each) for each in contents])
        for begin in range(0, size, BLOCK):
            hash_W = _window_hashes(content[begin : begin + BLOCK + WINDOW - 1])
            begin_S = np.flatnonzero((hash_W & np.uint64(every - 1)) == 0)
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
        longer_W = hash_W[:-length] * factor
        longer_W += hash_W[length:]
        hash_W = longer_W
        length *= 2
    for _ in range(2):  # the low bits of a polynomial depend on the low bits of the bytes alone
        hash_W ^= hash_W >> np.uint64(32)
        hash_W *= np.uint64(0xD6E8FEB86659FD93)
    hash_W ^= hash_W >> np.uint64(32)
    return hash_W
