"""Hub data sets stream, with the same promises; a local generator stands in for the hub."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.io.parquet import ParquetDatasetReader

from tokenv.core.errors import UserError
from tokenv.data import rows
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus

ROWS = 120


def generate(rows, column):
    for number in range(rows):
        yield {column: f"document number {number} " * (number % 5 + 1)}


@pytest.fixture
def hub(monkeypatch):
    """Replace the hub; returns the list of calls and a way to change what it holds."""
    calls = []
    kwargs = {"rows": ROWS, "column": "text"}

    def load_dataset(*args, **options):
        calls.append((args, options))
        return datasets.IterableDataset.from_generator(generate, gen_kwargs=kwargs)

    monkeypatch.setattr(rows, "open_hub", load_dataset)
    return calls, kwargs


def make_config(**changes):
    settings = {"source": "hub:owner/name", "seq_len": 16, "validation": 0.2, "shuffle_buffer": 25}
    return DataConfig(**(settings | changes))


def sequences(batch):
    return list(
        zip(
            map(tuple, batch.symbol_BN.tolist()),
            batch.origin,
            batch.document_B.tolist(),
            strict=True,
        )
    )


def test_the_data_set_is_streamed_with_its_configuration_and_split(hub):
    load_corpus(make_config(hub_config="sample-10BT", hub_split="test"))
    assert hub[0] == [(("owner/name", "sample-10BT", "test"), {})]


@pytest.mark.parametrize("cut", ["chunk", "document"])
def test_an_epoch_never_touches_a_validation_document(hub, cut):
    corpus = load_corpus(make_config(cut=cut))
    held = set(corpus.validation().document_B.tolist())
    trained = set(corpus.train().next(500).document_B.tolist())
    assert held
    assert not held & trained
    assert held | trained <= set(range(ROWS))
    assert cut == "document" or len(held | trained) > 0.8 * ROWS


def test_validation_is_limited_and_begins_alike(hub):
    corpus = load_corpus(make_config(seq_len=2))
    assert len(corpus.validation()) == 512
    assert len(corpus.validation(5)) == 5
    more = corpus.validation(600)
    assert len(more) == 600
    assert sequences(more)[:512] == sequences(corpus.validation())
    assert len(corpus.validation(10**6)) < 10**6


def test_skipping_is_taking_and_throwing_away_across_epochs(hub):
    corpus = load_corpus(make_config())
    whole = corpus.train(seed=1)
    skipping = corpus.train(seed=1)
    for count in (1, 40, 150, 7):
        skipping.skip(2 * count)
        expected = sequences(whole.next(3 * count))
        assert sequences(skipping.next(count)) == expected[2 * count :]


@pytest.mark.parametrize("buffer", [25, ROWS // 4, ROWS, 1000])
def test_resuming_anywhere_equals_never_having_stopped(hub, buffer):
    corpus = load_corpus(make_config(shuffle_buffer=buffer))
    stream = corpus.train(seed=2)
    for count in (0, 3, 100, 200, 250):
        if count:
            stream.next(count)
        saved = json.loads(json.dumps(stream.state_dict()))
        resumed = load_corpus(make_config(shuffle_buffer=buffer)).train()
        resumed.load_state_dict(saved)
        assert sequences(resumed.next(300)) == sequences(stream.next(300))


def test_resuming_is_exact_in_files_of_tables_too(monkeypatch, tmp_path):
    files = [str(tmp_path / f"{part}.parquet") for part in range(3)]
    for part, file in enumerate(files):
        texts = [f"part {part} number {number}, with some text" for number in range(40)]
        pq.write_table(pa.table({"text": texts}), file, row_group_size=7)
    tables = ParquetDatasetReader(files, split="train", streaming=True).read()
    monkeypatch.setattr(rows, "open_hub", lambda *args, **options: tables)
    corpus = load_corpus(make_config(shuffle_buffer=9))
    stream = corpus.train()
    for _ in range(12):
        saved = json.loads(json.dumps(stream.state_dict()))
        resumed = corpus.train()
        resumed.load_state_dict(saved)
        assert sequences(resumed.next(31)) == sequences(stream.next(31))
    assert stream.state_dict()["blocks"]["epoch"] > 0


def test_epochs_reshuffle(hub):
    stream = load_corpus(make_config(shuffle_buffer=1000)).train()
    batch = sequences(stream.next(900))
    again = batch.index(batch[0], 1)
    epoch = len(set(batch))
    assert sorted(batch[:epoch]) == sorted(batch[epoch : 2 * epoch])
    assert batch[:epoch] != batch[epoch : 2 * epoch]
    assert again >= epoch


def test_validation_can_come_from_a_file(hub, tmp_path):
    (tmp_path / "v.txt").write_text("document number 0 ")
    corpus = load_corpus(make_config(validation_source=str(tmp_path / "v.txt")))
    assert corpus.validation().origin == ["v.txt @ 0"]
    assert 0 not in corpus.train().next(900).document_B
    (tmp_path / "v.txt").write_text("short")
    with pytest.raises(ValueError, match=r"no sequence of data\.seq_len 16 bytes to validate on"):
        load_corpus(make_config(validation_source=str(tmp_path / "v.txt")))


def test_a_wrong_column_is_answered_with_those_there_are(hub):
    hub[1]["column"] = "body"
    with pytest.raises(ValueError, match="hub data set 'owner/name' has no column 'text' but body"):
        load_corpus(make_config())


def test_an_empty_data_set_is_refused(hub):
    hub[1]["rows"] = 0
    with pytest.raises(ValueError, match="holds no row"):
        load_corpus(make_config())


def test_nothing_to_validate_on_is_refused(hub):
    with pytest.raises(
        ValueError, match=r"no sequence of data\.seq_len 100000 bytes to validate on"
    ):
        load_corpus(make_config(seq_len=100_000))


def test_nothing_to_train_on_is_refused_instead_of_searched_forever(hub):
    stream = load_corpus(make_config(seq_len=16, validation=1 - 1e-9)).train()
    with pytest.raises(ValueError, match=r"no sequence of data\.seq_len 16 bytes to train on"):
        stream.next(1)


def test_failures_of_the_hub_are_one_message(monkeypatch):
    def no_more(number):
        yield from generate(30, "text")
        raise RuntimeError("the line is dead\nand more")

    for source, kind in (("text", "text"), ("series", "series")):
        config = make_config(kind=kind, seq_len=64)

        def refuse(*_args, source=source, **_options):
            raise ConnectionError(f"no network for {source}")

        monkeypatch.setattr(rows, "open_hub", refuse)
        with pytest.raises(
            UserError,
            match=r"hub data set 'owner/name' cannot be .*no network.*: expected a connection",
        ):
            load_corpus(config)
        broken = datasets.IterableDataset.from_generator(no_more, gen_kwargs={"number": 1})
        monkeypatch.setattr(rows, "open_hub", lambda *_args, broken=broken, **_options: broken)
        with pytest.raises(
            UserError, match=r"'owner/name' cannot be read: .*: expected a connection"
        ):
            load_corpus(config)
