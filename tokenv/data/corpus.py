"""Corpora: load one of any kind of data, and take training and validation sequences from it."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from tqdm import tqdm

from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.core.sequences import TensorSource as TensorSource  # programs import it from here
from tokenv.data.chunks import Document, chunk_documents
from tokenv.data.config import HUB_PREFIX, DataConfig, check_sources
from tokenv.data.documents import read_documents
from tokenv.data.hub import StreamingDataset
from tokenv.data.split import Split, digest, split_documents, split_from
from tokenv.data.stream import (
    Dataset,
    EpochBlocks,
    InMemoryBlocks,
    Streams,
    TrainStream,
    low_discrepancy_order,
)


class InMemoryDataset:
    """Training and validation chunks of a split.

    Attributes:
        fingerprint: hex digest of every document on either side and of how they are cut.
        overlap: share of the held-out 32-byte windows which also occur in training text.

    Raises:
        UserError: either side is too small for a single sequence.
    """

    def __init__(self, split: Split, config: DataConfig) -> None:
        self._train = chunk_documents(split.train, seq_len=config.seq_len, cut=config.cut)
        self._validation = chunk_documents(split.validation, seq_len=config.seq_len, cut=config.cut)
        if not len(self._train) or not len(self._validation):
            raise UserError(_describe_too_small(split, config))
        self._seed = config.seed
        self.overlap = split.overlap
        header = repr((config.cut, config.seq_len, config.seed)).encode()
        self.fingerprint = hashlib.blake2b(
            b"|".join((header, *split.digests)), digest_size=16
        ).hexdigest()

    def blocks(self, seed: int) -> InMemoryBlocks:
        """Return the endless epochs over the training chunks."""
        return InMemoryBlocks(self._train, self._seed, seed)

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the validation chunks, or the first `max_sequences` of them."""
        return self._validation.take(low_discrepancy_order(len(self._validation))[:max_sequences])


def _describe_too_small(split: Split, config: DataConfig) -> str:
    documents = split.train + split.validation
    lengths = [len(document.content) for document in documents]
    if not lengths:
        return f"data source {config.source!r} holds no document with a byte in it: point to data with text"
    validation_bytes = sum(len(document.content) for document in split.validation)
    message = (
        f"data source {config.source!r} holds {len(lengths)} non-empty documents, {sum(lengths)} bytes, of "
        f"which {len(split.validation)} documents, {validation_bytes} bytes, are for validation; expected at least one "
        f"sequence of data.seq_len {config.seq_len} bytes on either side. "
    )
    different = {digest(document.content, config.seed) for document in documents}
    duplicates = len(documents) - len(different) + split.excluded
    if duplicates:
        return message + (
            f"{duplicates} documents are duplicates of others and can only be on the same side as these: give "
            "documents that differ, or set data.validation_source to other data"
        )
    if config.cut == "document":
        return message + (
            f"data.cut 'document' needs whole documents that long, the longest has {max(lengths)} bytes: "
            "lower data.seq_len, or set data.cut to 'chunk'"
        )
    return message + (
        "Give more documents, lower data.seq_len, or set data.validation_source to other data"
    )


class Corpus:
    """Data which are split into training and validation sequences: text by document, other kinds as they say.

    Attributes:
        seq_len: symbols of a sequence.
        name: source of the data.
        fingerprint: hex digest of the data and of how it is split and cut; two loads of the same data with
            the same settings have the same one.
        streamed: whether it is read on the fly instead of held in memory.
        dataset: the data, split.
        overlap: share of the held-out 32-byte windows which also occur in training text, estimated from at most two
            million windows; NaN if unknown, as for other kinds of data and streamed text.
    """

    def __init__(self, dataset: Dataset | StreamingDataset, config: DataConfig) -> None:
        self.dataset = dataset
        self.seq_len = config.seq_len
        self.name = config.source
        self.fingerprint = dataset.fingerprint
        self.streamed = isinstance(dataset, StreamingDataset)
        self.overlap = getattr(dataset, "overlap", math.nan)

    def train(self, *, seed: int = 0) -> TrainStream:
        """Open an endless stream of training sequences.

        Args:
            seed: seed of the order, at least 0.

        Raises:
            ValueError: `seed` is negative.
        """
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected an integer of at least 0: choose one")
        return self.streams(1, seed=seed).streams[0]

    def streams(self, count: int, *, seed: int = 0) -> Streams:
        """Open the training sequences as disjoint streams for several processes; data in memory is a single stream.

        Args:
            count: streams into which a data set read on the fly is cut, at least 1.
            seed: see `train`.
        """
        parts: list[EpochBlocks] = []
        if isinstance(self.dataset, StreamingDataset):
            parts += self.dataset.streams(seed, count)
        else:
            parts.append(self.dataset.blocks(seed))
        return Streams(
            [
                TrainStream(blocks, seq_len=self.seq_len, fingerprint=self.fingerprint)
                for blocks in parts
            ]
        )

    def validation(self, max_sequences: int | None = None) -> SequenceBatch:
        """Return the validation sequences, always the same and in the same order.

        The order spreads over the corpus, so that the first sequences represent the whole. For a hub data
        set it goes through successive held-out documents, some of each shard in turn.

        Args:
            max_sequences: return only the first so many; None returns all (of a hub data set 512).

        Raises:
            ValueError: `max_sequences` is not positive.
        """
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(
                f"max_sequences is {max_sequences}; expected at least 1: raise it or leave it out"
            )
        return self.dataset.validation(max_sequences)

    def test(self, max_sequences: int | None = None) -> SequenceBatch:
        """Return the test sequences, as ``validation`` does.

        Raises:
            UserError: this kind of data has no test side, or too few symbols there.
        """
        if not hasattr(self.dataset, "test"):
            raise UserError(
                "split = 'test': expected validation, for a corpus of text has no test side"
            )
        return self.dataset.test(max_sequences)


_CORPORA: dict[str, Corpus] = {}  # of factories
_READ: ContextVar[dict[str, Corpus]] = ContextVar("read")


@dataclass(frozen=True)
class CorpusFactory:
    """Factory of a corpus' training streams by seed; small to pickle, and a process reads the data once.

    Attributes:
        config: what to read and how to cut it.
    """

    config: DataConfig

    def __call__(self, seed: int) -> TrainStream:
        """Open the training sequences in the order of `seed`, which is at least 0."""
        return _find_or_read(_CORPORA, self.config).train(seed=seed)


@contextmanager
def reading_once() -> Iterator[None]:
    """Let ``load_corpus`` read the data of a configuration once in this context, and then return the same corpus."""
    token = _READ.set(_READ.get({}))
    try:
        yield
    finally:
        _READ.reset(token)


def load_corpus(config: DataConfig, *, progress: bool = False) -> Corpus:
    """Read a corpus, split it and cut it into sequences.

    Args:
        config: what to read and how to cut it.
        progress: whether to show a progress bar over the documents.

    Raises:
        MissingFileError: a source does not exist.
        UserError: the data cannot be read as their kind, is too little for one training and one validation
            sequence, or is a file which only a stored run names (see `check_sources`).
    """
    return _find_or_read(_READ.get({}), config, progress)


def _find_or_read(corpora: dict[str, Corpus], config: DataConfig, progress: bool = False) -> Corpus:
    key = repr(config)
    if key not in corpora:
        corpora[key] = _read_corpus(config, progress)
    return corpora[key]


def _read_corpus(config: DataConfig, progress: bool) -> Corpus:
    check_sources(config)
    if config.kind != "text":
        return Corpus(config.options.load(config), config)
    validation = None
    if config.validation_source is not None:
        validation = list(_read(config.validation_source, config, progress))
    if config.source.startswith(HUB_PREFIX):
        return Corpus(StreamingDataset(config, validation, progress=progress), config)
    documents = _read(config.source, config, progress)
    if validation is None:
        split = split_documents(documents, config)
    else:
        split = split_from(documents, validation, config)
    return Corpus(InMemoryDataset(split, config), config)


def _read(source: str, config: DataConfig, progress: bool) -> Iterator[Document]:
    documents = read_documents(source, config)
    yield from tqdm(documents, desc=f"reading {source!r}", unit=" documents", disable=not progress)
