"""Corpora of text or series: load one, take training and validation sequences from it, and read batches ahead."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from tqdm import tqdm

from tokenv.core.devices import device_module, has_own_memory
from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch, Source
from tokenv.core.sequences import TensorSource as TensorSource  # programs import it from here
from tokenv.data.chunks import Document, chunk_documents
from tokenv.data.config import HUB_PREFIX, DataConfig, check_sources
from tokenv.data.documents import read_documents
from tokenv.data.hub import StreamingDataset
from tokenv.data.split import Split, digest, split_documents, split_from
from tokenv.data.stream import InMemoryBlocks, Streams, TrainStream, low_discrepancy_order
from tokenv.data.windows import SeriesData, load_series

_CORPORA: dict[str, Corpus] = {}
MAX_PREFETCHED = 2  # batches, beside the one in use
JOIN_TIMEOUT = 5.0  # seconds to wait for the last read to end


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
        self.fingerprint = hashlib.blake2b(b"|".join((header, *split.digests)), digest_size=16).hexdigest()

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
        "A document is never on both sides: give more documents, lower data.seq_len, "
        "or set data.validation_source to other data"
    )


class Corpus:
    """Text corpus split by document, or series split by time, into training and validation sequences.

    Attributes:
        seq_len: symbols of a sequence.
        name: source of the data.
        fingerprint: hex digest of the data and of how it is split and cut; two loads of the same data with
            the same settings have the same one.
        streamed: whether it is read on the fly instead of held in memory.
        series: the series, of which sequences are windows; None for text.
        overlap: share of the held-out 32-byte windows which also occur in training text, estimated from at most two
            million windows; NaN if unknown, as for series and streamed data.
    """

    def __init__(self, data: InMemoryDataset | SeriesData | StreamingDataset, config: DataConfig) -> None:
        self._data = data
        self.seq_len = config.seq_len
        self.name = config.source
        self.fingerprint = data.fingerprint
        self.streamed = isinstance(data, StreamingDataset)
        self.series = data if isinstance(data, SeriesData) else None
        self.overlap = data.overlap if isinstance(data, InMemoryDataset) else math.nan

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
        data = self._data
        parts = data.streams(seed, count) if isinstance(data, StreamingDataset) else [data.blocks(seed)]
        return Streams([TrainStream(blocks, seq_len=self.seq_len, fingerprint=self.fingerprint) for blocks in parts])

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
            raise ValueError(f"max_sequences is {max_sequences}; expected at least 1: raise it or leave it out")
        return self._data.validation(max_sequences)


@dataclass(frozen=True)
class CorpusFactory:
    """Factory of a corpus' training streams by seed; small to pickle, and a process reads the data once.

    Attributes:
        config: what to read and how to cut it.
    """

    config: DataConfig

    def __call__(self, seed: int) -> TrainStream:
        """Open the training sequences in the order of `seed`, which is at least 0."""
        key = repr(self.config)
        if key not in _CORPORA:
            _CORPORA[key] = load_corpus(self.config)
        return _CORPORA[key].train(seed=seed)


def load_corpus(config: DataConfig, *, progress: bool = False) -> Corpus:
    """Read a corpus, split it by document (series by time) and cut it into sequences.

    Args:
        config: what to read and how to cut it.
        progress: whether to show a progress bar over the documents.

    Raises:
        MissingFileError: a source does not exist.
        UserError: the data cannot be read as text or series, is too little for one training and one validation
            sequence, or is a file which only a stored run names (see `check_sources`).
    """
    check_sources(config)
    if config.kind == "series":
        return Corpus(load_series(config), config)
    validation = None if config.validation_source is None else _read(config.validation_source, config, progress)
    if config.source.startswith(HUB_PREFIX):
        held_out = None if validation is None else list(validation)
        return Corpus(StreamingDataset(config, held_out, progress=progress), config)
    documents = _read(config.source, config, progress)
    split = split_documents(documents, config) if validation is None else split_from(documents, validation, config)
    return Corpus(InMemoryDataset(split, config), config)


def _read(source: str, config: DataConfig, progress: bool) -> Iterator[Document]:
    documents = read_documents(source, config)
    yield from tqdm(documents, desc=f"reading {source!r}", unit=" documents", disable=not progress)


class ResumableSource(Source, Protocol):
    """Source with a position which can be saved."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the source."""


class PrefetchedSource:
    """Context manager in which a thread reads a source ahead; its batches are the source's.

    Args:
        source: source which only the thread reads from now on.
        count: sequences of every batch.
        device: device which will use the sequences.
    """

    def __init__(self, source: ResumableSource, count: int, device: torch.device) -> None:
        self.seq_len = source.seq_len
        self._source, self._count, self._device = source, count, device
        self._state = source.state_dict()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[tuple[SequenceBatch, dict[str, Any]] | BaseException] = queue.Queue(MAX_PREFETCHED)
        self._thread = threading.Thread(target=self._prefetch, name="tokenv reads ahead", daemon=True)

    def __enter__(self) -> PrefetchedSource:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while not self._queue.empty():  # the thread may be waiting for room in the queue
            self._queue.get()
        self._thread.join(JOIN_TIMEOUT)

    def next(self, count: int) -> SequenceBatch:
        """Return the next sequences, on the CPU, in memory from which they can be copied to `device` asynchronously.

        Raises:
            Exception: the error which the source has raised.
        """
        assert count == self._count, (count, self._count)
        item = self._error or self._queue.get()
        if isinstance(item, BaseException):
            self._error = item
            raise item
        batch, self._state = item
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the source's position after the batches returned so far, without those read ahead."""
        return self._state

    def _prefetch(self) -> None:
        try:
            if has_own_memory(self._device):
                device_module(self._device).set_device(self._device)  # every thread has its own
            while not self._stop.is_set():
                batch = self._source.next(self._count)
                self._queue.put((stage_batch(batch, self._device), self._source.state_dict()))
        except BaseException as error:  # raised again by next()
            self._queue.put(error)


def stage_batch(batch: SequenceBatch, device: torch.device) -> SequenceBatch:
    """Prepare sequences for copying to a GPU: bytes as uint8, in pinned memory. For the CPU they stay as they are."""
    if not has_own_memory(device):
        return batch
    symbol_BN = batch.symbol_BN.to(torch.uint8) if batch.symbol_BN.dtype == torch.int64 else batch.symbol_BN
    return dataclasses.replace(batch, symbol_BN=symbol_BN.pin_memory())
