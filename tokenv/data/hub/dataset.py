"""A corpus streamed from the Hugging Face hub."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator

import datasets
import numpy as np
from tqdm import tqdm

from tokenv.data.config import HUB_PREFIX, DataConfig
from tokenv.data.hub.blocks import HubBlocks
from tokenv.data.memory import cut_side, spread_order
from tokenv.data.pieces import Document, Pieces, SequenceBatch, cut_documents
from tokenv.data.reading import HUB_ADVICE, Row, rows_of
from tokenv.data.split import digest, threshold
from tokenv.data.text.documents import content_of
from tokenv.errors import UserError

DEFAULT_VALIDATION_SEQUENCES = 512


class HubData:
    """A data set of the hub, read on the fly.

    Documents are split by the same hash as local ones. Validation takes the first held out documents of
    the data set; a document that hashes to validation is never trained on.

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
        try:
            self._dataset = datasets.load_dataset(self.name, config.hub_config, split=config.hub_split, streaming=True)
        except Exception as error:  # see rows_of
            raise UserError(f"hub data set {self.name!r} cannot be opened: {error}: {HUB_ADVICE}") from error
        self._threshold = threshold(config.validation) if validation is None else b""
        self._known = {digest(document.content, config.seed) for document in validation or ()}
        first = next(self.rows(self.open()), None)
        if first is None:
            raise UserError(f"hub data set {self.name!r} holds no row: choose another data.hub_split")
        content_of(first, config.column, f"hub data set {self.name!r}")

        self._given = validation is not None
        self._looked_for = DEFAULT_VALIDATION_SEQUENCES
        if validation is None:
            self._held_out = self._scan(self._looked_for, progress)
        else:
            self._held_out = cut_side(validation, config)
        if not len(self._held_out):
            raise UserError(
                f"hub data set {self.name!r} has no sequence of data.seq_len {config.seq_len} bytes "
                "to validate on: raise data.validation, lower data.seq_len, or set another data.validation_source"
            )
        header = (self.name, config.hub_config, config.hub_split, config.column, config.cut)
        numbers = (config.seq_len, config.seed, config.validation, config.shuffle_buffer)
        held = self.validation(None).symbol_BN.numpy().astype(np.uint8).tobytes()
        identity = repr((header, numbers)).encode() + held
        self.fingerprint = hashlib.blake2b(identity, digest_size=16).hexdigest()

    def open(self) -> datasets.IterableDataset:
        """Return the data set for one reader: its place is the reader's own."""
        return copy.deepcopy(self._dataset)

    def rows(self, opened: datasets.IterableDataset) -> Iterator[Row]:
        """The rows of what `open` gave."""
        return rows_of(lambda: opened, f"hub data set {self.name!r} cannot be read", HUB_ADVICE)

    def document(self, row: Row, number: int) -> Document:
        """Return the document in `row`, the data set's `number`-th."""
        content = content_of(row, self.config.column, f"hub data set {self.name!r}")
        return Document(f"{self.name} row {number}", content)

    def is_held(self, document: Document) -> bool:
        """Tell whether `document` is kept from training."""
        key = digest(document.content, self.config.seed)
        return key < self._threshold or key in self._known

    def blocks(self, seed: int) -> HubBlocks:
        """Return the endless blocks of training pieces."""
        return HubBlocks(self, seed)

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the first `max_sequences` validation pieces, 512 by default."""
        if self._given:
            return self._held_out.take(spread_order(len(self._held_out))[:max_sequences])
        wanted = max_sequences or DEFAULT_VALIDATION_SEQUENCES
        if wanted > self._looked_for:
            self._held_out = self._scan(wanted, progress=False)
            self._looked_for = wanted
        return self._held_out.take(np.arange(min(wanted, len(self._held_out))))

    def _scan(self, wanted: int, progress: bool) -> Pieces:
        documents: dict[int, Document] = {}
        joined = long = 0
        bar = tqdm(self.rows(self.open()), desc=f"reading {self.name!r}", unit=" documents", disable=not progress)
        with bar as rows:
            for number, row in enumerate(rows):
                document = self.document(row, number)
                if not document.content or not self.is_held(document):
                    continue
                documents[number] = document
                joined += len(document.content) + 1
                long += len(document.content) >= self.config.seq_len
                found = long if self.config.cut == "document" else (joined - 1) // self.config.seq_len
                if found >= wanted:
                    break
        return self.cut(documents)

    def cut(self, documents: dict[int, Document]) -> Pieces:
        """Cut documents, given by their number in the data set."""
        return cut_documents(
            list(documents.values()), seq_len=self.config.seq_len, cut=self.config.cut, ids=list(documents)
        )
