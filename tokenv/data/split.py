"""Which documents are held out, decided by what they contain and by nothing else."""

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
MOST_PARTS = 32  # that the tail of a single document is cut into
LINE_END_WITHIN = 4096  # bytes in which a line end is looked for


def digest(content: bytes | memoryview, seed: int) -> bytes:
    """Hash a document: uniform bytes that depend only on `content` and `seed`."""
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES, key=str(seed).encode()).digest()


def threshold(fraction: float) -> bytes:
    """Return the digest below which a `fraction` of all digests lie."""
    return int(fraction * 2 ** (8 * DIGEST_BYTES)).to_bytes(DIGEST_BYTES, "big")


@dataclass(frozen=True)
class Split:
    """Documents for training and for validation, each in the order of their digests.

    Attributes:
        train: The documents to train on.
        validation: The documents held out.
        digests: The digests of both, for the fingerprint.
        overlap: Share of the held-out 32-byte windows that stand in training text, too: see `WindowSample.overlap`.
    """

    train: list[Document]
    validation: list[Document]
    digests: tuple[bytes, bytes]
    overlap: float = float("nan")


def split_documents(documents: Iterable[Document], config: DataConfig) -> Split:
    """Hold out the documents whose digest is low.

    Equal documents stay together, and so do near-duplicates if `config.group_duplicates` (`WindowSample.groups`): a
    group is where its longest document belongs. Neither the split nor the order within it depends on the order of
    `documents`. Where the fraction `config.validation` holds out too little for a single sequence, the documents with
    the next lowest digests are held out too. A single document is split by position: see `split_tail`.

    Args:
        documents: The documents; empty ones are left out.
        config: Gives the fraction, the seed and what makes a sequence.
    """
    ranked = _rank(documents, config.seed)
    if len(ranked) == 1 and len(ranked[0][1].content) > 2 * config.seq_len:
        return split_tail(ranked[0][1], config)
    windows = WindowSample.of([document for _, document in ranked])
    keys = _group_keys(ranked, windows, config)
    order_D = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    ordered = [keys[d] for d in order_D]
    held = bisect_left(ordered, threshold(config.validation))
    length_D = windows.length_D[order_D]
    if config.cut == "document":
        enough_D = np.maximum.accumulate(length_D) >= config.seq_len
    else:
        enough_D = np.cumsum(length_D + 1) - 1 >= config.seq_len
    if np.any(enough_D):
        held = max(held, int(np.argmax(enough_D)) + 1)
        held = bisect_right(ordered, ordered[held - 1])
    held_D = np.zeros(len(ranked), dtype=bool)
    held_D[order_D[:held]] = True
    return _split(ranked, held_D, ~held_D, windows)


def split_from(documents: Iterable[Document], validation: Iterable[Document], config: DataConfig) -> Split:
    """Train on `documents` without those that equal one of `validation`, or, if grouped, are in a group with one."""
    held = _rank(validation, config.seed)
    ranked = held + _rank(documents, config.seed)
    windows = WindowSample.of([document for _, document in ranked])
    keys = np.array(_group_keys(ranked, windows, config), dtype=f"S{DIGEST_BYTES}")
    digests = np.array([key for key, _ in ranked], dtype=f"S{DIGEST_BYTES}")
    held_D = np.arange(len(ranked)) < len(held)
    known_D = np.isin(digests, digests[held_D]) | np.isin(keys, keys[held_D])
    return _split(ranked, held_D, ~known_D, windows)


def split_tail(document: Document, config: DataConfig) -> Split:
    """Hold out the tail of a single document: the fraction `config.validation`, at least one sequence.

    The tail is cut into up to 32 parts of at least one sequence, which stand for documents where standard errors are
    estimated. Where there are line ends it is cut there, so that the parts joined by newlines are the tail again.

    Args:
        document: The document.
        config: Gives the fraction, the seed and what makes a sequence.
    """
    length = len(document.content)
    tail = min(max(round(length * config.validation), config.seq_len + 1), length - config.seq_len - 1)
    step = max(tail // MOST_PARTS, config.seq_len)
    cuts = [_line_end(document.content, at) for at in range(length - tail, length - step, step)]
    cuts = [at for at in cuts if at < length - config.seq_len] or [length - config.seq_len]
    parts = [_part(document, *ends) for ends in pairwise([0, *dict.fromkeys(cuts), length])]
    ranked = [(digest(part.content, config.seed), part) for part in parts]
    held_D = np.arange(len(ranked)) > 0
    return _split(ranked, held_D, ~held_D, WindowSample.of([part for _, part in ranked]))


def _line_end(content: bytes | memoryview, at: int) -> int:
    """Where the first line ends from `at` on, its newline included; `at` if it is long."""
    found = bytes(content[at : at + LINE_END_WITHIN]).find(SEPARATOR)
    return at if found < 0 else at + found + 1


def _part(document: Document, begin: int, end: int) -> Document:
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
    """Of every document the digest of its group's longest document, or its own one if documents are not grouped."""
    own = [key for key, _ in ranked]
    if not config.group_duplicates:
        return own
    group_D = windows.groups()
    longest = {int(group_D[d]): own[d] for d in np.argsort(windows.length_D, kind="stable")}
    return [longest[int(group)] for group in group_D]


def _split(
    ranked: list[tuple[bytes, Document]],
    held_D: np.ndarray[Any, Any],
    train_D: np.ndarray[Any, Any],
    windows: WindowSample,
) -> Split:
    train, held = ([ranked[d] for d in np.flatnonzero(side_D)] for side_D in (train_D, held_D))
    return Split(
        train=[document for _, document in train],
        validation=[document for _, document in held],
        digests=(b"".join(key for key, _ in train), b"".join(key for key, _ in held)),
        overlap=windows.overlap(held_D, train_D),
    )
