"""Which sequences of an update are whose, where several processes make it together."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tokenv.config.schema import TrainConfig
from tokenv.core.errors import UserError
from tokenv.data.chunks import SequenceBatch
from tokenv.data.stream import Streams


@dataclass(frozen=True)
class BatchAssignment:
    """Of the A passes of B sequences that make an update, those of one rank of W.

    As many groups of successive ranks as divide both A and W take successive passes, and share each between them: its
    rows, in the order of their ranks. So a pass is shared only where there are more ranks than passes to go round.

    Attributes:
        accumulate: passes A.
        batch_size: sequences B of each.
        rank: this process.
        world: how many there are, W.
        together: whether all ranks share every pass, because each pass learns from the one before.

    Raises:
        UserError: the ranks do not divide the sequences.
    """

    accumulate: int
    batch_size: int
    rank: int = 0
    world: int = 1
    together: bool = False

    def __post_init__(self) -> None:
        slots = self.accumulate * self.batch_size
        if slots % self.world:
            raise UserError(
                f"{self.world} processes cannot share the {slots} sequences of an update evenly (train.accumulate = "
                f"{self.accumulate}, train.batch_size = {self.batch_size}): expected a number that divides {slots}, "
                f"such as {_divisor(slots, self.world)}: change torchrun's --nproc-per-node, or train.batch_size"
            )
        if self.together and self.batch_size % self.world:
            raise UserError(
                f"{self.world} processes with train.batch_size = {self.batch_size}: this agent or estimator remembers "
                "something of every pass for the next one, so that all processes share every pass: expected a number "
                f"that divides train.batch_size, such as {_divisor(self.batch_size, self.world)}"
            )

    @classmethod
    def of(cls, config: TrainConfig, rank: int = 0, world: int = 1, *, together: bool = False) -> BatchAssignment:
        """Of a run; see there."""
        return cls(config.accumulate, config.batch_size, rank, world, together)

    def streams(self, most: int) -> int:
        """How many streams, at most so many, the update's sequences can be shared out to."""
        return _divisor(self.batch_size if self.together else self.accumulate * self.batch_size, most)

    @property
    def groups(self) -> int:
        """Of ranks that share their passes."""
        return 1 if self.together else math.gcd(self.accumulate, self.world)

    @property
    def members(self) -> int:
        """Ranks of a group."""
        return self.world // self.groups

    @property
    def passes(self) -> range:
        """Which of the update's passes are this rank's."""
        each = self.accumulate // self.groups
        first = self.rank // self.members * each
        return range(first, first + each)

    @property
    def rows(self) -> range:
        """Which rows of these passes are."""
        each = self.batch_size // self.members
        first = self.rank % self.members * each
        return range(first, first + each)


class RankStream:
    """A rank's sequences of the streams that all ranks read from: slot s of an update is the same text at any W.

    Of an update's sequences each of S streams gives those that a rank of S would make: a rank of W, where W divides S,
    reads S / W streams, and nobody else reads these. Where it does not, ranks walk a stream together, and each skips
    what others take.

    After an update's last pass the streams stand behind the whole update, so that their state knows nothing of ranks.

    Args:
        streams: of the run; those that are not this rank's are never read.
        slots: this rank's.
    """

    def __init__(self, streams: Streams, slots: BatchAssignment) -> None:
        self.seq_len = streams.seq_len
        self._streams, self._slots = streams, slots
        count = len(streams.each)
        every = [BatchAssignment(slots.accumulate, slots.batch_size, n, count, slots.together) for n in range(count)]
        self._source = {  # of an update's sequences: which stream's, and its number among those of that stream
            place: (stream, number)
            for stream, each in enumerate(every)
            for number, place in enumerate(itertools.product(each.passes, each.rows))
        }
        self._used = frozenset(self._source[place][0] for place in itertools.product(slots.passes, slots.rows))
        self._next = 0  # of this rank's passes
        self._position = dict.fromkeys(self._used, 0)  # of the update's sequences, in each stream

    def next(self, count: int) -> SequenceBatch:
        """This rank's sequences of its next pass, all of them."""
        slots, found = self._slots, []
        assert count == len(slots.rows), (count, slots.rows)
        mine = [self._source[slots.passes[self._next], row] for row in slots.rows]
        for stream, some in itertools.groupby(mine, key=itemgetter(0)):
            first, *others = [number for _, number in some]
            self._skip_to(stream, first)
            found.append(self._streams.each[stream].next(1 + len(others)))
            self._position[stream] += 1 + len(others)
        self._next += 1
        if self._next == len(slots.passes):
            for stream in self._used:
                self._skip_to(stream, slots.accumulate * slots.batch_size // len(self._streams.each))
            self._next, self._position = 0, dict.fromkeys(self._used, 0)
        return SequenceBatch.join(found)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's streams stand after an update; ``Streams.joined`` makes the run's state of all ranks'."""
        return self._streams.state_dict(self._used)

    def _skip_to(self, stream: int, position: int) -> None:
        self._streams.each[stream].skip(position - self._position[stream])
        self._position[stream] = position


def _divisor(number: int, most: int) -> int:
    return next(each for each in range(most, 0, -1) if number % each == 0)
