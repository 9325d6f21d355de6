"""The built-in corpora: the synthetic language, the standard library and its documentation."""

import numpy as np
import pytest

from tokenv.data.builtin import prose_documents, python_documents
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.words import make_lexicon, words_documents


def segment(content, gold):
    ends = [i + 1 for i, end in enumerate(gold) if end]
    return [bytes(content[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)], ends


def test_the_lexicon_is_distinct_lower_case_and_seeded():
    words = make_lexicon(500, seed=0)
    assert len(set(words)) == 500
    assert all(2 <= len(word) <= 8 and word.isalpha() and word.islower() for word in words)
    assert 4.5 < np.mean([len(word) for word in words]) < 5.5
    assert make_lexicon(500, seed=0) == words
    assert make_lexicon(500, seed=1) != words


def test_gold_segments_documents_into_words_of_the_lexicon():
    lexicon = set(make_lexicon(50, seed=3))
    rows = list(words_documents(50, 20, seed=3))
    assert len(rows) == 20
    for row in rows:
        words, ends = segment(row["content"], row["gold"])
        assert set(words) <= lexicon
        assert ends[-1] == len(row["content"]) == len(row["gold"])
        assert 400 <= len(words) <= 1000
        assert row["content"].isalpha()


def test_words_follow_zipf_and_are_independent():
    lexicon = make_lexicon(50, seed=0)
    rank = {word: number for number, word in enumerate(lexicon)}
    words = [w for row in words_documents(50, 100, seed=0) for w in segment(row["content"], row["gold"])[0]]
    drawn = np.array([rank[word] for word in words])
    share = np.bincount(drawn, minlength=50) / len(drawn)
    zipf = 1 / np.arange(1, 51)
    assert share == pytest.approx(zipf / zipf.sum(), abs=0.006)
    follows = drawn[1:][drawn[:-1] == 0]
    assert np.mean(follows == 0) == pytest.approx(share[0], abs=0.02)


def test_gold_reaches_the_batches():
    config = DataConfig(source="words", words_lexicon=40, words_documents=30, seq_len=64, validation=0.2)
    lexicon = set(make_lexicon(40, seed=0))
    corpus = load_corpus(config)
    for batch in (corpus.validation(), corpus.train().next(100)):
        assert batch.gold_BN.shape == batch.symbol_BN.shape
        for symbols, gold in zip(batch.symbol_BN.tolist(), batch.gold_BN.tolist(), strict=True):
            inner = segment(symbols, gold)[0][1:]  # the first word may have begun in an earlier piece
            assert set(inner) <= lexicon | {b"\n"}


def test_the_standard_library_loads_with_its_paths():
    rows = python_documents()
    names = rows["name"]
    assert list(names) == sorted(names)
    assert "ast.py" in names
    assert "json/decoder.py" in names
    assert not any("site-packages" in name for name in names)
    assert sum(len(content) for content in rows["content"]) > 5_000_000


def test_prose_holds_topics_and_docstrings():
    texts = {row["name"]: row["content"].decode() for row in prose_documents()}
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
