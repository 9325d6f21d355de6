"""Read batches ahead, in a thread, while the ones before are used."""

import dataclasses
import queue
import threading
from typing import Any, Protocol, Self

import torch

from tokenv.core.devices import has_own_memory
from tokenv.core.sequences import SequenceBatch, Source

MAX_PREFETCHED = 2  # batches, beside the one in use
JOIN_TIMEOUT = 5.0  # seconds to wait for the last read to end


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
        self._source = source
        self._count = count
        self._device = device
        self._state = source.state_dict()
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._queue: queue.Queue[tuple[SequenceBatch, dict[str, Any]] | BaseException] = (
            queue.Queue(MAX_PREFETCHED)
        )
        self._thread = threading.Thread(
            target=self._prefetch, name="tokenv reads ahead", daemon=True
        )

    def __enter__(self) -> Self:
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
                # every thread has its own
                torch.get_device_module(self._device).set_device(self._device)
            while not self._stop.is_set():
                batch = self._source.next(self._count)
                self._queue.put((stage_batch(batch, self._device), self._source.state_dict()))
        except BaseException as error:  # raised again by next()
            self._queue.put(error)


def stage_batch(batch: SequenceBatch, device: torch.device) -> SequenceBatch:
    """Prepare sequences for copying to a GPU: bytes as uint8, in pinned memory. For the CPU they stay as they are."""
    if not has_own_memory(device):
        return batch
    symbol_BN = batch.symbol_BN
    if symbol_BN.dtype == torch.int64:
        symbol_BN = symbol_BN.to(torch.uint8)
    return dataclasses.replace(batch, symbol_BN=symbol_BN.pin_memory())
