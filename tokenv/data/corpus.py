"""Corpora of text or series: load one, then take training and validation sequences from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from tqdm import tqdm

from tokenv.data.chunks import Document, SequenceBatch
from tokenv.data.config import HUB_PREFIX, DataConfig, check_sources
from tokenv.data.hub.streaming import StreamingDataset
from tokenv.data.in_memory import InMemoryDataset
from tokenv.data.series.windows import load_series
from tokenv.data.split import split_documents, split_from
from tokenv.data.stream import EpochBlocks, Streams, TrainStream
from tokenv.data.text.documents import read_documents

__all__ = ["Corpus", "SequenceBatch", "TrainStream", "load_corpus"]


class Dataset(Protocol):
    """What a corpus is made of: held in memory or streamed."""

    fingerprint: str

    def blocks(self, seed: int) -> EpochBlocks:
        """Return the endless blocks of training pieces in the order of `seed`."""

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the validation sequences, or the first `max_sequences` of them."""


class Corpus:
    """A text corpus split by document, or series split by time, into training and validation sequences.

    Attributes:
        seq_len: Symbols in a sequence.
        name: The source, for people.
        fingerprint: Hex digest of the data and of how it is split and cut; two loads of the same data with
            the same settings have the same.
        streamed: Whether it is read on the fly instead of held in memory.
        overlap: Share of the held-out 32-byte windows that stand in training text, too, estimated from at most two
            million windows; NaN where it is not known, as of series and streamed data.
    """

    def __init__(self, data: Dataset, config: DataConfig) -> None:
        self._data = data
        self.seq_len = config.seq_len
        self.name = config.source
        self.fingerprint = data.fingerprint
        self.streamed = isinstance(data, StreamingDataset)
        self.overlap = data.overlap if isinstance(data, InMemoryDataset) else math.nan

    def train(self, *, seed: int = 0) -> TrainStream:
        """Open an endless stream of training sequences.

        Args:
            seed: Seed of the order, at least 0.

        Raises:
            ValueError: If `seed` is negative.
        """
        if seed < 0:
            raise ValueError(f"seed is {seed}; expected an integer of at least 0: choose one")
        return self._stream(self._data.blocks(seed))

    def streams(self, count: int, *, seed: int = 0) -> Streams:
        """Open the training sequences as streams that processes can share out; of what is in memory, a single one.

        Args:
            count: Streams that a data set read on the fly is cut into, at least 1.
            seed: See `train`.
        """
        if not isinstance(self._data, StreamingDataset):
            return Streams([self.train(seed=seed)])
        return Streams([self._stream(blocks) for blocks in self._data.streams(seed, count)])

    def _stream(self, blocks: EpochBlocks) -> TrainStream:
        return TrainStream(blocks, seq_len=self.seq_len, fingerprint=self.fingerprint)

    def validation(self, max_sequences: int | None = None) -> SequenceBatch:
        """Return the validation sequences, always the same and in the same order.

        The order spreads over the corpus, so that the first sequences represent the whole. Of a hub data
        set it goes through successive documents of what is held out, some of each shard in turn.

        Args:
            max_sequences: Return only so many, the first; if None, all (of a hub data set 512).

        Raises:
            ValueError: If `max_sequences` is not positive.
        """
        if max_sequences is not None and max_sequences < 1:
            raise ValueError(f"max_sequences is {max_sequences}; expected at least 1: raise it or leave it out")
        return self._data.validation(max_sequences)


@dataclass(frozen=True)
class CorpusFactory:
    """Opens the training stream of a corpus for a seed; small to pickle, and a process reads the data once.

    Attributes:
        config: What to read and how to cut it.
    """

    config: DataConfig

    def __call__(self, seed: int) -> TrainStream:
        """Open the training sequences in the order of `seed`, which is at least 0."""
        key = repr(self.config)
        if key not in _OPENED:
            _OPENED[key] = load_corpus(self.config)
        return _OPENED[key].train(seed=seed)


_OPENED: dict[str, Corpus] = {}


def load_corpus(config: DataConfig, *, progress: bool = False) -> Corpus:
    """Read a corpus, split it by document (series by time) and cut it into sequences.

    Args:
        config: What to read and how to cut it.
        progress: Show a bar over the documents being read.

    Raises:
        MissingFileError: If a source does not exist.
        UserError: If the data cannot be read as text or series, is too little for one training and one validation
            sequence, or is a file that only a stored run names (see `check_sources`).
    """
    check_sources(config)
    if config.kind == "series":
        return Corpus(load_series(config), config)
    held = None if config.validation_source is None else _read(config.validation_source, config, progress)
    if config.source.startswith(HUB_PREFIX):
        return Corpus(StreamingDataset(config, None if held is None else list(held), progress=progress), config)
    documents = _read(config.source, config, progress)
    split = split_documents(documents, config) if held is None else split_from(documents, held, config)
    return Corpus(InMemoryDataset(split, config), config)


def _read(source: str, config: DataConfig, progress: bool) -> Iterator[Document]:
    documents = read_documents(source, config)
    yield from tqdm(documents, desc=f"reading {source!r}", unit=" documents", disable=not progress)
