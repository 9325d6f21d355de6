"""The endless streams of training sequences: resumable at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tokenv.core.errors import UserError
from tokenv.data.chunks import ChunkSource, SequenceBatch


class EpochBlocks(Protocol):
    """An endless series of blocks of pieces, each in an order of its own."""

    def current(self) -> tuple[ChunkSource, np.ndarray[Any, Any]]:
        """Return the current block, never empty, and the order [P] in which to take its pieces."""

    def advance(self) -> None:
        """Go to the next block."""

    def state_dict(self) -> dict[str, Any]:
        """Return what leads back to the current block, JSON-serialisable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the block that `state` was taken at."""


class TrainStream:
    """Endless training sequences, every epoch in a new order.

    Processes that read the same stream take their own sequences each and skip those of others.

    Attributes:
        seq_len: Symbols in a sequence.
    """

    def __init__(self, blocks: EpochBlocks, *, seq_len: int, fingerprint: str) -> None:
        self.seq_len = seq_len
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._position = 0  # in the current block

    def next(self, count: int) -> SequenceBatch:
        """Return the next `count` sequences.

        Raises:
            ValueError: If `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"count is {count}; expected at least 1 sequence: ask for one or more")
        return SequenceBatch.join([pieces.take(order_B) for pieces, order_B in self._walk(count)])

    def skip(self, count: int) -> None:
        """Go on by `count` sequences, at least 0, without taking them."""
        for _ in self._walk(count):
            pass

    def _walk(self, count: int) -> Iterator[tuple[ChunkSource, np.ndarray[Any, Any]]]:
        """Go on by `count` sequences: the pieces of every block on the way, and which of them, in order."""
        while count:
            pieces, order_P = self._blocks.current()
            if self._position == len(pieces):
                self._blocks.advance()
                self._position = 0
                continue
            here = min(count, len(pieces) - self._position)
            yield pieces, order_P[self._position : self._position + here]
            self._position += here
            count -= here

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands: small and JSON-serialisable."""
        return {
            "fingerprint": self._fingerprint,
            "position": self._position,
            "blocks": self._blocks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at exactly the sequence after those taken when `state` was saved.

        The order is the saved one, whatever seed this stream was opened with.

        Raises:
            UserError: If `state` is of another corpus.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise UserError(
                f"the saved state is of corpus {state.get('fingerprint')}, expected {self._fingerprint}: "
                "resume with the data and the data settings of the saved run, or start a new run "
                "(init_from=RUN goes on with its model)"
            )
        self._blocks.load_state_dict(state["blocks"])
        self._position = state["position"]


class Streams:
    """The streams that a run's text comes from: what one reads no other does, and each has a place of its own.

    Attributes:
        each: At least one; all of one length.
    """

    def __init__(self, each: Sequence[TrainStream]) -> None:
        self.each = list(each)

    @property
    def seq_len(self) -> int:
        """Symbols in a sequence."""
        return self.each[0].seq_len

    def state_dict(self, used: frozenset[int]) -> dict[str, Any]:
        """Return where the streams stand that are `used` here; of a single stream its own state."""
        if len(self.each) == 1:
            return self.each[0].state_dict()
        return {"streams": [each.state_dict() if n in used else None for n, each in enumerate(self.each)]}

    @staticmethod
    def joined(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Put together what processes say that use other streams each, or some of them the same."""
        if "streams" not in states[0]:
            return states[0]
        told = zip(*(state["streams"] for state in states), strict=True)
        return {"streams": [next(place for place in places if place is not None) for places in told]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at exactly the sequences after those taken when `state` was saved, by whichever processes.

        Raises:
            UserError: If `state` is of another corpus, or of another number of streams.
        """
        if len(self.each) == 1 and "streams" not in state:
            return self.each[0].load_state_dict(state)
        saved = state.get("streams", [None])
        if len(saved) != len(self.each):
            raise UserError(
                f"the saved state has {len(saved)} for the number of streams, expected {len(self.each)}: resume with "
                "the data.streams, train.batch_size and train.gradient_accumulation_steps of the saved run. Runs on "
                "streamed data that "
                "an earlier version has saved cannot go on, for it read in another order; init_from=RUN begins a "
                "new one with their model"
            )
        for each, place in zip(self.each, saved, strict=True):
            each.load_state_dict(place)
        return None
