"""Which sequences of an update are whose, where several processes make it together."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any

from tokenv.config.batch_assignment import BatchAssignment
from tokenv.core.sequences import SequenceBatch
from tokenv.data.stream import Streams


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
        count = len(streams.streams)
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
            found.append(self._streams.streams[stream].next(1 + len(others)))
            self._position[stream] += 1 + len(others)
        self._next += 1
        if self._next == len(slots.passes):
            for stream in self._used:
                self._skip_to(stream, slots.accumulate * slots.batch_size // len(self._streams.streams))
            self._next, self._position = 0, dict.fromkeys(self._used, 0)
        return SequenceBatch.join(found)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's streams stand after an update; see ``Streams.merge_states``."""
        return self._streams.state_dict(self._used)

    def _skip_to(self, stream: int, position: int) -> None:
        self._streams.streams[stream].skip(position - self._position[stream])
        self._position[stream] = position
