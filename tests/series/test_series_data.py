"""Series are read, split by time, framed by their own past, and refused with one clear word."""

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from tokenv.core.errors import UserError
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.series import synthetic
from tokenv.series.config import SYNTHETIC_SERIES, SeriesConfig
from tokenv.series.kind import SeriesKind
from tokenv.series.synthetic import synthetic_series
from tokenv.series.windows import load_series, moments, normalise_window, split_borders

ROWS = 200


def make_config(source, *, seq_len=16, validation=0.2, **series):
    return DataConfig(
        kind="series",
        source=str(source),
        seq_len=seq_len,
        validation=validation,
        options=SeriesKind(**{"context": 4} | series),
    )


def table(rows=ROWS, seed=0):
    generator = np.random.default_rng(seed)
    return {
        "date": [f"2016-07-{1 + i // 24:02d} {i % 24:02d}:00:00" for i in range(rows)],
        "a": generator.normal(size=rows).tolist(),
        "b": (100 + 5 * generator.normal(size=rows)).tolist(),
    }


def write_csv(path, columns):
    rows = zip(*columns.values(), strict=True)
    path.write_text(
        "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n"
    )
    return path


@pytest.fixture
def csv_file(tmp_path):
    return write_csv(tmp_path / "mine.csv", table())


def first_rows(batch, channel=0):
    return batch.symbol_BN[:, :, channel, 0].numpy()


# --- frames ---


def test_symbols_hold_the_last_value_that_is_not_missing():
    value = np.array([np.nan, 2.0, np.nan, np.nan, 5.0, 6.0])[None, :, None]
    symbol = normalise_window(
        value, 2, mean_BC=np.array([[9.0]]), std_BC=np.ones((1, 1)), floor=0.1
    )
    # the location, 2, where there is none before
    assert symbol[0, :, 0, 4].tolist() == [2.0, 2.0, 2.0, 2.0, 2.0, 5.0]
    assert symbol[0, :, 0, 1].tolist() == [2.0] * 6


# --- reading ---


def test_every_column_is_a_series_of_its_own(csv_file):
    data = load_series(make_config(csv_file))
    assert [series.name for series in data.series] == ["mine.csv a", "mine.csv b"]
    assert_array_equal(data.series[1].value_LC[:, 0], table()["b"])
    batch = load_corpus(make_config(csv_file)).train().next(3)
    assert batch.symbol_BN.shape == (3, 16, 1, 5)
    assert batch.gold_BN is None


def test_columns_can_be_chosen_and_joined(csv_file):
    assert [s.name for s in load_series(make_config(csv_file, columns="b")).series] == [
        "mine.csv b"
    ]
    (series,) = load_series(make_config(csv_file, columns=["b", "a"], joint=True)).series
    assert_array_equal(series.value_LC, np.array([table()["b"], table()["a"]]).T)
    assert load_corpus(make_config(csv_file, columns=["b", "a"], joint=True)).train().next(
        3
    ).symbol_BN.shape == (
        3,
        16,
        2,
        5,
    )


def test_parquet_and_csv_hold_the_same(csv_file, tmp_path):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table(table()), path)
    for one, other in zip(
        *(load_series(make_config(p)).series for p in (csv_file, path)), strict=True
    ):
        assert_array_equal(one.value_LC, other.value_LC)
        assert one.borders == other.borders


def test_rows_that_hold_lists_are_series(tmp_path, monkeypatch):
    columns = {
        "id": ["x", "y"],
        "target": [
            [float(i) for i in range(100)],
            [float(-i) if i % 7 else None for i in range(80)],
        ],
    }
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table(columns), path)
    data = load_series(make_config(path, columns="target"))
    lengths = {series.name: len(series.value_LC) for series in data.series}
    assert lengths == {"many.parquet row 0 target": 100, "many.parquet row 1 target": 80}
    assert np.isnan(data.series[1].value_LC[7, 0])

    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return datasets.Dataset.from_dict(columns).to_iterable_dataset()

    monkeypatch.setattr("tokenv.data.rows.open_hub", load_dataset)
    hub = load_series(make_config("hub:owner/name", columns="target"))
    assert calls == [(("owner/name", None, "train"), {})]
    assert_array_equal(hub.series[1].value_LC, data.series[1].value_LC)


def test_a_row_without_a_list_is_named(tmp_path):
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({"target": [[1.0] * 90, None]}), path)
    with pytest.raises(UserError, match="row 1, column 'target': None is no list, as row 0 has"):
        load_series(make_config(path, columns="target"))


@pytest.mark.parametrize("written", ["", "NaN", "nan", "NA", " null "])
def test_missing_values_are_nan(tmp_path, written):
    columns = table()
    columns["a"][3] = written
    value_LC = load_series(make_config(write_csv(tmp_path / "x.csv", columns))).series[0].value_LC
    assert np.isnan(value_LC[:, 0]).nonzero()[0].tolist() == [3]


def test_a_signalling_nan_of_a_binary_file_is_a_missing_value(tmp_path):
    value_L = np.arange(90, dtype=np.float64)
    # arithmetic with it warns, and warnings are errors here
    value_L.view(np.uint64)[3] = 0x7FF0000000000001
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"target": pa.array(value_L)}), path)
    value_LC = load_series(make_config(path, columns="target", date=None)).series[0].value_LC
    assert np.isnan(value_LC[:, 0] - 1).nonzero()[0].tolist() == [3]


@pytest.mark.parametrize(
    "layout", ["2016/07/{d:02d} {h:02d}:00", "{d:02d}.07.2016 {h:02d}:00", "{i}"]
)
def test_dates_come_in_several_layouts(tmp_path, layout):
    columns = table() | {"date": [layout.format(d=1 + i // 24, h=i % 24, i=i) for i in range(ROWS)]}
    assert len(load_series(make_config(write_csv(tmp_path / "x.csv", columns))).series) == 2


# --- splits and windows ---


@pytest.mark.parametrize(("name", "per_hour"), [("ETTh1.csv", 1), ("ETTm2.csv", 4)])
def test_etts_splits_are_the_literatures_months(name, per_hour):
    borders = split_borders(f"some/{name}", 80_000, make_config(name))
    assert borders == tuple(per_hour * 24 * 30 * months for months in (12, 16, 20))
    assert split_borders(name, 1000, make_config(name, split="fractions")) == (600, 800, 1000)


def test_training_reads_nothing_of_the_held_out_steps(csv_file):
    config = make_config(csv_file, columns="a")
    data = load_series(config)
    assert data.series[0].borders == (120, 160, 200)
    held = set(range(120, 200))
    values = {value: i for i, value in enumerate(data.series[0].value_LC[:, 0].tolist())}
    stream = load_corpus(config).train()
    trained = {values[x] for x in first_rows(stream.next(300)).flatten().tolist()}
    assert not trained & held
    assert trained == set(range(120))


def test_every_held_out_step_counts_once(csv_file):
    """But for a last few; contexts reach back over the border."""
    data = load_series(make_config(csv_file, columns="a"))
    order = {value: i for i, value in enumerate(data.series[0].value_LC[:, 0].tolist())}
    for batch, begin, end in ((data.validation(None), 120, 160), (data.test(), 160, 200)):
        symbol = batch.symbol_BN[:, :, 0]
        loss_mask = sorted(order[x] for x in symbol[..., 0][symbol[..., 3] > 0].tolist())
        assert loss_mask == list(range(begin, begin + len(batch) * 12))
        assert end - loss_mask[-1] <= 12
        assert min(order[x] for x in symbol[..., 0].flatten().tolist()) == begin - 4


def test_an_epoch_takes_every_window_once_in_an_order_of_its_own(csv_file):
    corpus = load_corpus(make_config(csv_file, stride=5))
    windows = 2 * len(range(0, 120 - 16 + 1, 5))
    stream = corpus.train(seed=3)
    first, second = (stream.next(windows).origin for _ in range(2))
    assert len(set(first)) == windows
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != corpus.train(seed=4).next(windows).origin


def test_streams_resume_and_skip(csv_file):
    corpus = load_corpus(make_config(csv_file))
    stream = corpus.train(seed=1)
    stream.next(250)
    state = stream.state_dict()
    again = load_corpus(make_config(csv_file)).train(seed=9)
    again.load_state_dict(state)
    expected = stream.next(6)
    assert again.next(6).origin == expected.origin
    again.load_state_dict(state)
    again.skip(2)
    assert again.next(4).origin == expected.origin[2:]
    with pytest.raises(ValueError, match="the saved state is of corpus"):
        load_corpus(make_config(csv_file, context=5)).train().load_state_dict(state)


def test_columns_of_one_time_are_one_cluster(csv_file):
    batch = load_corpus(make_config(csv_file)).validation()
    starts = [int(origin.split("@")[1]) for origin in batch.origin]
    assert batch.document_B.tolist() == starts
    synthetic = load_corpus(make_config("bursts", count=3, length=400)).validation()
    assert set(synthetic.document_B.tolist()) == {0, 1, 2}


def test_standardised_as_the_literature_does(csv_file):
    for series in load_series(make_config(csv_file)).series:
        train = series.standardise(series.value_LC)[: series.borders.train]
        assert_allclose([train.mean(), train.std()], [0, 1], atol=1e-12)


# --- frames ---


@settings(max_examples=50)
@given(
    st.lists(st.one_of(st.none(), st.floats(-50, 50)), min_size=6, max_size=6),
    st.integers(1, 5),
    st.sampled_from([0.25, 2.0, 1024.0]),
    st.integers(-1000, 1000),
)
def test_frames_are_the_contexts_and_move_with_the_data(values, context, factor, shift):
    value_BNC = np.array([np.nan if v is None else v for v in values]).reshape(1, 6, 1)
    usual = {"mean_BC": np.array([[0.5]]), "std_BC": np.array([[3.0]])}
    symbol = normalise_window(value_BNC, context, **usual, floor=0.1)
    moved_usual = {"mean_BC": factor * usual["mean_BC"] + shift, "std_BC": factor * usual["std_BC"]}
    moved = normalise_window(factor * value_BNC + shift, context, **moved_usual, floor=0.1)
    present = value_BNC[0, :context, 0][~np.isnan(value_BNC[0, :context, 0])]
    location, scale = (present.mean(), max(present.std(), 0.3)) if len(present) else (0.5, 3.0)
    assert_allclose(symbol[0, :, 0, 1], location, rtol=1e-9, atol=1e-9)
    assert_allclose(symbol[0, :, 0, 2], scale, rtol=1e-9)
    assert symbol[0, :, 0, 3].tolist() == [0] * context + [1] * (6 - context)
    assert_allclose(moved[..., 2], factor * symbol[..., 2], rtol=1e-6)
    assert_allclose(moved[..., 1], factor * symbol[..., 1] + shift, rtol=1e-9, atol=1e-6)


def test_moments_leave_missing_values_out():
    mean, std = moments(np.array([[1.0, np.nan], [np.nan, np.nan], [3.0, np.nan]]))
    assert_array_equal(mean, [2, np.nan])
    assert_array_equal(std, [1, np.nan])


# --- synthetic series ---


@pytest.mark.parametrize("source", SYNTHETIC_SERIES)
def test_synthetic_series_change_where_they_say(source):
    config = make_config(source, count=20, length=600, dwell=20)
    data = load_series(config)
    gold_SL = np.stack([series.gold_L for series in data.series])
    assert gold_SL.mean() == pytest.approx(1 / 20, rel=0.2)
    gaps = np.concatenate([np.diff(gold_L.nonzero()[0]) for gold_L in gold_SL])
    assert gaps.min() >= 2
    again = load_series(config)
    assert again.fingerprint == data.fingerprint
    assert_array_equal(again.series[3].value_LC, data.series[3].value_LC)
    other = DataConfig(
        kind="series", source=source, seq_len=16, validation=0.2, seed=1, options=config.options
    )
    assert load_series(other).fingerprint != data.fingerprint
    batch = load_corpus(config).validation(5)
    assert batch.gold_BN.shape == (5, 16)


def test_levels_change_only_at_change_points():
    data = load_series(make_config("regimes", count=30, length=600))
    jump = [np.abs(np.diff(series.value_LC[:, 0])) for series in data.series]
    at = np.concatenate(
        [j[series.gold_L[:-1]] for j, series in zip(jump, data.series, strict=True)]
    )
    elsewhere = np.concatenate(
        [j[~series.gold_L[:-1]] for j, series in zip(jump, data.series, strict=True)]
    )
    assert np.median(at) > 5 * np.median(elsewhere)


def test_echoes_are_pulses_their_answers_decoys_and_noise(monkeypatch):
    """Without the noise: once the answers to all earlier pulses are taken away, what is left is pulses and decoys."""
    noisy_SL, _ = synthetic_series("echoes", 20, 800, 24, seed=0)
    monkeypatch.setattr(synthetic, "ECHO_NOISE", 0.0)
    value_SL, gold_SL = synthetic_series("echoes", 20, 800, 24, seed=0)
    assert (noisy_SL - value_SL).std() == pytest.approx(0.1, rel=0.05)
    rest_SL = value_SL.copy()
    bump = np.sin(np.pi * np.arange(1, 25) / 25) ** 2 / 2
    for step in range(800 - 24):
        pulse_S1 = np.where(gold_SL[:, step : step + 1], rest_SL[:, step : step + 1], 0.0)
        rest_SL[:, step + 24 : step + 48] -= pulse_S1 * bump[: 800 - 24 - step]
    decoys = 0
    for rest_L, gold_L in zip(rest_SL, gold_SL, strict=True):
        pulses = gold_L.nonzero()[0]
        assert_allclose(rest_L[pulses], rest_L[pulses - 1], atol=1e-9)
        assert ((np.abs(rest_L[pulses]) > 1.0) & (np.abs(rest_L[pulses]) < 2.0)).all()
        rest_L[pulses] = rest_L[pulses - 1] = 0.0
        (steps,) = (np.abs(rest_L) > 1e-9).nonzero()
        begins, ends = steps[: len(steps) // 2 * 2].reshape(-1, 2).T  # the last one may be cut off
        assert (ends == begins + 1).all()
        assert_allclose(rest_L[begins], -rest_L[ends], atol=1e-9)
        decoys += len(ends)
    assert 1 < decoys / gold_SL.sum() < 2


# --- bad input ---


def test_a_constant_series_is_taken_as_it_is(tmp_path):
    """Its scale is one, and the codec's floor bounds its likelihood."""
    path = write_csv(tmp_path / "x.csv", table() | {"a": [0.1] * ROWS})
    batch = load_corpus(make_config(path, columns="a")).train().next(2)
    assert_allclose(batch.symbol_BN[..., 1].numpy(), 0.1)
    assert_allclose(batch.symbol_BN[..., 2].numpy(), 0.1)  # the floor of 0.1 times one
    assert batch.symbol_BN.isfinite().all()


def test_windows_without_a_value_that_counts_are_left_out(tmp_path):
    columns = table()
    columns["a"][30:70] = [""] * 40
    batch = (
        load_corpus(make_config(write_csv(tmp_path / "x.csv", columns), columns="a"))
        .train()
        .next(200)
    )
    assert (~np.isnan(first_rows(batch)[:, 4:])).any(1).all()
    # a context alone may miss: the whole training range frames
    assert np.isnan(first_rows(batch)[:, :4]).all(1).any()
    assert not batch.symbol_BN[..., 1:].isnan().any()


def changed(**columns):
    return lambda: table() | columns


def at(column, row, value):
    return lambda: (
        table() | {column: [value if i == row else x for i, x in enumerate(table()[column])]}
    )


@pytest.mark.parametrize(
    ("columns", "series", "message"),
    [
        (changed(a=[""] * ROWS), {}, r"column 'a' of x.csv holds no value"),
        (lambda: table(1), {}, r"no training window: its longest series, 'x.csv a', has 1 steps"),
        (lambda: table(0), {}, r"no training window: .* has 0 steps"),
        (lambda: table(30), {}, r"no validation window: .*lower data.seq_len, or"),
        (
            at("date", 7, "2016-07-01 02:00:00"),
            {},
            r"x.csv line 9: the date .* is earlier than .* sort the rows by",
        ),
        (
            at("date", 7, "2016-07-01 06:00:00"),
            {},
            r"x.csv line 9: the date 2016-07-01 06:00:00 is that of the row",
        ),
        (
            changed(date=[f"2016-07-{1 + i // 20:02d} {i % 20:02d}:00:00" for i in range(ROWS)]),
            {},
            r"x.csv line 22: the date 2016-07-02 00:00:00 is 5:00:00 after that of the row before; expected 1:00:00",
        ),
        (at("date", 7, "soon"), {}, r"x.csv line 9, column 'date': 'soon' is no date"),
        (at("date", 7, "12"), {}, r"x.csv line 9: the date 12 is of another kind"),
        (at("b", 5, "high"), {}, r"x.csv line 7, column 'b': 'high' is no number"),
        (at("b", 5, "inf"), {}, r"x.csv line 7, column 'b': 'inf' is not finite"),
        (at("b", 5, "1,2"), {}, r"x.csv line 7 has 4 cells; expected 3 as in the header"),
        (
            table,
            {"columns": ["a", "OTT"]},
            r"has no column 'OTT', which data.options.columns names: it has date, a, b",
        ),
        (
            table,
            {"date": "time"},
            r"has no date column 'time' but date, a, b: set data.options.date",
        ),
        (lambda: {"date": table()["date"]}, {}, "has no value column"),
        (
            table,
            {"date": None},
            r"column 'date': '2016-07-01 00:00:00' is no number; .*name the value columns",
        ),
        (
            table,
            {"test": 0.8},
            "data.validation is 0.2 and data.options.test 0.8; expected less than 1",
        ),
    ],
)
def test_bad_files_are_named(tmp_path, columns, series, message):
    path = write_csv(tmp_path / "x.csv", columns())
    with pytest.raises(ValueError, match=message):
        load_corpus(make_config(path, **series))


def test_unsorted_rows_can_be_taken_as_they_come(tmp_path):
    path = write_csv(tmp_path / "x.csv", at("date", 7, "2016-07-01 02:00:00")())
    assert len(load_series(make_config(path, date=None, columns="a,b")).series) == 2


def test_missing_and_broken_files_are_named(tmp_path):
    for name in ("none.csv", "none.parquet"):
        with pytest.raises(FileNotFoundError, match=f"{name}' does not exist"):
            load_corpus(make_config(tmp_path / name))
    for name in ("x.csv", "x.parquet"):
        (tmp_path / name).write_bytes(b"\xff\x00,")
        with pytest.raises(ValueError, match=f"{name} cannot be read as"):
            load_corpus(make_config(tmp_path / name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"source": "regimes"},
            r"data.source is 'regimes', a series, .*set data.kind=series and codec.name=series",
        ),
        ({"source": "x.csv"}, r"data.source is 'x.csv', a series"),
        (
            {"kind": "series"},
            r"data.source is 'python'; expected of a series one of regimes, bursts, chirps",
        ),
        ({"kind": "serie"}, r"data.kind = 'serie' is unknown: did you mean 'series'"),
        (
            {"kind": "series", "source": "chirps", "seq_len": 32},
            r"data.options.context is 32; expected less than",
        ),
        (
            {"kind": "series", "source": "chirps", "validation_source": "x.csv"},
            r"data.validation_source is 'x.csv'",
        ),
    ],
)
def test_incompatible_options_are_rejected(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "data.options.context = 0"),
        ({"stride": 1.5}, "data.options.stride = 1.5"),
        ({"floor": 0.0}, "data.options.floor = 0.0"),
        ({"test": 1.0}, "data.options.test = 1.0"),
        ({"split": "random"}, "data.options.split = 'random': expected auto or fractions"),
        ({"columns": [3]}, r"data.options.columns is \[3\]; expected names"),
        ({"columns": "a,a"}, "expected every name once"),
        ({"joint": True}, "data.options.joint is true and data.options.columns names none"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SeriesConfig(**options)
