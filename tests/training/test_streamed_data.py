"""Training on a streamed data set: reading ahead, stopping, failing and resuming."""

import os
import signal

import pytest
import ranks as support
from threads import prefetch_threads
from tiny import settings

from tokenv.config.files import resolve
from tokenv.core import checkpoints
from tokenv.core.errors import UserError
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.hub import StreamingDataset
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    support.write_tables(folder)
    data = {"source": f"hub:{folder}", "shuffle_buffer": 16, "validation": 0.05}
    return resolve([], settings(data=data, train={"symbols": 2048}))


@pytest.fixture(autouse=True)
def _in_the_data_set(config, monkeypatch):
    """Work in the data set's folder, so that resuming may read it."""
    monkeypatch.chdir(config.data.source.removeprefix("hub:"))


def trained(config, folder, *, resume=None, log=lambda *_: None):
    """Return the history without timings, and the stream positions of the last checkpoint."""
    _, history = train(config, folder, log, resume=resume)
    state = checkpoints.load(checkpoints.list_complete(folder)[-1]).state["data"]
    return {name: values for name, values in history.items() if "per_second" not in name}, state


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    return trained(config, tmp_path_factory.mktemp("whole"))


def test_reading_ahead_changes_no_bit(config, whole, tmp_path, monkeypatch):
    assert not prefetch_threads()
    threads = []

    def count_threads(*_):
        threads.append(len(prefetch_threads()))

    assert trained(config, tmp_path / "ahead", log=count_threads) == whole
    assert max(threads) == 1
    corpus = load_corpus(config.data)
    assert corpus.streamed
    monkeypatch.setattr(
        Corpus, "streamed", property(lambda _: False, lambda *_: None), raising=False
    )
    threads.clear()
    assert trained(config, tmp_path / "direct", log=count_threads) == whole
    assert max(threads) == 0


def test_a_stopped_and_resumed_run_is_the_same(config, whole, tmp_path):
    def interrupt(name, _, seen):
        if name == "train/flops" and seen == 768:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "one", interrupt)
    assert not prefetch_threads()
    saved = checkpoints.list_complete(tmp_path / "one")[-1]
    assert checkpoints.load(saved).state["symbols"] == 768
    assert trained(config, tmp_path / "two", resume=checkpoints.load(saved)) == whole


def test_unreadable_data_is_reported_to_the_user(config, tmp_path, monkeypatch):
    real = StreamingDataset.rows

    def broken(self, shard, first=0):
        for number, row in real(self, shard, first):
            if begun:
                raise UserError(
                    "hub data set cannot be read: the line is dead: expected a connection"
                )
            yield number, row

    begun = []
    monkeypatch.setattr(StreamingDataset, "rows", broken)
    with pytest.raises(UserError, match="the line is dead: expected a connection"):
        train(config, tmp_path, lambda name, *_: begun.append(name))
    assert not prefetch_threads()
