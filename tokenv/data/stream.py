"""Endless streams of training sequences which resume at every step, and the epochs over data in memory."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.data.chunks import ChunkSource

GOLDEN_RATIO = (5**0.5 - 1) / 2


class EpochBlocks(Protocol):
    """Endless series of blocks of sequences, each in an order of its own."""

    def current(self) -> tuple[ChunkSource, np.ndarray[Any, Any]]:
        """Return the current block, which is never empty, and the order [P] in which to take its sequences."""

    def advance(self) -> None:
        """Go to the next block."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the current block, JSON-serialisable."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the block at which `state` was saved."""


class InMemoryBlocks:
    """Endless epochs over the same sequences: one block per epoch, each in a new order."""

    def __init__(self, sequences: ChunkSource, data_seed: int, seed: int) -> None:
        self._sequences = sequences
        self._data_seed = data_seed
        self.load_state_dict({"seed": seed, "epoch": 0})

    def current(self) -> tuple[ChunkSource, np.ndarray[Any, Any]]:
        """Return all sequences and this epoch's order [P]."""
        return self._sequences, self._order_P

    def advance(self) -> None:
        """Begin the next epoch."""
        self.load_state_dict({"seed": self._seed, "epoch": self._epoch + 1})

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the epoch."""
        return {"seed": self._seed, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the epoch of `state`."""
        self._seed = state["seed"]
        self._epoch = state["epoch"]
        generator = np.random.default_rng([self._data_seed, self._seed, self._epoch])
        self._order_P = generator.permutation(len(self._sequences))


class Dataset(Protocol):
    """Sequences for training and validation, all in memory; a ``test`` of the same form as ``validation`` is optional.

    Attributes:
        fingerprint: hex digest of the sequences, and of how they are split and cut.
    """

    fingerprint: str

    def blocks(self, seed: int) -> InMemoryBlocks:
        """Return the endless epochs over the training sequences."""

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the validation sequences, or so many which represent them; always the same."""


def low_discrepancy_order(count: int) -> np.ndarray[Any, Any]:
    """Return an order of `count` sequences whose first entries always lie evenly over the whole.

    Successive multiples of the golden ratio divide the unit interval evenly after any number of them, so the first
    sequences of this order weigh every part of the corpus, and with it every document, equally.

    Returns:
        A permutation, int64 [count].
    """
    return np.argsort(np.arange(count) * GOLDEN_RATIO % 1.0, kind="stable")


class TrainStream:
    """Endless training sequences, every epoch in a new order.

    Processes which read the same stream take their own sequences and skip those of others.

    Attributes:
        seq_len: symbols of a sequence.
    """

    def __init__(self, blocks: EpochBlocks, *, seq_len: int, fingerprint: str) -> None:
        self.seq_len = seq_len
        self._blocks = blocks
        self._fingerprint = fingerprint
        self._position = 0  # in the current block

    def next(self, count: int) -> SequenceBatch:
        """Return the next `count` sequences.

        Raises:
            ValueError: `count` is not positive.
        """
        if count < 1:
            raise ValueError(f"count is {count}; expected at least 1 sequence: ask for one or more")
        return SequenceBatch.join(
            [sequences.take(order_B) for sequences, order_B in self._walk(count)]
        )

    def skip(self, count: int) -> None:
        """Go on by `count` sequences, at least 0, without reading them."""
        for _ in self._walk(count):
            pass

    def _walk(self, count: int) -> Iterator[tuple[ChunkSource, np.ndarray[Any, Any]]]:
        """Go on by `count` sequences and yield every block passed, with the indices of its next sequences."""
        while count:
            sequences, order_P = self._blocks.current()
            if self._position == len(sequences):
                self._blocks.advance()
                self._position = 0
                continue
            taken = min(count, len(sequences) - self._position)
            yield sequences, order_P[self._position : self._position + taken]
            self._position += taken
            count -= taken

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position, small and JSON-serialisable."""
        return {
            "fingerprint": self._fingerprint,
            "position": self._position,
            "blocks": self._blocks.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at exactly the sequence after those read when `state` was saved.

        The order is the saved one, whatever the seed of this stream.

        Raises:
            UserError: `state` is of another corpus.
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
    """Disjoint streams of a run's training data, each with a position of its own.

    Attributes:
        streams: at least one stream; all of one sequence length.
    """

    def __init__(self, streams: Sequence[TrainStream]) -> None:
        self.streams = list(streams)

    @property
    def seq_len(self) -> int:
        """Symbols of a sequence."""
        return self.streams[0].seq_len

    def state_dict(self, used: frozenset[int]) -> dict[str, Any]:
        """Return the positions of the streams which this process uses; of a single stream its own state."""
        if len(self.streams) == 1:
            return self.streams[0].state_dict()
        return {
            "streams": [
                each.state_dict() if n in used else None for n, each in enumerate(self.streams)
            ]
        }

    @staticmethod
    def merge_states(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the states of processes, which may use different streams or the same ones."""
        if "streams" not in states[0]:
            return states[0]
        by_stream = zip(*(state["streams"] for state in states), strict=True)
        return {
            "streams": [next(state for state in each if state is not None) for each in by_stream]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at exactly the sequences after those which any processes had read when `state` was saved.

        Raises:
            UserError: `state` is of another corpus, or of another number of streams.
        """
        saved = state.get("streams", [state])  # a single stream has a state of its own
        if len(saved) != len(self.streams):
            raise UserError(
                f"the saved state has {len(saved)} for the number of streams, expected {len(self.streams)}: resume "
                "with the data.streams, train.batch_size and train.gradient_accumulation_steps of the saved run"
            )
        for stream, stream_state in zip(self.streams, saved, strict=True):
            stream.load_state_dict(stream_state)
