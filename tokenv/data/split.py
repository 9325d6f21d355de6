"""Which documents are held out, decided by what they contain and by nothing else."""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tokenv.data.config import DataConfig
from tokenv.data.pieces import Document

DIGEST_BYTES = 16


def digest(content: bytes, seed: int) -> bytes:
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
    """

    train: list[Document]
    validation: list[Document]
    digests: tuple[bytes, bytes]


def split_documents(documents: Iterable[Document], config: DataConfig) -> Split:
    """Hold out the documents whose digest is low.

    Neither the split nor the order within it depends on the order of `documents`, and equal documents
    stay together. Where the fraction `config.validation` holds out too little for a single sequence, the
    documents with the next lowest digests are held out too.

    Args:
        documents: The documents; empty ones are left out.
        config: Gives the fraction, the seed and what makes a sequence.
    """
    ranked = _rank(documents, config.seed)
    digests = [key for key, _ in ranked]
    held = bisect_left(digests, threshold(config.validation))
    length_D = np.array([len(document.content) for _, document in ranked], dtype=np.int64)
    if config.cut == "document":
        enough_D = np.maximum.accumulate(length_D) >= config.seq_len
    else:
        enough_D = np.cumsum(length_D + 1) - 1 >= config.seq_len
    if np.any(enough_D):
        held = max(held, int(np.argmax(enough_D)) + 1)
        held = bisect_right(digests, digests[held - 1])
    return _split(ranked[held:], ranked[:held])


def split_from(documents: Iterable[Document], validation: Iterable[Document], config: DataConfig) -> Split:
    """Train on `documents` without those that equal one of `validation`."""
    held = _rank(validation, config.seed)
    known = {key for key, _ in held}
    return _split([entry for entry in _rank(documents, config.seed) if entry[0] not in known], held)


def _rank(documents: Iterable[Document], seed: int) -> list[tuple[bytes, Document]]:
    ranked = [(digest(document.content, seed), document) for document in documents if document.content]
    return sorted(ranked, key=lambda entry: (entry[0], entry[1].name))


def _split(train: list[tuple[bytes, Document]], validation: list[tuple[bytes, Document]]) -> Split:
    return Split(
        train=[document for _, document in train],
        validation=[document for _, document in validation],
        digests=(b"".join(key for key, _ in train), b"".join(key for key, _ in validation)),
    )
