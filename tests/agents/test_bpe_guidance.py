"""BPE guidance: the paper's example, any bytes, and a tokenizer that is trained once and travels with the model."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tokenizers import Tokenizer, models

from tokenv.agents.bpe import BPE
from tokenv.cli.main import run_command
from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.tokenizer import train_bpe, user_cache


def save(path, words):
    """Return a tokenizer with the merges which build these words from the left, byte by byte."""
    vocabulary = {chr(byte): byte for byte in range(256)}
    merges = []
    for word in words:
        for left in itertools.accumulate(word):
            if left not in vocabulary:
                vocabulary[left] = len(vocabulary)
                merges.append((left[:-1], left[-1]))
    Tokenizer(models.BPE(vocabulary, merges)).save(str(path))
    return path


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in range(12):
        (folder / f"{name}.txt").write_text(
            f"the cat's naïve café, and the other {name:03} hats 1234\n" * 8
        )
    return load_corpus(DataConfig(source=str(folder), seq_len=32, validation=0.2))


def observe(rows, length_B=None):
    symbol_BT = torch.tensor([list(row) for row in rows])
    position_BT = torch.arange(symbol_BT.shape[1]).expand(symbol_BT.shape)
    valid_BT = (
        position_BT
        < (torch.tensor([symbol_BT.shape[1]]) if length_B is None else length_B)[:, None]
    )
    return TensorDict(
        {
            keys.SYMBOL: symbol_BT,
            keys.POSITION: position_BT,
            keys.DECISION_MASK: valid_BT & (position_BT > 0),
        },
        batch_size=symbol_BT.shape,
    )


def draw(agent, *rows):
    observation = observe(rows)
    return agent.draw(observation, torch.rand(observation.shape))[keys.ACTION].tolist()


def test_the_papers_example(tmp_path):
    """Tokens hello, _token, ization; the first byte, without a boundary in the paper, always has one here."""
    agent = BPE(tokenizer=save(tmp_path / "t.json", ["hello", "_token", "ization"]))
    papers = [int(a) for a in "000001000001000000"]
    assert draw(agent, b"hello_tokenization") == [[1, *papers[1:]]]


def test_boundaries_are_the_tokens_last_bytes_moved_right(tmp_path):
    agent = BPE(tokenizer=save(tmp_path / "t.json", ["ab", "abc", "\xc3\xa9", "\x00\xff"]))
    for text in (b"abcabab", b"a\xc3\xa9b\x00\xffc", b"ccc", b"a"):
        ends = []
        at = 0
        for token in agent.tokenizer.encode(text.decode("latin-1")).tokens:
            at += len(token)
            ends.append(at - 1)
        shifted = [int(i - 1 in ends) for i in range(len(text))]
        assert draw(agent, text) == [[1, *shifted[1:]]]


def test_a_later_byte_moves_an_earlier_boundary(tmp_path):
    """Check the warning in the docstring."""
    path = tmp_path / "t.json"
    vocabulary = {chr(byte): byte for byte in range(256)} | {"bc": 256, "ab": 257}
    Tokenizer(models.BPE(vocabulary, [("b", "c"), ("a", "b")])).save(str(path))
    assert draw(BPE(tokenizer=path), b"xabc", b"xabx") == [[1, 1, 1, 0], [1, 1, 0, 1]]


def test_padding_has_no_boundaries_and_all_samples_are_the_same(tmp_path):
    agent = BPE(tokenizer=save(tmp_path / "t.json", ["ab", "abab"]))
    observation = observe([b"xababab", b"xababab"], torch.tensor([7, 4]))
    drawn = agent.draw(observation, torch.rand(3, 2, 7, dtype=torch.float64))
    assert drawn.batch_size == (3, 2, 7)
    assert set(drawn.keys()) == set(agent.out_keys)
    for sample in drawn[keys.ACTION].tolist():
        # ab ab ab, but aba where the padding begins
        assert sample == [[1, 1, 0, 1, 0, 1, 0], [1, 1, 0, 0, 0, 0, 0]]
    assert drawn[keys.BOUNDARY_PROB].dtype == torch.float64
    assert not drawn[keys.ACTION_LOG_PROB].any()
    assert not drawn[keys.ENTROPY].any()


def test_training_is_cached_and_deterministic(corpus, tmp_path, monkeypatch):
    first = train_bpe(corpus, 300, tmp_path / "one")
    written = first.stat().st_mtime_ns
    assert train_bpe(corpus, 300, tmp_path / "one") == first
    assert first.stat().st_mtime_ns == written
    assert train_bpe(corpus, 300, tmp_path / "two").read_bytes() == first.read_bytes()
    assert train_bpe(corpus, 301, tmp_path / "one") != first
    assert sorted(path.suffix for path in (tmp_path / "one").iterdir()) == [".json", ".json"]
    assert len(json.loads(first.read_text())["model"]["vocab"]) == 300
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "three"))
    assert (
        train_bpe(corpus, 300).parent
        == tmp_path / "three" / "tokenv" / "bpe"
        == user_cache() / "bpe"
    )


def test_words_are_split_as_for_gpt_2(corpus, tmp_path):
    tokenizer = Tokenizer.from_file(str(train_bpe(corpus, 5000, tmp_path)))
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(
        "it's café  12b\n\n x_y".encode().decode("latin-1")
    )
    words = [word.encode("latin-1").decode() for word, _ in pieces]
    assert words == ["it", "'s", " café", " ", " 12", "b", "\n\n", " x", "_", "y"]


@settings(max_examples=40)
@given(text=st.binary(min_size=1, max_size=60))
def test_any_bytes_are_a_text(text, trained_tokenizer):
    tokens = trained_tokenizer.encode(text.decode("latin-1"))
    assert "".join(tokens.tokens).encode("latin-1") == text
    assert [begin for begin, _ in tokens.offsets] == [0, *(end for _, end in tokens.offsets[:-1])]


@pytest.fixture(scope="module")
def trained_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    corpus = load_corpus(
        DataConfig(source="words", seq_len=32, words_documents=40, lexicon_size=10)
    )
    return Tokenizer.from_file(str(train_bpe(corpus, 400, folder)))


def test_every_training_sequence_is_read_once(corpus, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(
        Tokenizer,
        "train_from_iterator",
        lambda self, texts, trainer: read.extend(texts),
        raising=True,
    )
    train_bpe(corpus, 300, tmp_path)
    texts = [text for batch in read for text in batch]
    everything = corpus.train().next(len(texts))
    assert sorted(texts) == sorted(
        bytes(row).decode("latin-1") for row in everything.symbol_BN.tolist()
    )
    assert len(set(everything.origin)) == len(texts)
    read.clear()
    train_bpe(corpus, 300, tmp_path, max_bytes=100)
    assert sum(map(len, read)) == 64


def test_a_run_trains_its_tokenizer_once_and_carries_it(tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = ["agent.name=bpe", "agent.vocabulary_size=300"]
    for section in ("data", "model", "train", "validation", "checkpoint", "hardware"):
        options += [f"{section}.{key}={value}" for key, value in tiny_settings[section].items()]
    trained = run_command("train", ["with", *options])
    (cached,) = (tmp_path / "cache" / "tokenv").rglob("*.json")
    cached.unlink()
    again = run_command("evaluate", ["with", "run=runs/1", "sequences=8", "batch_size=4"])
    assert again["sampled"]["boundary_rate"] == trained["boundary_rate"]
    assert not list((tmp_path / "cache" / "tokenv").rglob("*.json"))
    with pytest.raises(ValueError, match="whole sequences only"):
        run_command("generate", ["with", "run=runs/1", "text=ab"])


@pytest.mark.parametrize("content", [b"{", b"\xff", b"{}", b"[]", b"NO BYTES"])
def test_a_damaged_stored_tokenizer_is_one_message(content, tmp_path):
    if content == b"NO BYTES":
        content = Tokenizer(models.BPE({"a": 0}, [])).to_str().encode()
    parts = Components(None, BPE(tokenizer=save(tmp_path / "t.json", ["hello"])), None, None)
    state = {"agent._extra_state": torch.frombuffer(bytearray(content), dtype=torch.uint8)}
    with pytest.raises(
        UserError, match="the checkpoint's agent cannot be loaded: the stored tokenizer"
    ):
        parts.load_state_dict(state)


def test_mistakes_are_reported(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"agent\.tokenizer is missing"):
        BPE()
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        BPE(tokenizer=tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a tokenizer's JSON file"):
        BPE(tokenizer=tmp_path / "other.json")
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "small.json"))
    with pytest.raises(ValueError, match="has no token for byte 0: expected one whose symbols"):
        BPE(tokenizer=tmp_path / "small.json")
    with pytest.raises(
        ValueError, match="vocabulary_size = 255: expected a whole number of at least 256"
    ):
        train_bpe(corpus, 255, tmp_path)
    with pytest.raises(ValueError, match="max_bytes = 0: expected a whole number of at least 1"):
        train_bpe(corpus, 300, tmp_path, max_bytes=0)
