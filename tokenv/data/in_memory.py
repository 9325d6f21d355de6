"""A corpus held in memory."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from tokenv.core.errors import UserError
from tokenv.data.chunks import Chunks, ChunkSource, Document, SequenceBatch, chunk_documents
from tokenv.data.config import DataConfig
from tokenv.data.split import Split

GOLDEN_RATIO = (5**0.5 - 1) / 2


class InMemoryDataset:
    """The training and the validation pieces of a split.

    Attributes:
        fingerprint: Hex digest of every document on either side and of how they are cut.
        overlap: Share of the held-out 32-byte windows that stand in training text, too.

    Raises:
        UserError: If either side is too small for a single sequence.
    """

    def __init__(self, split: Split, config: DataConfig) -> None:
        self._train = cut_side(split.train, config)
        self._validation = cut_side(split.validation, config)
        if not len(self._train) or not len(self._validation):
            raise UserError(_too_small(split, config))
        self._seed = config.seed
        self.overlap = split.overlap
        header = repr((config.cut, config.seq_len, config.seed)).encode()
        self.fingerprint = hashlib.blake2b(b"|".join((header, *split.digests)), digest_size=16).hexdigest()

    def blocks(self, seed: int) -> InMemoryBlocks:
        """Return the endless epochs over the training pieces."""
        return InMemoryBlocks(self._train, self._seed, seed)

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the validation pieces, or the first `max_sequences` of them."""
        return self._validation.take(low_discrepancy_order(len(self._validation))[:max_sequences])


class InMemoryBlocks:
    """The same pieces over and over: one block an epoch, each in a new order."""

    def __init__(self, pieces: ChunkSource, data_seed: int, seed: int) -> None:
        self._pieces = pieces
        self._data_seed = data_seed
        self._seed = seed
        self._go_to(0)

    def current(self) -> tuple[ChunkSource, np.ndarray[Any, Any]]:
        """Return all the pieces and this epoch's order [P]."""
        return self._pieces, self._order_P

    def advance(self) -> None:
        """Begin the next epoch."""
        self._go_to(self._epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the epoch."""
        return {"seed": self._seed, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the epoch of `state`."""
        self._seed = state["seed"]
        self._go_to(state["epoch"])

    def _go_to(self, epoch: int) -> None:
        self._epoch = epoch
        generator = np.random.default_rng([self._data_seed, self._seed, epoch])
        self._order_P = generator.permutation(len(self._pieces))


def cut_side(documents: list[Document], config: DataConfig) -> Chunks:
    """Cut one side of a split as `config` says."""
    return chunk_documents(documents, seq_len=config.seq_len, cut=config.cut)


def low_discrepancy_order(count: int) -> np.ndarray[Any, Any]:
    """Order `count` pieces such that those at the beginning always lie evenly over the whole.

    Successive multiples of the golden ratio divide the unit interval evenly at whatever count one stops,
    so the first pieces of this order weigh every part of the corpus, and with it every document, alike.

    Returns:
        A permutation, int64 [count].
    """
    return np.argsort(np.arange(count) * GOLDEN_RATIO % 1.0, kind="stable")


def _too_small(split: Split, config: DataConfig) -> str:
    both = split.train + split.validation
    lengths = [len(document.content) for document in both]
    if not both:
        return f"data source {config.source!r} holds no document with a byte in it: point to data with text"
    held = sum(len(document.content) for document in split.validation)
    message = (
        f"data source {config.source!r} holds {len(both)} non-empty documents, {sum(lengths)} bytes, of "
        f"which {len(split.validation)} documents, {held} bytes, are for validation; expected at least one "
        f"sequence of data.seq_len {config.seq_len} bytes on either side. "
    )
    if config.cut == "document":
        return message + (
            f"data.cut 'document' needs whole documents that long, the longest has {max(lengths)} bytes: "
            "lower data.seq_len, or set data.cut to 'chunk'"
        )
    return message + (
        "A document is never on both sides: give more documents, lower data.seq_len, "
        "or set data.validation_source to other data"
    )
