"""A corpus streamed from the Hugging Face hub."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
from tqdm import tqdm

from tokenv.core.errors import UserError
from tokenv.data import rows
from tokenv.data.chunks import Chunks, Document, SequenceBatch, chunk_documents
from tokenv.data.config import HUB_PREFIX, DataConfig
from tokenv.data.hub.blocks import StreamingBlocks
from tokenv.data.hub.shards import FEW, Shards, partition_shards, validation_shards
from tokenv.data.in_memory import cut_side, low_discrepancy_order
from tokenv.data.rows import Row
from tokenv.data.split import digest, threshold
from tokenv.data.text.documents import content_of

DEFAULT_VALIDATION_SEQUENCES = 512
AT_A_PLACE = 64  # successive rows for validation, before some of another shard
MOST_ROWS = 2**32  # of a shard


class StreamingDataset:
    """A data set of the hub, or of a local folder, read on the fly.

    Of 20 or more shards (``tokenv.data.hub.shards``) a fraction of them, at least one, is held out: training opens
    none of these, and validation no other. Of fewer shards the documents with a low hash are held out wherever they
    are, a twentieth at least, so that they are not far to seek. Either way no document is trained on that equals one of
    the first 512 validation sequences.

    Args:
        config: Names the data set.
        validation: Documents to validate on instead; the data set's equal ones are not trained on.
        progress: Show a bar while reading for validation.

    Raises:
        UserError: If the data set lacks the text column or holds no sequence to validate on.
    """

    def __init__(self, config: DataConfig, validation: list[Document] | None, *, progress: bool) -> None:
        self.config = config
        self.name = config.source.removeprefix(HUB_PREFIX)
        self._shards = Shards(
            lambda: rows.open_hub(self.name, config.hub_config, config.hub_split),
            self.name,
        )
        everything = range(len(self._shards))
        self._given = validation is not None
        self._held = [] if self._given else validation_shards(len(everything), config.validation, config.seed)
        self._trained = sorted(set(everything) - set(self._held))
        by_hash = not self._given and not self._held
        self._threshold = threshold(max(config.validation, 1 / FEW)) if by_hash else b""
        self._known = {digest(document.content, config.seed) for document in validation or ()}
        _, first = next(chain.from_iterable(self.rows(shard) for shard in self._held or everything), (0, None))
        if first is None:
            raise UserError(f"hub data set {self.name!r} holds no row: choose another data.hub_split")
        content_of(first, config.column, f"hub data set {self.name!r}")

        self._looked_for = DEFAULT_VALIDATION_SEQUENCES
        if validation is None:
            documents = self._collect_validation(self._looked_for, progress)
            self._known = {digest(document.content, config.seed) for document in documents.values()}
            self._held_out = self.cut(documents)
        else:
            self._held_out = cut_side(validation, config)
        if not len(self._held_out):
            raise UserError(
                f"hub data set {self.name!r} has no sequence of data.seq_len {config.seq_len} bytes "
                "to validate on: raise data.validation, lower data.seq_len, or set another data.validation_source"
            )
        header = (self.name, config.hub_config, config.hub_split, config.column, config.cut, len(everything))
        numbers = (config.seq_len, config.seed, config.validation, config.shuffle_buffer)
        held = self.validation(None).symbol_BN.numpy().astype(np.uint8).tobytes()
        identity = repr((header, numbers)).encode() + held
        self.fingerprint = hashlib.blake2b(identity, digest_size=16).hexdigest()

    def rows(self, shard: int, first: int = 0) -> Iterator[tuple[int, Row]]:
        """The rows of a shard and their numbers in it, from the `first` on."""
        return self._shards.rows(shard, first)

    def document(self, row: Row, shard: int, number: int) -> Document:
        """Return the document in the `number`-th row of a shard."""
        content = content_of(row, self.config.column, f"hub data set {self.name!r}")
        where = f" shard {shard}" if len(self._shards) > 1 else ""
        return Document(f"{self.name}{where} row {number}", content)

    def number(self, shard: int, row: int) -> int:
        """Return what tells the document of this row from all others."""
        return shard * MOST_ROWS + row

    def is_held_out(self, document: Document) -> bool:
        """Tell whether `document` is kept from training."""
        key = digest(document.content, self.config.seed)
        return key < self._threshold or key in self._known

    def blocks(self, seed: int) -> StreamingBlocks:
        """Return the endless blocks of training pieces."""
        return self.streams(seed, 1)[0]

    def streams(self, seed: int, count: int) -> list[StreamingBlocks]:
        """Return those of each of `count` streams, which share out the data set."""
        return [StreamingBlocks(self, part, seed) for part in partition_shards(self._trained, count)]

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the first `max_sequences` validation pieces, 512 by default."""
        if self._given:
            return self._held_out.take(low_discrepancy_order(len(self._held_out))[:max_sequences])
        wanted = max_sequences or DEFAULT_VALIDATION_SEQUENCES
        if wanted > self._looked_for:
            self._held_out = self.cut(self._collect_validation(wanted, progress=False))
            self._looked_for = wanted
        return self._held_out.take(np.arange(min(wanted, len(self._held_out))))

    def _collect_validation(self, wanted: int, progress: bool) -> dict[int, Document]:
        """The first documents held out that make so many sequences, by their numbers."""
        documents: dict[int, Document] = {}
        joined = long = 0
        bar = tqdm(self._places(), desc=f"reading {self.name!r}", unit=" documents", disable=not progress)
        with bar as places:
            for shard, number, row in places:
                document = self.document(row, shard, number)
                if not document.content or not (self._held or self.is_held_out(document)):
                    continue
                documents[self.number(shard, number)] = document
                joined += len(document.content) + 1
                long += len(document.content) >= self.config.seq_len
                found = long if self.config.cut == "document" else (joined - 1) // self.config.seq_len
                if found >= wanted:
                    break
        return documents

    def _places(self) -> Iterator[tuple[int, int, Row]]:
        """The rows that may be held out, some of each shard in turn: the shard, the row's number in it, the row."""
        shards: Sequence[int] = self._held or range(len(self._shards))
        order = [shards[place] for place in low_discrepancy_order(len(shards))]
        for begin in range(0, len(order), FEW):  # so many are open at once
            waiting = deque((shard, self.rows(shard)) for shard in order[begin : begin + FEW])
            while waiting:
                shard, rows = waiting.popleft()
                some = list(islice(rows, AT_A_PLACE))
                yield from ((shard, number, row) for number, row in some)
                if len(some) == AT_A_PLACE:
                    waiting.append((shard, rows))

    def cut(self, documents: dict[int, Document]) -> Chunks:
        """Cut documents, given by their number in the data set."""
        return chunk_documents(
            list(documents.values()), seq_len=self.config.seq_len, cut=self.config.cut, ids=list(documents)
        )
