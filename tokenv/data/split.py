"""Split documents into training and validation, depending on their contents alone."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tokenv.data.chunks import SEPARATOR, Document
from tokenv.data.config import DataConfig
from tokenv.data.duplicates import WindowSample

DIGEST_BYTES = 16
MAX_TAIL_SECTIONS = 32  # of the held-out tail of a single document
LINE_END_WITHIN = 4096  # bytes in which a line end is searched


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
    """

    train: list[Document]
    validation: list[Document]
    digests: tuple[bytes, bytes]
    overlap: float = float("nan")


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
    ranked = _rank(documents, config.seed)
    if len(ranked) == 1 and len(ranked[0][1].content) > 2 * config.seq_len:
        return split_tail(ranked[0][1], config)
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


def split_from(documents: Iterable[Document], validation: Iterable[Document], config: DataConfig) -> Split:
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
    tail = min(max(round(length * config.validation), config.seq_len + 1), length - config.seq_len - 1)
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
    return at if newline < 0 else at + newline + 1


def _section(document: Document, begin: int, end: int) -> Document:
    """Return the bytes from `begin` to `end` of a document, without a copy and without a newline at their end."""
    if begin < end - 1 and end < len(document.content) and document.content[end - 1] == SEPARATOR[0]:
        end -= 1
    name = f"{document.name}, bytes {begin} to {end}" if begin else document.name
    gold = None if document.gold is None else document.gold[begin:end]
    return Document(name, memoryview(document.content)[begin:end], gold)


def _rank(documents: Iterable[Document], seed: int) -> list[tuple[bytes, Document]]:
    ranked = [(digest(document.content, seed), document) for document in documents if document.content]
    return sorted(ranked, key=lambda entry: (entry[0], entry[1].name))


def _group_keys(ranked: list[tuple[bytes, Document]], windows: WindowSample, config: DataConfig) -> list[bytes]:
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
    train, validation = ([ranked[d] for d in np.flatnonzero(side_D)] for side_D in (train_D, validation_D))
    return Split(
        train=[document for _, document in train],
        validation=[document for _, document in validation],
        digests=(b"".join(key for key, _ in train), b"".join(key for key, _ in validation)),
        overlap=windows.overlap(validation_D, train_D),
    )
