"""Every kind of file loads, whatever its bytes, and every mistake is answered in words."""

import gzip
import json
import lzma
import tracemalloc
from dataclasses import replace
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tokenv.data import split
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus, reading_once
from tokenv.data.documents import content_of, read_documents
from tokenv.evaluation.calibration import split_for_calibration

TEXTS = [f"document {number}: naïve café" for number in range(60)]
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.compress}


def write_jsonl(path, texts=TEXTS, column="text"):
    raw = "".join(json.dumps({"title": "t", column: text}) + "\n" for text in texts).encode()
    path.write_bytes(PACKERS[path.suffix if path.suffix in PACKERS else ""](raw))
    return str(path)


def write_parquet(path, values=TEXTS, kind=None):
    pq.write_table(pa.table({"text": pa.array(values, type=kind)}), path)
    return str(path)


def read(source, **settings):
    return list(read_documents(str(source), DataConfig(source=str(source), **settings)))


@pytest.mark.parametrize(
    "name", ["a[1].jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.json"]
)
def test_json_lines_load_packed_or_not(tmp_path, name):
    documents = read(write_jsonl(tmp_path / name))
    assert [document.content.decode() for document in documents] == TEXTS
    assert documents[3].name == f"{name} row 3"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_json_list_loads(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    assert [document.content for document in read(tmp_path / "a.json")] == [b"one", b"two"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet_holds_text(tmp_path, kind):
    write_parquet(tmp_path / "a.parquet", kind=kind)
    assert [document.content.decode() for document in read(tmp_path / "a.parquet")] == TEXTS


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_parquet_bytes_that_are_no_text_survive(tmp_path, kind):
    values = [b"\xff\xfe\x00", bytes(range(256))]
    write_parquet(tmp_path / "a.parquet", values, kind)
    assert [document.content for document in read(tmp_path / "a.parquet")] == values


def test_a_folder_of_parquet_may_carry_its_description(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "info.json").write_text("{}")
    write_parquet(tmp_path / "data" / "0.parquet", ["one"])
    write_parquet(tmp_path / "data" / "1.parquet", ["two"])
    assert [document.content for document in read(tmp_path)] == [b"one", b"two"]


def test_a_folder_of_text_is_one_document_a_file_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    files = {
        "b.txt": b"\xff\x00not utf-8",
        "a.py": b"x = 1\r\n",
        "sub/c.md": b"# c",
        "sub/d.rst": b"d",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "e.bin").write_bytes(b"ignored")
    documents = read(tmp_path)
    assert {document.name: document.content for document in documents} == files
    assert [document.name for document in documents] == sorted(files)


@pytest.mark.parametrize("name", ["a.txt", "a.py"])
def test_a_single_text_file_is_one_document(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x80text")
    assert [(document.name, document.content) for document in read(tmp_path / name)] == [
        (name, b"\x80text")
    ]


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_text_is_read_as_text(tmp_path, suffix):
    (tmp_path / f"a.txt{suffix}").write_bytes(PACKERS[suffix](b"\x80text"))
    (document,) = read(tmp_path / f"a.txt{suffix}")
    assert (document.name, document.content) == (f"a.txt{suffix}", b"\x80text")
    assert read(tmp_path) == [document]


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_packed_text_cut_short_is_named(tmp_path, suffix):
    file = tmp_path / f"a.txt{suffix}"
    for content in (PACKERS[suffix](b"text" * 100)[:-5], b"neither packed"):
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"a.txt{suffix} cannot be decompressed: .*: repair it"
        ):
            read(file)


def test_an_empty_table_has_no_documents(tmp_path):
    assert read(write_jsonl(tmp_path / "a.jsonl", [])) == []


def test_odd_text_becomes_bytes():
    assert content_of({"text": "\udcff"}, "text", "x") == b"\xff"
    assert content_of({"text": "a\ud800"}, "text", "x") == b"a?"
    assert content_of({"text": None}, "text", "x") == b""


def test_a_mistyped_built_in_is_guessed():
    with pytest.raises(
        FileNotFoundError, match=r"'pyhton' does not exist; did you mean 'python'.*prose"
    ):
        load_corpus(DataConfig(source="pyhton"))


def test_a_missing_path_raises_a_message_with_accepted_sources(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere.*not exist; expected one of python.*parquet"
    ):
        load_corpus(DataConfig(source=str(tmp_path / "nowhere")))


def test_an_unknown_kind_of_file_is_refused(tmp_path):
    (tmp_path / "a.doc").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"a\.doc is of no known kind; expected"):
        load_corpus(DataConfig(source=str(tmp_path / "a.doc")))


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds no file to read"):
        load_corpus(DataConfig(source=str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.jsonl.zst", "a.parquet"]
)
def test_a_broken_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"neither packed nor text \xff")
    with pytest.raises(ValueError, match=f"{name} cannot be read as"):
        load_corpus(DataConfig(source=str(tmp_path / name)))


def test_a_wrong_column_is_answered_with_those_there_are(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", column="body")
    with pytest.raises(ValueError, match=r"has no column 'text' but title, body: set data\.column"):
        load_corpus(DataConfig(source=source))
    assert len(read(source, column="body")) == len(TEXTS)


def test_a_column_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": 3}\n')
    with pytest.raises(ValueError, match=r"column 'text' of .* holds int, expected text"):
        load_corpus(DataConfig(source=str(tmp_path / "a.jsonl")))


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no document with a byte in it"):
        load_corpus(DataConfig(source=write_jsonl(tmp_path / "a.jsonl", ["", ""])))


@pytest.mark.parametrize("line", [b"x" * 7, b"x" * 99 + b"\n"])
def test_of_a_single_document_the_tail_is_held_out(tmp_path, line):
    (tmp_path / "a.txt").write_bytes(line * 1000)
    corpus = load_corpus(DataConfig(source=str(tmp_path / "a.txt"), seq_len=16, validation=0.1))
    held = corpus.validation()
    train = corpus.train().next(len(line) * 900 // 16)
    assert 0.08 < len(held) / (len(held) + len(train)) < 0.12
    assert {origin.split(" @ ")[0] for origin in train.origin} == {"a.txt"}
    assert len(held.document_B.unique()) > 20
    measured, own = split_for_calibration(corpus, 512)
    assert measured.origin + own.origin == held.origin[: len(measured) + len(own)]


def test_a_large_file_takes_less_than_twice_its_size(tmp_path):
    size = 2**23
    (tmp_path / "a.txt").write_bytes(b"some words\n" * (size // 11))
    with patch.object(split, "MOST_SAMPLES", 2**14):
        tracemalloc.start()
        load_corpus(DataConfig(source=str(tmp_path / "a.txt"))).train().next(8)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2 * size


def test_a_document_too_short_for_both_sides_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * 1000)
    with pytest.raises(
        ValueError, match=r"1 non-empty documents, 1000 bytes.*data\.validation_source"
    ):
        load_corpus(DataConfig(source=str(tmp_path / "a.txt")))


def test_too_few_bytes_are_counted(tmp_path):
    with pytest.raises(ValueError, match=r"60 non-empty documents, \d+ bytes.*data\.seq_len 4096"):
        load_corpus(DataConfig(source=write_jsonl(tmp_path / "a.jsonl"), seq_len=4096))


def test_duplicates_are_called_duplicates(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["the same text, again and again " * 30] * 200)
    with pytest.raises(
        ValueError,
        match=r"200 non-empty documents.* 199 documents are duplicates of others.* differ",
    ):
        load_corpus(DataConfig(source=source, seq_len=64))
    (tmp_path / "b.txt").write_text("the same text, again and again " * 30)
    # all of those to train on
    with pytest.raises(ValueError, match="200 documents are duplicates of others"):
        load_corpus(
            DataConfig(source=source, seq_len=64, validation_source=str(tmp_path / "b.txt"))
        )


def test_document_cut_reports_the_longest_document(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["short", "a longer one"])
    with pytest.raises(ValueError, match="the longest has 12 bytes"):
        load_corpus(DataConfig(source=source, cut="document", seq_len=64))


def test_loading_twice_gives_the_same_corpus(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl")
    first, again = (load_corpus(DataConfig(source=source, seq_len=8)) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert first.train().next(20).origin == again.train().next(20).origin
    assert (first.validation().symbol_BN == again.validation().symbol_BN).all()
    assert first.name == source
    assert first.seq_len == first.train().seq_len == 8


def test_the_fingerprint_depends_on_data_and_settings(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl")
    other = write_jsonl(tmp_path / "b.jsonl", [*TEXTS[1:], "something else here"])
    configs = [
        DataConfig(source=source, seq_len=8),
        DataConfig(source=source, seq_len=9),
        DataConfig(source=source, seq_len=8, seed=1),
        DataConfig(source=source, seq_len=8, cut="document"),
        DataConfig(source=source, seq_len=8, validation=0.5),
        DataConfig(source=other, seq_len=8),
    ]
    corpora = [load_corpus(config) for config in configs]
    assert len({corpus.fingerprint for corpus in corpora}) == len(corpora)
    with pytest.raises(ValueError, match="the saved state is of corpus"):
        corpora[0].train().load_state_dict(corpora[1].train().state_dict())


def test_validation_begins_alike_whatever_its_size(tmp_path):
    config = DataConfig(source=write_jsonl(tmp_path / "a.jsonl"), seq_len=8, validation=0.5)
    corpus = load_corpus(config)
    everything = corpus.validation()
    few = corpus.validation(12)
    assert len(few) == 12
    assert everything.origin[:12] == few.origin
    assert len(set(few.document_B.tolist())) > 6
    with pytest.raises(ValueError, match="max_sequences is 0"):
        corpus.validation(0)


def test_validation_can_come_from_elsewhere(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl")
    other = write_jsonl(tmp_path / "b.jsonl", [TEXTS[0], "held out text, all of it"])
    corpus = load_corpus(DataConfig(source=source, validation_source=other, seq_len=8))
    assert {origin.split(" row ")[0] for origin in corpus.validation().origin} == {"b.jsonl"}
    origins = {origin.split(" @ ")[0] for origin in corpus.train().next(500).origin}
    assert "a.jsonl row 1" in origins
    assert "a.jsonl row 0" not in origins


def test_a_negative_seed_is_refused(tmp_path):
    corpus = load_corpus(DataConfig(source=write_jsonl(tmp_path / "a.jsonl"), seq_len=8))
    with pytest.raises(ValueError, match="seed is -1"):
        corpus.train(seed=-1)


def test_progress_is_shown_only_on_demand(tmp_path, capsys):
    config = DataConfig(source=write_jsonl(tmp_path / "a.jsonl"), seq_len=8)
    load_corpus(config)
    assert capsys.readouterr().err == ""
    load_corpus(config, progress=True)
    assert "60 documents" in capsys.readouterr().err


def test_data_are_read_once_in_a_context(tmp_path):
    config = DataConfig(source=write_jsonl(tmp_path / "a.jsonl"), seq_len=8)
    with reading_once():
        first = load_corpus(config)
        with reading_once():
            assert load_corpus(config) is first
        assert load_corpus(config) is first
        assert load_corpus(replace(config, seq_len=4)) is not first
    assert load_corpus(config) is not first
