"""Corpora streamed from the Hugging Face hub: their shards, what is held out, and the blocks of training documents."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import datasets
import numpy as np
from tqdm import tqdm

from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.data import rows
from tokenv.data.chunks import Chunks, Document, chunk_documents
from tokenv.data.config import HUB_PREFIX, DataConfig
from tokenv.data.documents import content_of
from tokenv.data.rows import HUB_ADVICE, Row, iterate_rows
from tokenv.data.split import digest, threshold
from tokenv.data.stream import low_discrepancy_order

MIN_FILES = 64  # fewer files are split into row groups, each of which has to be opened
MIN_SHARDS = 20  # of fewer shards, holding one out would be too much
DEFAULT_VALIDATION_SEQUENCES = 512
# successive rows of a shard which are read for validation before some of another shard
ROWS_PER_TURN = 64
MAX_ROWS = 2**32  # of a shard


def validation_shards(count: int, fraction: float, seed: int) -> list[int]:
    """Choose the shards to hold out: none of fewer than 20, else a `fraction` and at least one, evenly spread."""
    if count < MIN_SHARDS:
        return []
    held_out = min(max(round(fraction * count), 1), count - 1)
    phase = np.random.default_rng(seed).random()
    return [int((index + phase) * count / held_out) for index in range(held_out)]


@dataclass(frozen=True)
class ShardAssignment:
    """Part of a data set which one of several streams reads.

    Attributes:
        number: index of the stream.
        streams: number of streams.
        shards: shards which the stream opens.
        shared: whether all streams open these shards, and each takes its own rows.
    """

    number: int
    streams: int
    shards: Sequence[int]
    shared: bool

    def has(self, shard: int, row: int) -> bool:
        """Check whether this stream reads a row of one of its shards."""
        return not self.shared or (shard + row) % self.streams == self.number


def partition_shards(shards: Sequence[int], streams: int) -> list[ShardAssignment]:
    """Partition a data set into streams by successive shards, or row by row if there are fewer shards."""
    if len(shards) < streams:
        return [ShardAssignment(number, streams, shards, shared=True) for number in range(streams)]
    ends = [len(shards) * number // streams for number in range(streams + 1)]
    return [
        ShardAssignment(n, streams, shards[ends[n] : ends[n + 1]], shared=False)
        for n in range(streams)
    ]


class StreamingDataset:
    """Data set of the hub, or of a local folder, read on the fly, in shards which can be read by themselves.

    The shards are the data set's files, or, of fewer than 64 Parquet files, these files' row groups.
    Of 20 or more shards a fraction, at least one, is held out: training opens none of these, and validation no other.
    Of fewer shards the documents with a low hash are held out wherever they are, at least a twentieth, so that they
    are found quickly. Either way no document is trained on that equals one of the first 512 validation sequences.

    Args:
        config: configuration which names the data set.
        validation: documents to validate on instead; equal documents of the data set are not trained on.
        progress: whether to show a progress bar while reading for validation.

    Raises:
        UserError: the data set cannot be opened, lacks the text column or holds no sequence to validate on.
    """

    def __init__(
        self, config: DataConfig, validation: list[Document] | None, *, progress: bool
    ) -> None:
        self.config = config
        self.name = config.source.removeprefix(HUB_PREFIX)
        self._origin = f"hub data set {self.name!r}"
        self._dataset = self._open()
        self._num_shards = int(self._dataset.num_shards)
        shards = range(self._num_shards)
        self._external_validation = external = validation is not None
        held_out = (
            [] if external else validation_shards(len(shards), config.validation, config.seed)
        )
        self._threshold = (
            b"" if external or held_out else threshold(max(config.validation, 1 / MIN_SHARDS))
        )
        self._validation_shards = held_out
        self._train_shards = sorted(set(shards) - set(held_out))
        self._validation_digests: set[bytes] = set()
        self._check_first_row(held_out or shards)

        self._validation_sequences = DEFAULT_VALIDATION_SEQUENCES
        if validation is None:
            documents = self._collect_validation(self._validation_sequences, progress)
        else:
            documents = dict(enumerate(validation))
        self._validation_digests = {
            digest(each.content, config.seed) for each in documents.values()
        }
        self._validation_chunks = self.cut(documents)
        if not len(self._validation_chunks):
            raise UserError(
                f"{self._origin} has no sequence of data.seq_len {config.seq_len} bytes to validate on: raise "
                "data.validation, lower data.seq_len, or set another data.validation_source"
            )
        self.fingerprint = self._compute_fingerprint()

    def _open(self) -> datasets.IterableDataset:
        try:
            dataset = rows.open_hub(self.name, self.config.hub_config, self.config.hub_split)
            return dataset.reshard() if dataset.num_shards < MIN_FILES else dataset
        except UserError:
            raise
        except Exception as error:  # see iterate_rows
            raise UserError(f"{self._origin} cannot be opened: {error}: {HUB_ADVICE}") from error

    def _check_first_row(self, shards: Sequence[int]) -> None:
        _, first = next(chain.from_iterable(self.rows(shard) for shard in shards), (0, None))
        if first is None:
            raise UserError(f"{self._origin} holds no row: choose another data.hub_split")
        content_of(first, self.config.column, self._origin)

    def _compute_fingerprint(self) -> str:
        config = self.config
        header = (
            self.name,
            config.hub_config,
            config.hub_split,
            config.column,
            config.cut,
            self._num_shards,
        )
        numbers = (config.seq_len, config.seed, config.validation, config.shuffle_buffer)
        validation = self.validation(None).symbol_BN.numpy().astype(np.uint8).tobytes()
        return hashlib.blake2b(
            repr((header, numbers)).encode() + validation, digest_size=16
        ).hexdigest()

    def rows(self, shard: int, first: int = 0) -> Iterator[tuple[int, Row]]:
        """Yield the rows of a shard with their numbers, beginning at row `first`; the shard is opened lazily.

        Raises:
            UserError: the shard cannot be read to its end.
        """
        shard_rows = iterate_rows(
            lambda: self._dataset.shard(self._num_shards, shard),
            f"{self._origin} cannot be read",
            HUB_ADVICE,
        )
        return islice(enumerate(shard_rows), first, None)

    def document(self, row: Row, shard: int, number: int) -> Document:
        """Return the document in the `number`-th row of a shard."""
        content = content_of(row, self.config.column, self._origin)
        location = f" shard {shard}" if self._num_shards > 1 else ""
        return Document(f"{self.name}{location} row {number}", content)

    def document_id(self, shard: int, row: int) -> int:
        """Return a number which identifies the document of this row."""
        return shard * MAX_ROWS + row

    def is_held_out(self, document: Document) -> bool:
        """Check whether `document` is excluded from training."""
        key = digest(document.content, self.config.seed)
        return key < self._threshold or key in self._validation_digests

    def streams(self, seed: int, count: int) -> list[StreamingBlocks]:
        """Return the blocks of each of `count` streams, which partition the data set."""
        return [
            StreamingBlocks(self, each, seed)
            for each in partition_shards(self._train_shards, count)
        ]

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the first `max_sequences` validation sequences, 512 by default."""
        if self._external_validation:
            return self._validation_chunks.take(
                low_discrepancy_order(len(self._validation_chunks))[:max_sequences]
            )
        count = max_sequences or DEFAULT_VALIDATION_SEQUENCES
        if count > self._validation_sequences:
            self._validation_chunks = self.cut(self._collect_validation(count, progress=False))
            self._validation_sequences = count
        return self._validation_chunks.take(np.arange(min(count, len(self._validation_chunks))))

    def _collect_validation(self, sequences: int, progress: bool) -> dict[int, Document]:
        """Return the first held-out documents which suffice for `sequences`, by their ids."""
        documents: dict[int, Document] = {}
        total_bytes = long_documents = 0
        seq_len = self.config.seq_len
        cuts_whole = self.config.cut == "document"
        bar = tqdm(
            self._validation_rows(),
            f"reading {self.name!r}",
            unit=" documents",
            disable=not progress,
        )
        with bar as candidates:
            for shard, number, row in candidates:
                document = self.document(row, shard, number)
                if not document.content or not (
                    self._validation_shards or self.is_held_out(document)
                ):
                    continue
                documents[self.document_id(shard, number)] = document
                total_bytes += len(document.content) + 1
                long_documents += len(document.content) >= seq_len
                if (long_documents if cuts_whole else (total_bytes - 1) // seq_len) >= sequences:
                    break
        return documents

    def _validation_rows(self) -> Iterator[tuple[int, int, Row]]:
        """Yield the rows which may be held out, some of each shard in turn: shard, row number and row."""
        shards: Sequence[int] = self._validation_shards or range(self._num_shards)
        order = [shards[index] for index in low_discrepancy_order(len(shards))]
        for begin in range(0, len(order), MIN_SHARDS):  # so many are open at once
            queue = deque((shard, self.rows(shard)) for shard in order[begin : begin + MIN_SHARDS])
            while queue:
                shard, shard_rows = queue.popleft()
                some = list(islice(shard_rows, ROWS_PER_TURN))
                yield from ((shard, number, row) for number, row in some)
                if len(some) == ROWS_PER_TURN:
                    queue.append((shard, shard_rows))

    def cut(self, documents: dict[int, Document]) -> Chunks:
        """Cut documents, given by their ids, into chunks."""
        return chunk_documents(
            list(documents.values()),
            seq_len=self.config.seq_len,
            cut=self.config.cut,
            ids=list(documents),
        )


class StreamingBlocks:
    """Blocks of successive documents of one stream, each block's chunks in an order of its own.

    Unlike a shuffle buffer which is refilled as it drains, a block can be read again as it was. A saved state
    therefore need not hold the documents, but only which block it is, and at which row of which shard it begins.

    Args:
        data: data set to read.
        assignment: shards and rows of this stream.
        seed: seed of the order.
    """

    def __init__(self, data: StreamingDataset, assignment: ShardAssignment, seed: int) -> None:
        self._data = data
        self._assignment = assignment
        self._size = -(-data.config.shuffle_buffer // assignment.streams)
        self._has_sequences = False
        self._block: tuple[Chunks, np.ndarray[Any, Any]] | None = None
        self._go_to({"seed": seed, "epoch": 0, "block": 0, "shard": 0, "row": 0})

    def current(self) -> tuple[Chunks, np.ndarray[Any, Any]]:
        """Return the current block, reading it if necessary, and its order [P].

        Raises:
            UserError: the stream has no sequence to train on, or cannot be read.
        """
        if self._block is None:
            first_epoch = self._state["epoch"]
            while not len(chunks := self._read()):
                self._advance()
                if not self._has_sequences and self._state["epoch"] == first_epoch + 2:
                    raise UserError(self._describe_empty())
            self._has_sequences = True
            names = ("seed", "epoch", "block")
            key = [
                self._data.config.seed,
                *(self._state[name] for name in names),
                self._assignment.number,
            ]
            self._block = chunks, np.random.default_rng(key).permutation(len(chunks))
        return self._block

    def advance(self) -> None:
        """Go to the next block."""
        self.current()
        self._advance()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the position in the stream's shards at which the current block begins."""
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the block which begins at the position in `state`."""
        self._go_to({name: state[name] for name in self._state})

    def _go_to(self, state: dict[str, int]) -> None:
        self._state = state
        self._next: dict[str, int] | None = None
        self._block = None
        self._rows = self._walk(state["shard"], state["row"])

    def _walk(self, first: int, first_row: int) -> Iterator[tuple[int, int, Row]]:
        """Yield the stream's rows to the end of the epoch: index of the stream's shard, row number and row."""
        for index in range(first, len(self._assignment.shards)):
            shard = self._assignment.shards[index]
            for number, row in self._data.rows(shard, first_row):
                if self._assignment.has(shard, number):
                    yield index, number, row
            first_row = 0

    def _read(self) -> Chunks:
        documents = {}
        index = self._state["shard"]
        number = self._state["row"]
        count = 0
        for index, number, row in islice(self._rows, self._size):
            count += 1
            shard = self._assignment.shards[index]
            document = self._data.document(row, shard, number)
            if document.content and not self._data.is_held_out(document):
                documents[self._data.document_id(shard, number)] = document
        self._next = {"shard": index, "row": number + 1} if count == self._size else None
        return self._data.cut(documents)

    def _advance(self) -> None:
        """Move behind the rows just read, or to the next epoch at the end of the stream."""
        if self._next is None:
            self._go_to(
                {**self._state, "epoch": self._state["epoch"] + 1, "block": 0, "shard": 0, "row": 0}
            )
            return
        self._state = {**self._state, "block": self._state["block"] + 1, **self._next}
        self._block = None

    def _describe_empty(self) -> str:
        number = self._assignment.number
        streams = self._assignment.streams
        stream = f"stream {number} of {streams} of it" if streams > 1 else "it"
        return (
            f"hub data set {self._data.name!r}: {stream} has no sequence of data.seq_len {self._data.config.seq_len} "
            "bytes to train on: lower data.seq_len"
            + (" or data.streams" if streams > 1 else "")
            + ", "
            "or set data.cut to 'chunk'"
        )
