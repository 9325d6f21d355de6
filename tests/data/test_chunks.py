"""Cutting loses nothing, splitting keeps documents apart, and streams resume and shard exactly."""

import json
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenv.data import split
from tokenv.data.chunks import Document, chunk_documents
from tokenv.data.config import DataConfig
from tokenv.data.corpus import InMemoryDataset
from tokenv.data.split import Split, split_documents, split_from
from tokenv.data.stream import TrainStream, low_discrepancy_order

contents = st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=20)
several = st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=20)
lengths = st.integers(2, 9)


def named(contents):
    return [Document(f"d{number}", content) for number, content in enumerate(contents)]


def make_stream(pieces, *, seed=0):
    """Stream over `pieces` sequences of two bytes that tell their own number."""
    content = b"".join(number.to_bytes(2, "big") for number in range(pieces))
    split = Split([Document("d", content)], [Document("v", b"vv")], (b"", b""))
    data = InMemoryDataset(split, DataConfig(seq_len=2))
    return TrainStream(data.blocks(seed), seq_len=2, fingerprint="f")


def numbers(batch):
    return (batch.symbol_BN[:, 0] * 256 + batch.symbol_BN[:, 1]).tolist()


@given(contents, lengths)
def test_chunks_reassemble_the_joined_documents(contents, seq_len):
    pieces = chunk_documents(named(contents), seq_len=seq_len, cut="chunk")
    joined = b"\n".join(contents)
    assert pieces.symbol_PN.tobytes() == joined[: len(joined) // seq_len * seq_len]
    for i in range(len(pieces)):
        document = contents[pieces.document_P[i]] + b"\n"
        at = pieces.offset_P[i]
        assert 0 <= at < len(document)
        overlap = document[at : at + seq_len]
        assert pieces.symbol_PN[i].tobytes()[: len(overlap)] == overlap


@given(contents, lengths)
def test_document_cut_takes_the_beginning_of_every_long_document(contents, seq_len):
    pieces = chunk_documents(named(contents), seq_len=seq_len, cut="document")
    assert [bytes(row) for row in pieces.symbol_PN] == [
        c[:seq_len] for c in contents if len(c) >= seq_len
    ]
    assert [contents[d][:seq_len] for d in pieces.document_P] == [
        bytes(row) for row in pieces.symbol_PN
    ]
    assert not pieces.offset_P.any()


@pytest.mark.parametrize("cut", ["chunk", "document"])
def test_gold_is_cut_like_the_bytes(cut):
    documents = [Document("a", b"abcde", b"\0\1\0\0\1"), Document("b", b"fgh", b"\1\0\1")]
    pieces = chunk_documents(documents, seq_len=3, cut=cut)
    gold = [[0, 1, 0], [0, 1, 1], [1, 0, 1]] if cut == "chunk" else [[0, 1, 0], [1, 0, 1]]
    assert pieces.gold_PN.tolist() == [[bool(value) for value in row] for row in gold]


def test_a_batch_names_bytes_documents_and_offsets():
    pieces = chunk_documents(named([b"\xff\x00ab", b"cdef"]), seq_len=3, cut="chunk", ids=[7, 9])
    batch = pieces.take(np.array([2, 0]))
    assert batch.symbol_BN.tolist() == [[100, 101, 102], [255, 0, 97]]
    assert batch.symbol_BN.dtype == torch.int64
    assert batch.origin == ["d1 @ 1", "d0 @ 0"]
    assert batch.document_B.tolist() == [9, 7]
    assert batch.document_B.dtype == torch.int64
    assert batch.gold_BN is None
    assert len(batch) == 2


@given(
    several,
    st.floats(0.01, 0.99),
    st.integers(0, 5),
    st.sampled_from(["chunk", "document"]),
    st.randoms(),
)
def test_the_split_is_disjoint_complete_and_independent_of_order(
    contents, fraction, seed, cut, random
):
    config = DataConfig(validation=fraction, seed=seed, seq_len=4, cut=cut)
    split = split_documents(named(contents), config)
    train = [document.content for document in split.train]
    held = [document.content for document in split.validation]
    assert sorted(train + held) == sorted(contents)
    assert not set(train) & set(held)

    shuffled = list(contents)
    random.shuffle(shuffled)
    again = split_documents(named(shuffled), config)
    assert [document.content for document in again.train] == train
    assert [document.content for document in again.validation] == held
    assert again.digests == split.digests


def test_the_split_holds_out_about_the_fraction_and_differs_by_seed():
    documents = named([b"document %d" % number for number in range(4000)])
    held = [
        split_documents(documents, DataConfig(validation=0.1, seed=seed)).validation
        for seed in (0, 1)
    ]
    assert all(330 < len(side) < 470 for side in held)
    assert {document.name for document in held[0]} != {document.name for document in held[1]}


def test_few_documents_still_give_a_validation_sequence():
    documents = named([bytes([number]) * 3 for number in range(20)])
    split = split_documents(documents, DataConfig(validation=0.001, seq_len=10))
    assert len(split.validation) == 3


def test_another_validation_source_is_excluded_from_training():
    split = split_from(named([b"one", b"two", b"three"]), named([b"two", b"four"]), DataConfig())
    assert {document.content for document in split.train} == {b"one", b"three"}
    assert {document.content for document in split.validation} == {b"two", b"four"}


@given(st.integers(2, 9), st.data(), st.floats(0.01, 0.99), st.sampled_from([b"ab\n", b"a"]))
def test_the_tail_of_a_single_document_is_held_out(seq_len, data, fraction, letters):
    size = data.draw(st.integers(2 * seq_len + 1, 900))
    content = bytes(data.draw(st.lists(st.sampled_from(letters), min_size=size, max_size=size)))
    gold = bytes(at % 2 for at in range(size))
    config = DataConfig(validation=fraction, seq_len=seq_len)
    split = split_documents([Document("book", content, gold)], config)
    for part in split.validation:
        begin = int(part.name.split()[2])
        assert content[begin : begin + len(part.content)] == part.content
        assert part.gold == gold[begin : begin + len(part.content)]
    joined = b"\n".join(bytes(part.content) for part in [*split.train, *split.validation])
    assert joined.replace(b"\n", b"") == content.replace(b"\n", b"")
    assert len(b"\n".join(bytes(part.content) for part in split.validation)) >= seq_len
    assert [part.name for part in split.train] == ["book"]


def test_near_duplicates_stay_on_one_side_and_the_rest_of_the_split_is_as_it_was():
    generator = np.random.default_rng(0)
    own = [generator.integers(97, 123, 900, dtype=np.uint8).tobytes() for _ in range(60)]
    copies = [own[0][:at] + b"another line" + own[0][at:] for at in range(0, 900, 90)]
    documents = named([*own, *copies])
    for seed in range(8):
        config = DataConfig(validation=0.3, seed=seed, seq_len=64)
        split = split_documents(documents, config)
        apart = split_documents(documents, replace(config, group_duplicates=False))
        held, held_apart = ({d.name for d in side.validation} for side in (split, apart))
        family = {"d0"} | {f"d{number}" for number in range(60, 70)}
        assert held & family in (set(), family)
        assert held - family == held_apart - family
        assert split.overlap == 0
        assert apart.overlap > 0 or held_apart & family in (set(), family)
        others = split_from(documents[1:], documents[:1], config)
        assert not {d.name for d in others.train} & family


def test_documents_of_one_repetitive_text_are_split_one_by_one():
    documents = named(
        [b"the same few words again and again " * 20 + bytes([97 + n]) for n in range(20)]
    )
    split = split_documents(documents, DataConfig(validation=0.3, seq_len=64))
    assert split.train
    assert split.validation
    assert split.overlap > 0.9


@given(st.lists(st.binary(max_size=80), max_size=6), st.integers(1, 70))
def test_windows_are_sampled_as_if_one_by_one(contents, block):
    with patch.object(split, "BLOCK", block):
        windows = split.WindowSample.of(named(contents))
    places = [
        (d, content[at : at + 32])
        for d, content in enumerate(contents)
        for at in range(len(content) - 31)
    ]
    expected = sorted((int(split._window_hashes(window)[0]), d) for d, window in places)
    assert list(zip(windows.hash_S.tolist(), windows.document_S.tolist(), strict=True)) == expected


def test_an_epoch_takes_every_piece_once_and_the_next_reshuffles():
    stream = make_stream(50)
    first = numbers(stream.next(50))
    second = numbers(stream.next(50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert numbers(make_stream(50, seed=1).next(50)) != first


@given(
    st.integers(1, 12),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=6),
)
def test_skipping_is_taking_and_throwing_away(pieces, steps):
    whole = make_stream(pieces)
    skipping = make_stream(pieces)
    for taken, count in steps:
        expected = numbers(whole.next(count))
        if taken:
            assert numbers(skipping.next(count)) == expected
        else:
            skipping.skip(count)
        assert skipping.state_dict() == whole.state_dict()
    skipping.skip(0)
    assert skipping.state_dict() == whole.state_dict()


@given(st.integers(1, 12), st.lists(st.integers(1, 9), max_size=4), st.integers(1, 30))
def test_resuming_anywhere_equals_never_having_stopped(pieces, counts, more):
    stream = make_stream(pieces, seed=3)
    for count in counts:
        stream.next(count)
    saved = json.loads(json.dumps(stream.state_dict()))
    resumed = make_stream(pieces, seed=0)
    resumed.next(2)
    resumed.load_state_dict(saved)
    assert numbers(resumed.next(more)) == numbers(stream.next(more))


def test_a_state_of_another_corpus_is_refused():
    stream = make_stream(3)
    with pytest.raises(ValueError, match="corpus other, expected f: resume with"):
        stream.load_state_dict({**stream.state_dict(), "fingerprint": "other"})


def test_taking_nothing_is_refused():
    with pytest.raises(ValueError, match="count is 0; expected at least 1"):
        make_stream(3).next(0)


@given(st.integers(1, 3000), st.integers(1, 100))
def test_the_spread_order_is_even_wherever_it_is_stopped(count, stop):
    order = low_discrepancy_order(count)
    assert sorted(order.tolist()) == list(range(count))
    first = np.sort(order[:stop])
    assert np.diff(first, prepend=-1, append=count).max() <= 4 * max(count / len(first), 1)
