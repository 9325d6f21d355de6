"""The built-in corpora: the synthetic language, the standard library and its documentation."""

import numpy as np
import pytest

from tokenv.data.builtin import (
    NEIGHBOURS,
    make_lexicon,
    prose_documents,
    python_documents,
    synthetic_documents,
)
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus


def segment(content, gold):
    ends = [i + 1 for i, end in enumerate(gold) if end]
    return [bytes(content[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)], ends


def test_the_lexicon_is_distinct_lower_case_and_seeded():
    words = make_lexicon(500, seed=0)
    assert len(set(words)) == 500
    assert all(3 <= len(word) <= 7 and word.isalpha() and word.islower() for word in words)
    assert 4.7 < np.mean([len(word) for word in words]) < 5.3
    assert make_lexicon(500, seed=0) == words
    assert make_lexicon(500, seed=1) != words


def test_words_are_distinguished_by_their_last_two_letters():
    words = make_lexicon(120, seed=0)
    assert len({word[-2:] for word in words}) == 120
    assert {word[-1] for word in words} == set(b"ghijklmnopqrstuvwxyz")
    assert {letter for word in words for letter in word[:-1]} == set(b"abcdef")


def test_gold_segments_documents_into_words_of_the_lexicon():
    lexicon = set(make_lexicon(50, seed=3))
    rows = list(synthetic_documents(50, 20, seed=3))
    assert len(rows) == 20
    for row in rows:
        words, ends = segment(row.content, row.gold)
        assert set(words) <= lexicon
        assert ends[-1] == len(row.content) == len(row.gold)
        assert 400 <= len(words) <= 1000
        assert row.content.isalpha()


def test_a_word_determines_the_next_and_fresh_ones_follow_zipf():
    lexicon = make_lexicon(50, seed=0)
    rank = {word: number for number, word in enumerate(lexicon)}
    documents = [segment(row.content, row.gold)[0] for row in synthetic_documents(50, 400, seed=0)]
    drawn = [np.array([rank[word] for word in words]) for words in documents]
    follows = np.zeros((50, 50))
    for words in drawn:
        np.add.at(follows, (words[:-1], words[1:]), 1)
    successor = follows.argmax(1)
    assert sorted(successor) == list(range(50))
    assert (successor != np.arange(50)).all()
    assert (successor // NEIGHBOURS == np.arange(50) // NEIGHBOURS).all()
    zipf = 1 / np.arange(1, 51)
    zipf /= zipf.sum()
    share = follows[np.arange(50), successor] / follows.sum(1)
    assert share == pytest.approx(0.9 + 0.1 * zipf[successor], abs=0.03)
    first = np.bincount([words[0] for words in drawn], minlength=50) / len(drawn)
    assert first == pytest.approx(zipf, abs=0.06)
    block = np.bincount(np.concatenate(drawn) // NEIGHBOURS) / sum(map(len, drawn))
    assert block == pytest.approx(zipf.reshape(-1, NEIGHBOURS).sum(1), abs=0.03)


def test_gold_reaches_the_batches():
    config = DataConfig(
        source="words", lexicon_size=40, words_documents=30, seq_len=64, validation=0.2
    )
    lexicon = set(make_lexicon(40, seed=0))
    corpus = load_corpus(config)
    for batch in (corpus.validation(), corpus.train().next(100)):
        assert batch.gold_BN.shape == batch.symbol_BN.shape
        for symbols, gold in zip(batch.symbol_BN.tolist(), batch.gold_BN.tolist(), strict=True):
            # the first word may have begun in an earlier piece
            inner = segment(symbols, gold)[0][1:]
            assert set(inner) <= lexicon | {b"\n"}


def test_the_standard_library_loads_with_its_paths():
    documents = python_documents()
    names = [document.name for document in documents]
    assert names == sorted(names)
    assert "ast.py" in names
    assert "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    assert sum(len(document.content) for document in documents) > 5_000_000


def test_prose_holds_topics_and_docstrings():
    texts = {row.name: row.content.decode() for row in prose_documents()}
    assert "assert" in texts["topic assert"]
    assert "JSON (JavaScript Object Notation)" in texts["docstrings of json/__init__.py"]
    assert "def " not in texts["docstrings of bisect.py"]
    assert sum(map(len, texts.values())) > 1_000_000


def test_python_is_a_corpus():
    corpus = load_corpus(DataConfig(source="python", seq_len=256))
    batch = corpus.validation(64)
    assert batch.symbol_BN.shape == (64, 256)
    assert batch.gold_BN is None
    assert len(set(batch.document_B.tolist())) > 5
    assert all(".py @ " in origin for origin in batch.origin)
