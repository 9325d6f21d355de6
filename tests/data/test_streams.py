"""A streamed data set in streams: each is read by whoever has it, together they are what one reads, at any number."""

import itertools
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.packaged_modules.parquet.parquet import Parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.config.hardware import BatchAssignment
from tokenv.core.errors import UserError
from tokenv.data import rows
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.hub import partition_shards, validation_shards
from tokenv.data.stream import Streams
from tokenv.training.data_parallel import RankStream

ROWS = 60  # of a shard
READ = []  # shards and rows, in the order in which they were read


def generate(shards, same):
    for shard in shards:
        for row in range(ROWS):
            READ.append((shard, row))
            text = f"shard {shard}, row {row:03}; " * (row % 3 + 1)
            yield {"text": "said once and again" if same and row == 3 else text}


def corpus_of(shards, *, same=False, **changes):
    """Return a corpus of so many shards; the hub is replaced while it is opened."""
    kwargs = {"shards": list(range(shards)), "same": same}
    opened = datasets.IterableDataset.from_generator(generate, gen_kwargs=kwargs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "open_hub", lambda *_, **__: opened)
        READ.clear()
        chosen = {
            "source": "hub:owner/name",
            "seq_len": 16,
            "validation": 0.1,
            "shuffle_buffer": 40,
        }
        return load_corpus(DataConfig(**(chosen | changes)))


@pytest.fixture(scope="module")
def corpora():
    return {shards: corpus_of(shards) for shards in (1, 5, 25, 64)}


class AllRanks:
    """All ranks of a run, one after the other, in one process."""

    def __init__(
        self,
        corpus,
        accumulate,
        batch_size,
        world,
        *,
        most=16,
        split_each_pass=False,
        state=None,
        seed=1,
    ):
        self.assignments = [
            BatchAssignment(accumulate, batch_size, rank, world, split_each_pass)
            for rank in range(world)
        ]
        self.count = BatchAssignment(
            accumulate, batch_size, split_each_pass=split_each_pass
        ).streams(most)
        streams = [corpus.streams(self.count, seed=seed) for _ in self.assignments]
        if state is not None:
            for each in streams:
                each.load_state_dict(json.loads(json.dumps(state)))
        self.sources = [
            RankStream(each, assignment)
            for each, assignment in zip(streams, self.assignments, strict=True)
        ]

    def update(self):
        """By pass and row: the text of an update's sequences, their origin and document."""
        sequences = {}
        for source, assignment in zip(self.sources, self.assignments, strict=True):
            for number in assignment.passes:
                batch = source.next(len(assignment.rows))
                for place, row in enumerate(assignment.rows):
                    assert (number, row) not in sequences
                    sequences[number, row] = (
                        bytes(batch.symbol_BN[place].tolist()),
                        batch.origin[place],
                        int(batch.document_B[place]),
                    )
        return dict(sorted(sequences.items()))

    def state(self):
        return Streams.merge_states([source.state_dict() for source in self.sources])


def fits(accumulate, batch_size, world, split_each_pass):
    return batch_size % world == 0 if split_each_pass else accumulate * batch_size % world == 0


@settings(max_examples=60)
@given(
    shards=st.sampled_from([1, 5, 25, 64]),
    accumulate=st.integers(1, 4),
    batch_size=st.sampled_from([1, 2, 3, 4, 8]),
    split_each_pass=st.booleans(),
    most=st.sampled_from([1, 2, 4, 16]),
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=3, max_size=5),
)
def test_ranks_read_the_same_data_as_one_and_resume_at_any_number(
    corpora, shards, accumulate, batch_size, split_each_pass, most, worlds
):
    shape = {"most": most, "split_each_pass": split_each_pass}
    one = AllRanks(corpora[shards], accumulate, batch_size, 1, **shape)
    state = None
    for world in worlds:
        if fits(accumulate, batch_size, world, split_each_pass):
            several = AllRanks(corpora[shards], accumulate, batch_size, world, state=state, **shape)
            for _ in range(2):
                assert several.update() == one.update()
            state = several.state()
            assert state == one.state()


@pytest.mark.parametrize("split_each_pass", [False, True])
@pytest.mark.parametrize(("accumulate", "batch_size"), [(2, 8), (1, 8), (8, 8), (6, 4)])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_rank_opens_nothing_but_its_own_shards(accumulate, batch_size, world, split_each_pass):
    corpus = corpus_of(64)
    held = validation_shards(64, 0.1, 0)
    assert {shard for shard, _ in READ} <= set(held)
    several = AllRanks(
        corpus, accumulate, batch_size, world, most=8, split_each_pass=split_each_pass
    )
    assert several.count % world == 0
    opened = []
    for source, assignment in zip(several.sources, several.assignments, strict=True):
        READ.clear()
        for _ in range(40):
            for _ in assignment.passes:
                source.next(len(assignment.rows))
        opened.append({shard for shard, _ in READ})
    assert all(not one & other for one, other in itertools.combinations(opened, 2))
    assert len(held) == 6
    assert not set(held) & set().union(*opened)


def test_streams_together_read_every_row_once_an_epoch():
    for shards in (1, 3, 8, 23):
        for streams in (1, 2, 3, 8):
            parts = partition_shards(range(shards), streams)
            taken = [
                (s, row)
                for part in parts
                for s in part.shards
                for row in range(50)
                if part.has(s, row)
            ]
            assert sorted(taken) == [(shard, row) for shard in range(shards) for row in range(50)]
            counts = [
                sum(part.has(s, row) for s in part.shards for row in range(50)) for part in parts
            ]
            assert max(counts) - min(counts) <= (50 if shards >= streams else shards)


@given(st.integers(1, 500), st.floats(0.001, 0.999), st.integers(0, 9))
def test_the_requested_number_of_shards_is_held_out_evenly(count, fraction, seed):
    held = validation_shards(count, fraction, seed)
    assert held == sorted(set(held))
    assert all(0 <= shard < count for shard in held)
    if count < 20:
        assert not held
        return
    assert 1 <= len(held) < count
    assert abs(len(held) - fraction * count) <= 1
    gaps = {after - before for before, after in itertools.pairwise(held)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("shards", [1, 5, 25, 64])
@pytest.mark.parametrize("cut", ["chunk", "document"])
def test_validation_documents_are_never_trained_on(shards, cut):
    corpus = corpus_of(shards, cut=cut, same=True)
    held = set(corpus.validation(10**6).document_B.tolist())
    one = AllRanks(corpus, 1, 16, 1, most=4)
    sequences = [each for _ in range(4 * shards * ROWS // 16 + 4) for each in one.update().values()]
    trained = {document for _, _, document in sequences}
    assert held
    assert not held & trained
    assert cut == "document" or len(held | trained) > 0.5 * shards * ROWS
    repeated = b"said once and again"[:16]
    validated = {bytes(row) for row in corpus.validation().symbol_BN.tolist()}
    # what is said in every shard is held out wherever it is said
    if cut == "document" and repeated in validated:
        assert not any(text == repeated for text, _, _ in sequences)
    assert cut == "chunk" or shards < 20 or repeated in validated


@pytest.mark.parametrize(("shards", "most"), [(64, 1 + 64), (1, 4 * 20 * 8)])
def test_validation_reads_little_more_than_it_needs(shards, most):
    """Of 3,000 rows a shard, for 8 sequences: of few shards about twenty rows to one."""
    global ROWS
    before = ROWS
    ROWS = 3000
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tokenv.data.hub.DEFAULT_VALIDATION_SEQUENCES", 8)
            corpus_of(shards, cut="document", validation=0.01)
    finally:
        ROWS = before
    assert 8 < len(READ) <= most


def test_validation_knows_nothing_of_streams_and_batches():
    one, other = (corpus_of(64, streams=streams) for streams in (1, 16))
    assert one.fingerprint == other.fingerprint
    assert one.validation(300).origin == other.validation(300).origin
    # more than a shard has
    first = [origin.split(" row ")[0] for origin in one.validation(300).origin]
    assert len(set(first)) > 1
    assert corpus_of(64, seed=1).validation(300).origin != one.validation(300).origin


def test_a_state_of_other_streams_is_refused_in_one_message():
    corpus = corpus_of(64)
    state = AllRanks(corpus, 1, 8, 1, most=8).state()
    with pytest.raises(
        UserError, match=r"has 8 for the number of streams, expected 4: .*data\.streams"
    ):
        AllRanks(corpus, 1, 8, 1, most=4, state=state)
    earlier = {
        "fingerprint": corpus.fingerprint,
        "position": 3,
        "blocks": {"seed": 1, "row": 25, "source": {}},
    }
    with pytest.raises(
        UserError,
        match=r"has 1 for the number of streams, expected 8: resume with the data.streams",
    ):
        AllRanks(corpus, 1, 8, 1, most=8, state=earlier)
    changed = {"streams": [place | {"fingerprint": "of others"} for place in state["streams"]]}
    with pytest.raises(UserError, match="of corpus of others"):
        AllRanks(corpus, 1, 8, 1, most=8, state=changed)


def test_a_stream_with_nothing_to_train_on_says_so():
    corpus = corpus_of(25, cut="document", seq_len=40)
    one = corpus.streams(20)
    assert len(one.streams[0].next(3)) == 3
    corpus = corpus_of(3, seq_len=16, validation=1 - 1e-9)
    with pytest.raises(
        UserError,
        match=r"stream 2 of 4 of it has no sequence .* or data\.streams, or set data\.cut",
    ):
        corpus.streams(4).streams[2].next(1)


def test_data_in_memory_is_a_single_stream():
    corpus = load_corpus(
        DataConfig(source="words", seq_len=32, words_documents=40, lexicon_size=10)
    )
    streams = corpus.streams(8, seed=3)
    assert len(streams.streams) == 1
    plain = corpus.train(seed=3)
    assert streams.streams[0].next(5).origin == plain.next(5).origin
    assert streams.state_dict(frozenset({0})) == plain.state_dict()


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Return a folder of Parquet files, and the list of those which are opened."""
    for part in range(4):
        texts = [f"file {part} number {number} with text" for number in range(80)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{part}.parquet", row_group_size=8)
    opened = []
    real = Parquet._generate_tables

    def counted(self, files, row_groups_list):
        opened.extend(
            (file.rpartition("/")[2], groups)
            for file, groups in zip(files, row_groups_list, strict=True)
        )
        return real(self, files, row_groups_list)

    monkeypatch.setattr(Parquet, "_generate_tables", counted)
    return tmp_path, opened


def test_local_files_stream_by_row_groups(tables):
    folder, opened = tables
    corpus = load_corpus(
        DataConfig(
            source=f"hub:{folder}", cut="document", seq_len=16, validation=0.1, shuffle_buffer=40
        )
    )
    held = set(corpus.validation(10**6).document_B.tolist())
    assert len(held) == 4 * 8  # of 40 row groups, four
    one = AllRanks(corpus, 1, 8, 1)
    two = AllRanks(corpus, 1, 8, 2)
    for _ in range(3):
        assert one.update() == two.update()
    trained = set()
    groups = []
    for source in AllRanks(corpus, 1, 8, 2).sources:
        opened.clear()
        for _ in range(60):
            trained |= set(source.next(4).document_B.tolist())
        groups.append(set(opened))
    assert not groups[0] & groups[1]
    assert not held & trained
    assert len(held | trained) == 4 * 80
    state = one.state()
    again = AllRanks(corpus, 1, 8, 4, state=state)
    assert again.update() == one.update()


def test_many_files_are_not_split_into_row_groups(tmp_path, monkeypatch):
    pq.write_table(
        pa.table({"text": ["some text that is long enough"] * 4}), tmp_path / "0.parquet"
    )
    source = f"hub:{tmp_path}"
    monkeypatch.setattr("tokenv.data.hub.MIN_FILES", 1)
    monkeypatch.setattr(datasets.IterableDataset, "reshard", lambda _: pytest.fail("taken apart"))
    # the four are alike, and here none is held out
    with pytest.raises(UserError, match="no sequence"):
        load_corpus(DataConfig(source=source, seq_len=16))
