"""A model's boundaries as a pre-tokenizer of Hugging Face's libraries."""

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import tokenv
from tokenv import Model
from tokenv.core.errors import UserError


@settings(max_examples=25)
@given(st.text(min_size=1, max_size=40))
def test_pieces_are_the_models_tokens_and_never_cut_a_character(model: Model, text: str) -> None:
    pieces = model.pre_tokenizer().pre_tokenize_str(text)
    assert "".join(piece for piece, _ in pieces) == text
    assert all(text[start:end] == piece for piece, (start, end) in pieces)
    ends = {span.end for span in model.spans(text, threshold=True)}
    actual = {len(text[:end].encode()) for _, (_, end) in pieces}
    starts = {len(text[:i].encode()) for i in range(len(text) + 1)}
    assert actual == {min(start for start in starts if start >= end) for end in ends}


def test_a_tokenizer_learns_within_the_pieces(model: Model) -> None:
    text = "für alle und für keinen; " * 8
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(model.pre_tokenizer())
    tokenizer.train_from_iterator(
        [text] * 4, trainers.BpeTrainer(vocab_size=200, special_tokens=["?"])
    )
    pieces = model.pre_tokenizer().pre_tokenize_str(text)
    encoded = tokenizer.encode(text)
    assert "".join(encoded.tokens) == text
    ends = {end for _, end in encoded.offsets}
    assert {end for _, (_, end) in pieces} <= ends  # no token spans two pieces


def test_nothing_is_no_piece(model: Model) -> None:
    assert model.pre_tokenizer().pre_tokenize_str("") == []


def assert_reads_within(tokenizer: Any, model: Model) -> None:
    text = "für alle\n und 😀"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    ends = {end for _, end in tokenizer(text, return_offsets_mapping=True)["offset_mapping"]}
    assert {end for _, (_, end) in model.pre_tokenizer().pre_tokenize_str(text)} <= ends


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Any:
    pytest.importorskip("transformers")
    return model.train_tokenizer(["für alle und für keinen; "] * 8, 300, eos_token="</s>")


def test_transformers_reads_within_the_models_tokens(model: Model, tokenizer: Any) -> None:
    assert_reads_within(tokenizer, model)
    assert len(tokenizer) <= 300  # special tokens are part of the vocabulary
    padded = tokenizer(["f", "xyzxyz"], padding=True)["input_ids"]
    assert len({len(ids) for ids in padded}) == 1
    assert padded[0][-1] == tokenizer.pad_token_id
    assert model.train_tokenizer(vocab_size=300, sequences=4).is_fast  # on the run's own text


def test_transformers_stores_the_tokenizer_with_its_model(
    model: Model, tokenizer: Any, tmp_path: Path
) -> None:
    import transformers

    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    text = "für keinen; 😀"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.pad_token == "<pad>"
    assert_reads_within(again, model)
    assert_reads_within(tokenizer, model)
    assert tokenv.load(tmp_path).tokens(text, threshold=True) == model.tokens(text, threshold=True)
    again.save_pretrained(tmp_path / "again")
    assert_reads_within(
        transformers.AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True),
        model,
    )


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_tokenizer_is_copied_and_pickled_with_its_model(
    model: Model, tokenizer: Any, duplicate: Any
) -> None:
    again = duplicate(tokenizer)
    assert_reads_within(again, model)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert (again.pad_token, again.eos_token) == ("<pad>", "</s>")


def test_without_transformers_it_is_one_message(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tokenv.library.hf_tokenizer", raising=False)
    with pytest.raises(UserError, match="pip install transformers"):
        model.train_tokenizer(["a text"])
