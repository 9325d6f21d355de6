"""Define what an environment asks of its sequences, and read them ahead in a thread."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from tokenv.data.chunks import SequenceBatch


class Source(Protocol):
    """An endless supply of sequences of ``seq_len`` symbols."""

    seq_len: int

    def next(self, count: int) -> SequenceBatch:
        """The next ``count`` sequences."""


SourceOrFactory: TypeAlias = Source | Callable[[int], Source]  # or what opens one for a seed, such as CorpusOpener


class TensorSource:
    """Goes round and round over given sequences, in order.

    Args:
        symbol_BN: the sequences, [B, N, *symbol_shape].

    Raises:
        ValueError: there is no sequence, or one of fewer than two symbols.
    """

    def __init__(self, symbol_BN: Tensor) -> None:
        if symbol_BN.dim() < 2 or symbol_BN.shape[0] < 1 or symbol_BN.shape[1] < 2:
            raise ValueError(f"sequences of shape {tuple(symbol_BN.shape)}: expected [B, N] with B >= 1 and N >= 2")
        self.symbol_BN, self.seq_len, self.position = symbol_BN, symbol_BN.shape[1], 0

    def next(self, count: int) -> SequenceBatch:
        """The next ``count`` sequences, from the start again after the last one."""
        index_B = torch.arange(self.position, self.position + count) % len(self.symbol_BN)
        self.position = (self.position + count) % len(self.symbol_BN)
        return SequenceBatch(self.symbol_BN[index_B], [f"sequence {i}" for i in index_B.tolist()], None, index_B)


AHEAD = 2  # batches, beside the one in use
PATIENCE = 5.0  # seconds to wait for a read to end that nobody needs any more


class ResumableSource(Source, Protocol):
    """A source that says where it stands."""

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands."""


class PrefetchedSource:
    """A source that a thread reads ahead, while entered; what it gives is what the source would.

    Args:
        source: Read by the thread alone from now on.
        count: Sequences of every batch.
        device: Where they will be used.
    """

    def __init__(self, source: ResumableSource, count: int, device: torch.device) -> None:
        self.seq_len = source.seq_len
        self._source, self._count, self._device = source, count, device
        self._state = source.state_dict()
        self._failed: BaseException | None = None
        self._ended = threading.Event()
        self._read: queue.Queue[tuple[SequenceBatch, dict[str, Any]] | BaseException] = queue.Queue(AHEAD)
        self._thread = threading.Thread(target=self._read_on, name="tokenv reads ahead", daemon=True)

    def __enter__(self) -> PrefetchedSource:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        while not self._read.empty():  # what waits for room here can then end
            self._read.get()
        self._thread.join(PATIENCE)

    def next(self, count: int) -> SequenceBatch:
        """The next sequences, on the CPU, in memory from which they can be copied to `device` meanwhile.

        Raises:
            Exception: What the source has raised instead of giving them.
        """
        assert count == self._count, (count, self._count)
        found = self._failed or self._read.get()
        if isinstance(found, BaseException):
            self._failed = found
            raise found
        batch, self._state = found
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the source stood when it had given what was asked for so far, and nothing that was read ahead."""
        return self._state

    def _read_on(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # every thread has its own
            while not self._ended.is_set():
                batch = self._source.next(self._count)
                self._read.put((stage_batch(batch, self._device), self._source.state_dict()))
        except BaseException as error:  # the thread that asks for sequences is to hear of it
            self._read.put(error)


def stage_batch(batch: SequenceBatch, device: torch.device) -> SequenceBatch:
    """Make sequences ready to be copied to a GPU: bytes as uint8, pinned. For the CPU they are ready as they are."""
    if device.type != "cuda":
        return batch
    symbol_BN = batch.symbol_BN.to(torch.uint8) if batch.symbol_BN.dtype == torch.int64 else batch.symbol_BN
    return dataclasses.replace(batch, symbol_BN=symbol_BN.pin_memory())
