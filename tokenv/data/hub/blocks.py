"""Blocks of training documents streamed from the Hugging Face hub."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

import datasets
import numpy as np

from tokenv.data.config import DataConfig
from tokenv.data.pieces import Document, Pieces
from tokenv.data.reading import Row
from tokenv.errors import UserError


class Rows(Protocol):
    """What blocks are read from; see ``tokenv.data.hub.dataset.HubData``."""

    config: DataConfig
    name: str

    def open(self) -> datasets.IterableDataset:
        """The data set, for a reader with a place of its own."""

    def rows(self, opened: datasets.IterableDataset) -> Iterator[Row]:
        """The rows of what `open` gave."""

    def document(self, row: Row, number: int) -> Document:
        """The document in a row."""

    def is_held(self, document: Document) -> bool:
        """Whether it is kept from training."""

    def cut(self, documents: dict[int, Document]) -> Pieces:
        """Documents by their number, cut."""


class HubBlocks:
    """Blocks of `shuffle_buffer` successive documents, each block's pieces in an order of its own.

    Unlike a shuffle buffer that is refilled as it drains, a block can be read again as it was, so a saved
    state need not hold the documents.
    """

    def __init__(self, data: Rows, seed: int) -> None:
        self._data = data
        self._trainable = False
        self._loaded: tuple[Pieces, np.ndarray[Any, Any]] | None = None
        self._go_to({"seed": seed, "epoch": 0, "block": 0, "row": 0, "source": None})

    def current(self) -> tuple[Pieces, np.ndarray[Any, Any]]:
        """Return the current block, reading it if need be, and its order [P].

        Raises:
            ValueError: If the whole data set has no sequence to train on.
        """
        if self._loaded is None:
            pieces = self._read()
            while not len(pieces):
                self._pass_on()
                if self._state["row"] == 0 and not self._trainable:
                    raise UserError(
                        f"hub data set {self._data.name!r} has no sequence of data.seq_len "
                        f"{self._data.config.seq_len} bytes to train on: lower data.seq_len, "
                        "or set data.cut to 'chunk'"
                    )
                pieces = self._read()
            self._trainable = True
            key = [self._data.config.seed, *(self._state[name] for name in ("seed", "epoch", "block"))]
            self._loaded = pieces, np.random.default_rng(key).permutation(len(pieces))
        return self._loaded

    def advance(self) -> None:
        """Go to the next block."""
        self.current()
        self._pass_on()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and where the current block begins in the data set."""
        return copy.deepcopy(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the block that begins where `state` says."""
        self._go_to(copy.deepcopy(state))

    def _go_to(self, state: dict[str, Any]) -> None:
        self._state = state
        self._loaded = None
        self._rows_read = 0
        self._dataset = self._data.open()
        if state["source"] is not None:
            self._dataset.load_state_dict(state["source"])
        self._rows = self._data.rows(self._dataset)

    def _read(self) -> Pieces:
        rows = list(islice(self._rows, self._data.config.shuffle_buffer))
        self._rows_read = len(rows)
        first = self._state["row"]
        documents = {number: self._data.document(row, number) for number, row in enumerate(rows, first)}
        return self._data.cut({n: d for n, d in documents.items() if d.content and not self._data.is_held(d)})

    def _pass_on(self) -> None:
        """Move behind the rows just read: to the next epoch if the data set has no more."""
        state = self._state
        if self._rows_read < self._data.config.shuffle_buffer:
            self._go_to({**state, "epoch": state["epoch"] + 1, "block": 0, "row": 0, "source": None})
            return
        self._loaded = None
        self._state = {
            **state,
            "block": state["block"] + 1,
            "row": state["row"] + self._rows_read,
            "source": copy.deepcopy(self._dataset.state_dict()),
        }
