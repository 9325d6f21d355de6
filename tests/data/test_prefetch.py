"""Reading ahead changes nothing but when it is read: text, cursors, errors and the end are the same."""

import threading
import time

import pytest
import torch
from threads import prefetch_threads

from tokenv.config.hardware import BatchAssignment
from tokenv.core.errors import UserError
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.prefetch import MAX_PREFETCHED, PrefetchedSource, stage_batch
from tokenv.training.data_parallel import RankStream

CPU = torch.device("cpu")
SLOTS = BatchAssignment(2, 4)


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(DataConfig(source="words", seq_len=32, words_documents=60, lexicon_size=10))


def source_of(corpus, state=None):
    streams = corpus.streams(1, seed=5)
    if state is not None:
        streams.load_state_dict(state)
    return RankStream(streams, SLOTS)


class Counted:
    """Source which counts the batches read from it, and finally fails."""

    seq_len = 4

    def __init__(self, source, until=10**9, error=None):
        self.source = source
        self.until = until
        self.error = error
        self.reads = 0
        self.state_dict = source.state_dict

    def next(self, count):
        if self.reads == self.until:
            raise self.error
        self.reads += 1
        return self.source.next(count)


def test_text_and_cursors_are_those_of_the_batches_used(corpus):
    plain = source_of(corpus)
    with PrefetchedSource(source_of(corpus), 4, CPU) as ahead:
        assert ahead.seq_len == plain.seq_len
        for _ in range(60):  # several epochs
            assert ahead.state_dict() == plain.state_dict()
            for _ in SLOTS.passes:
                one = ahead.next(4)
                other = plain.next(4)
                assert one.origin == other.origin
                assert torch.equal(one.symbol_BN, other.symbol_BN)
                assert torch.equal(one.document_B, other.document_B)
    assert not prefetch_threads()


def test_unused_prefetched_batches_are_read_again(corpus):
    plain = source_of(corpus)
    with PrefetchedSource(source_of(corpus), 4, CPU) as ahead:
        for _ in range(2 * 3):
            ahead.next(4)
            plain.next(4)
        time.sleep(0.05)  # for the thread to be ahead
        state = ahead.state_dict()
    with PrefetchedSource(source_of(corpus, state), 4, CPU) as again:
        for _ in range(10):
            assert again.next(4).origin == plain.next(4).origin


def test_no_more_is_read_ahead_than_there_is_room_for(corpus):
    counted = Counted(source_of(corpus))
    with PrefetchedSource(counted, 4, CPU) as ahead:
        ahead.next(4)
        end = time.monotonic() + 10
        while counted.reads < 2 + MAX_PREFETCHED and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
        assert counted.reads == 2 + MAX_PREFETCHED  # used, waiting for room, and the room


@pytest.mark.parametrize("error", [UserError("the line is dead: mend it"), KeyError("column")])
def test_an_error_is_raised_where_it_would_have_been(corpus, error):
    with PrefetchedSource(Counted(source_of(corpus), 3, error), 4, CPU) as ahead:
        for _ in range(3):
            ahead.next(4)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                ahead.next(4)
            assert caught.value is error
    assert not prefetch_threads()


def test_an_error_that_nobody_came_to_is_not_raised(corpus):
    with PrefetchedSource(Counted(source_of(corpus), 2, UserError("too far")), 4, CPU) as ahead:
        ahead.next(4)
    assert not prefetch_threads()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_thread_is_gone_whatever_ends_it(corpus, error):
    def work():
        with PrefetchedSource(source_of(corpus), 4, CPU) as ahead:
            ahead.next(4)
            raise error

    with pytest.raises(error):
        work()
    assert not prefetch_threads()


def test_a_read_that_hangs_does_not_hang_the_end(corpus, monkeypatch):
    monkeypatch.setattr("tokenv.data.prefetch.JOIN_TIMEOUT", 0.05)
    released = threading.Event()

    class Hangs(Counted):
        def next(self, count):
            released.wait(20)
            return super().next(count)

    with PrefetchedSource(Hangs(source_of(corpus)), 4, CPU):
        pass
    (thread,) = prefetch_threads()
    assert thread.daemon
    released.set()
    thread.join(20)
    assert not prefetch_threads()


def test_on_the_cpu_nothing_is_staged(corpus):
    batch = source_of(corpus).next(4)
    assert stage_batch(batch, CPU) is batch


@pytest.mark.gpu
def test_for_a_gpu_bytes_are_pinned_and_arrive_as_they_were(corpus):
    device = torch.device("cuda", 0)
    plain = source_of(corpus)
    with PrefetchedSource(source_of(corpus), 4, device) as ahead:
        for _ in range(20):
            symbol_BN = ahead.next(4).symbol_BN
            assert symbol_BN.is_pinned()
            assert symbol_BN.dtype == torch.uint8
            assert torch.equal(
                symbol_BN.to(device, non_blocking=True).long().cpu(), plain.next(4).symbol_BN
            )
