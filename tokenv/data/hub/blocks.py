"""Blocks of training documents streamed from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np

from tokenv.core.errors import UserError
from tokenv.data.chunks import Chunks, Document
from tokenv.data.config import DataConfig
from tokenv.data.hub.shards import ShardAssignment
from tokenv.data.rows import Row


class Rows(Protocol):
    """What blocks are read from; see ``tokenv.data.hub.streaming.StreamingDataset``."""

    config: DataConfig
    name: str

    def rows(self, shard: int, first: int = 0) -> Iterator[tuple[int, Row]]:
        """The rows of a shard and their numbers in it."""

    def document(self, row: Row, shard: int, number: int) -> Document:
        """The document in a row."""

    def number(self, shard: int, row: int) -> int:
        """What tells a document from all others."""

    def is_held_out(self, document: Document) -> bool:
        """Whether it is kept from training."""

    def cut(self, documents: dict[int, Document]) -> Chunks:
        """Documents by their number, cut."""


class StreamingBlocks:
    """Blocks of successive documents of one stream, each block's pieces in an order of its own.

    Unlike a shuffle buffer that is refilled as it drains, a block can be read again as it was, so a saved
    state need not hold the documents: it says which block it is, and with which row of which shard it begins.

    Args:
        data: What to read.
        part: What of it is this stream's.
        seed: Seed of the order.
    """

    def __init__(self, data: Rows, part: ShardAssignment, seed: int) -> None:
        self._data = data
        self._part = part
        self._size = -(-data.config.shuffle_buffer // part.streams)
        self._trainable = False
        self._loaded: tuple[Chunks, np.ndarray[Any, Any]] | None = None
        self._go_to({"seed": seed, "epoch": 0, "block": 0, "shard": 0, "row": 0})

    def current(self) -> tuple[Chunks, np.ndarray[Any, Any]]:
        """Return the current block, reading it if need be, and its order [P].

        Raises:
            UserError: If the stream has no sequence to train on, or cannot be read.
        """
        if self._loaded is None:
            begun = self._state["epoch"]
            while not len(pieces := self._read()):
                self._pass_on()
                if not self._trainable and self._state["epoch"] == begun + 2:
                    raise UserError(self._nothing())
            self._trainable = True
            names = ("seed", "epoch", "block")
            key = [self._data.config.seed, *(self._state[name] for name in names), self._part.number]
            self._loaded = pieces, np.random.default_rng(key).permutation(len(pieces))
        return self._loaded

    def advance(self) -> None:
        """Go to the next block."""
        self.current()
        self._pass_on()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and where the current block begins in the stream's shards."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the block that begins where `state` says."""
        self._go_to({name: state[name] for name in self._state})

    def _go_to(self, state: dict[str, int]) -> None:
        self._state = state
        self._next: dict[str, int] | None = None
        self._loaded = None
        self._rows = self._walk(state["shard"], state["row"])

    def _walk(self, first: int, row: int) -> Iterator[tuple[int, int, Row]]:
        """The stream's rows to the end of the epoch: which of its shards, which row of it, and the row itself."""
        for place in range(first, len(self._part.shards)):
            shard = self._part.shards[place]
            for number, found in self._data.rows(shard, row if place == first else 0):
                if self._part.has(shard, number):
                    yield place, number, found

    def _read(self) -> Chunks:
        documents = {}
        place, row, count = self._state["shard"], self._state["row"], 0
        for place, row, found in islice(self._rows, self._size):
            count += 1
            shard = self._part.shards[place]
            document = self._data.document(found, shard, row)
            if document.content and not self._data.is_held_out(document):
                documents[self._data.number(shard, row)] = document
        self._next = {"shard": place, "row": row + 1} if count == self._size else None
        return self._data.cut(documents)

    def _pass_on(self) -> None:
        """Move behind the rows just read: to the next epoch if the stream has no more."""
        if self._next is None:
            self._go_to({**self._state, "epoch": self._state["epoch"] + 1, "block": 0, "shard": 0, "row": 0})
            return
        self._state = {**self._state, "block": self._state["block"] + 1, **self._next}
        self._loaded = None

    def _nothing(self) -> str:
        part = self._part
        which = f"stream {part.number} of {part.streams} of it" if part.streams > 1 else "it"
        return (
            f"hub data set {self._data.name!r}: {which} has no sequence of data.seq_len {self._data.config.seq_len} "
            "bytes to train on: lower data.seq_len" + (" or data.streams" if part.streams > 1 else "") + ", "
            "or set data.cut to 'chunk'"
        )
