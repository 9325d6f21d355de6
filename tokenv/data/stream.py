"""The endless stream of training sequences: sharded over ranks and resumable at every step."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tokenv.data.pieces import Cut, SequenceBatch
from tokenv.errors import UserError


class Blocks(Protocol):
    """An endless series of blocks of pieces, each in an order of its own."""

    def current(self) -> tuple[Cut, np.ndarray[Any, Any]]:
        """Return the current block, never empty, and the order [P] in which to take its pieces."""

    def advance(self) -> None:
        """Go to the next block."""

    def state_dict(self) -> dict[str, Any]:
        """Return what leads back to the current block, JSON-serialisable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the block that `state` was taken at."""


class TrainStream:
    """Endless training sequences.

    All ranks walk one global order, of which rank r of W takes the sequences r, r + W, r + 2W, …: at every
    step the ranks together take what a single rank would take with W times the count. Every epoch has a
    new order.

    Attributes:
        seq_len: Symbols in a sequence.
    """

    def __init__(self, blocks: Blocks, *, seq_len: int, fingerprint: str, rank: int, world: int) -> None:
        if world < 1 or not 0 <= rank < world:
            raise ValueError(
                f"rank {rank} of world {world} does not exist; expected 0 <= rank < world: "
                "pass the rank and the world size of this process"
            )
        self.seq_len = seq_len
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._rank = rank
        self._world = world
        # Where all the ranks together stand in the current block.
        self._position = 0

    def next(self, count: int) -> SequenceBatch:
        """Return this rank's next `count` sequences.

        Raises:
            ValueError: If `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"count is {count}; expected at least 1 sequence: ask for one or more")
        wanted_B = self._position + self._rank + self._world * np.arange(count)
        end = self._position + self._world * count
        parts = []
        while True:
            pieces, order_P = self._blocks.current()
            here_B = wanted_B[wanted_B < len(pieces)]
            if len(here_B):
                parts.append(pieces.take(order_P[here_B]))
            if end <= len(pieces):
                break
            wanted_B = wanted_B[len(here_B) :] - len(pieces)
            end -= len(pieces)
            self._blocks.advance()
        self._position = end
        return SequenceBatch.join(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream stands: small, JSON-serialisable and the same on every rank."""
        return {
            "fingerprint": self._fingerprint,
            "position": self._position,
            "blocks": self._blocks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at exactly the sequence after those taken when `state` was saved.

        The order is the saved one, whatever seed this stream was opened with; rank and world size stay
        this stream's own.

        Raises:
            UserError: If `state` is of another corpus.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise UserError(
                f"the saved state is of corpus {state.get('fingerprint')}, expected {self._fingerprint}: "
                "resume with the data and the data settings of the saved run, or start a new run"
            )
        self._blocks.load_state_dict(state["blocks"])
        self._position = state["position"]
