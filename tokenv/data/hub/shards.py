"""The shards of a streamed data set: which are held out, and which are whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import datasets
import numpy as np

from tokenv.core.errors import UserError
from tokenv.data.rows import HUB_ADVICE, Row, iterate_rows

ENOUGH = 64  # files; fewer are taken apart, for which each has to be opened, and each row group again
FEW = 20  # shards, of which one would be too much to hold out


class Shards:
    """A streamed data set as a list of shards, each of which can be read by itself.

    They are the data set's files, or, of fewer than 64 Parquet files, these files' row groups.

    Args:
        opened: Opens the data set.
        name: Of the data set, for messages.

    Raises:
        UserError: If the data set cannot be opened.
    """

    def __init__(self, opened: Callable[[], datasets.IterableDataset], name: str) -> None:
        self._name = name
        try:
            dataset = opened()
            self._dataset = dataset.reshard() if dataset.num_shards < ENOUGH else dataset
        except UserError:
            raise
        except Exception as error:  # see rows_of
            raise UserError(f"hub data set {name!r} cannot be opened: {error}: {HUB_ADVICE}") from error

    def __len__(self) -> int:
        return int(self._dataset.num_shards)

    def rows(self, shard: int, first: int = 0) -> Iterator[tuple[int, Row]]:
        """The rows of a shard with their numbers in it, from the `first` on; it is opened when the first is asked for.

        Raises:
            UserError: If it cannot be read to its end.
        """
        rows = iterate_rows(
            lambda: self._dataset.shard(num_shards=len(self), index=shard),
            f"hub data set {self._name!r} cannot be read",
            HUB_ADVICE,
        )
        return islice(enumerate(rows), first, None)


def validation_shards(count: int, fraction: float, seed: int) -> list[int]:
    """Choose the shards to hold out: none of fewer than 20, else a `fraction` and at least one, evenly spread."""
    if count < FEW:
        return []
    wanted = min(max(round(fraction * count), 1), count - 1)
    phase = np.random.default_rng(seed).random()
    return [int((place + phase) * count / wanted) for place in range(wanted)]


@dataclass(frozen=True)
class ShardAssignment:
    """What one of several streams reads.

    Attributes:
        number: Which stream it is.
        streams: How many there are.
        shards: The shards it opens.
        shared: Whether all streams open these shards, and each takes its own rows.
    """

    number: int
    streams: int
    shards: Sequence[int]
    shared: bool

    def has(self, shard: int, row: int) -> bool:
        """Tell whether a row of one of the shards is this stream's."""
        return not self.shared or (shard + row) % self.streams == self.number


def partition_shards(shards: Sequence[int], streams: int) -> list[ShardAssignment]:
    """Cut a data set into streams: successive shards to each, or rows in turn where there are fewer shards."""
    if len(shards) < streams:
        return [ShardAssignment(number, streams, shards, shared=True) for number in range(streams)]
    ends = [len(shards) * number // streams for number in range(streams + 1)]
    return [ShardAssignment(n, streams, shards[ends[n] : ends[n + 1]], shared=False) for n in range(streams)]
