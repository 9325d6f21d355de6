"""Forecasts of data frames: continued dates, series of any length, and error messages."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import series_settings
from utilsforecast.evaluation import evaluate
from utilsforecast.losses import coverage, mse

import tokenv
from tokenv.config.files import resolve
from tokenv.core.errors import UserError
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(resolve([], series_settings(horizon=6)), folder / "checkpoints", lambda *_: None)
    return tokenv.load(folder)


def long(**lengths):
    generator = np.random.default_rng(0)
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "unique_id": name,
                    "ds": pd.date_range("2024-01-30", periods=length, freq="D"),
                    "y": generator.normal(size=length).cumsum(),
                }
            )
            for name, length in lengths.items()
        ],
        ignore_index=True,
    )


def test_many_series_of_different_length_are_continued(model):
    frame = long(b=60, a=20, c=45)
    forecasts = model.forecast(frame, h=5, level=90, quantiles=[0.5])
    assert list(forecasts.columns) == [
        "unique_id",
        "ds",
        "tokenv",
        "tokenv-lo-90",
        "tokenv-q-50",
        "tokenv-hi-90",
    ]
    assert forecasts["unique_id"].tolist() == [name for name in "bac" for _ in range(5)]
    assert forecasts["ds"].tolist() == [
        day
        for length in (60, 20, 45)
        for day in pd.date_range("2024-01-30", periods=length + 5, freq="D")[length:]
    ]
    assert (forecasts["tokenv-lo-90"] < forecasts["tokenv-q-50"]).all()
    assert (forecasts["tokenv-q-50"] < forecasts["tokenv-hi-90"]).all()
    alone = model.forecast(frame[frame["unique_id"] == "a"], h=5, quantiles=[0.5])
    assert alone.shape == (5, 4)
    pd.testing.assert_frame_equal(forecasts, model.forecast(frame, h=5, level=90, quantiles=[0.5]))


def test_wide_frames_and_those_without_dates(model):
    wide = long(b=60, a=60).pivot(index="ds", columns="unique_id", values="y")
    forecasts = model.forecast(wide, h=4, level=[80], samples=8, direct=False)
    assert forecasts["unique_id"].tolist() == ["a"] * 4 + ["b"] * 4
    assert forecasts["ds"].iloc[0] == wide.index[-1] + pd.Timedelta(days=1)
    assert np.isfinite(forecasts[["tokenv", "tokenv-lo-80", "tokenv-hi-80"]].to_numpy()).all()


@given(
    st.permutations(range(90)),
    st.sampled_from(["int64", "int32", "float64", "object", "category", "str"]),
)
@settings(max_examples=12)
def test_rows_in_any_order_and_names_of_any_type(model, order, kind):
    """A shuffled frame is forecast as the sorted one is; the series come in its order, with names of its type."""
    frame = (
        long(**{"3": 30, "12": 30, "7": 30})
        .astype({"unique_id": "int64"})
        .astype({"unique_id": kind})
    )
    shuffled = frame.iloc[order]
    for method, options in ((model.forecast, {}), (model.cross_validation, {"n_windows": 2})):
        expected = method(frame, 5, samples=4, **options)
        actual = method(shuffled, 5, samples=4, **options)
        assert actual["unique_id"].dtype == expected["unique_id"].dtype == frame["unique_id"].dtype
        assert actual["unique_id"].unique().tolist() == shuffled["unique_id"].unique().tolist()
        by = ["unique_id", *(["cutoff"] if options else []), "ds"]
        a, b = (each.sort_values(by, ignore_index=True)[by] for each in (expected, actual))
        pd.testing.assert_frame_equal(a, b)


def test_names_and_dates_may_be_an_index(model):
    frame = long(b=60, a=20).assign(unique_id=[2] * 60 + [1] * 20)
    expected = model.forecast(frame, 5)
    for index in ("unique_id", "ds", ["unique_id", "ds"]):
        pd.testing.assert_frame_equal(model.forecast(frame.set_index(index), 5), expected)
    wide = (
        long(b=60, a=60).pivot(index="ds", columns="unique_id", values="y").set_axis([1, 2], axis=1)
    )
    expected = model.forecast(wide, 5)
    assert expected["unique_id"].tolist() == [1] * 5 + [2] * 5
    for name in ("date", "ds", "timestamp", "Datetime"):  # as of the Numenta Anomaly Benchmark
        named = wide.rename_axis(name)
        pd.testing.assert_frame_equal(model.forecast(named, 5), expected)
        pd.testing.assert_frame_equal(model.forecast(named.reset_index(), 5), expected)


def test_columns_may_have_other_names(model):
    frame = long(b=70, a=60)
    given = {"id_col": "shop", "time_col": "day", "target_col": "sales"}
    back = {"unique_id": "shop", "ds": "day", "y": "sales"}
    renamed = frame.rename(columns=back)
    for method, options in (
        (model.forecast, {"level": [80]}),
        (model.cross_validation, {"n_windows": 12, "level": 80}),
        (model.simulate, {"n_paths": 3}),
    ):
        expected = method(frame, 4, **options)
        actual = method(renamed, 4, **options, **given)
        pd.testing.assert_frame_equal(actual, expected.rename(columns=back))
        indexed = method(renamed.set_index(["shop", "day"]), 4, **options, **given)
        pd.testing.assert_frame_equal(indexed, actual)
    known = model.cross_validation(renamed, 4, 12, **given)
    intervals = tokenv.conformal_intervals(known, known, **given)
    expected = tokenv.conformal_intervals(
        *[known.rename(columns={name: standard for standard, name in back.items()})] * 2
    )
    pd.testing.assert_frame_equal(intervals, expected.rename(columns=back))


def test_levels_are_quantiles(model):
    forecasts = model.forecast(long(a=60), 4, level=[80, 50], quantiles=[0.1, 0.25, 0.75, 0.9])
    for level, low, high in ((80, 10, 90), (50, 25, 75)):
        assert (forecasts[f"tokenv-lo-{level}"] == forecasts[f"tokenv-q-{low}"]).all()
        assert (forecasts[f"tokenv-hi-{level}"] == forecasts[f"tokenv-q-{high}"]).all()


def test_paths_have_the_mean_and_the_quantiles_of_the_forecast(model):
    frame = long(b=60, a=50).assign(unique_id=[2] * 60 + [1] * 50)
    paths = model.simulate(frame, 8, n_paths=40, seed=3)
    expected = model.forecast(frame, 8, quantiles=[0.3], samples=40, seed=3)
    assert list(paths.columns) == ["unique_id", "ds", "sample_id", "tokenv"]
    assert paths["unique_id"].tolist() == [2] * 320 + [1] * 320
    assert paths["sample_id"].tolist() == [number for number in range(40) for _ in range(8)] * 2
    by_step = paths.groupby(["unique_id", "ds"], sort=False)["tokenv"]
    np.testing.assert_allclose(by_step.mean(), expected["tokenv"])
    quantile = by_step.agg(lambda values: np.quantile(values, 0.3, method="weibull"))
    np.testing.assert_allclose(quantile, expected["tokenv-q-30"])


def test_a_frequency_may_be_given(model):
    """Five days from Monday to Friday go on with Monday only if the frequency says so; a calendar of one's own, too."""
    week = pd.bdate_range("2024-03-04", periods=15)[-5:]
    frame = long(a=5).assign(ds=week)
    assert model.forecast(frame, 4)["ds"].iloc[0] == pd.Timestamp("2024-03-23")
    assert model.forecast(frame, 4, freq="B")["ds"].tolist() == list(
        pd.bdate_range("2024-03-25", periods=4)
    )
    holiday = pd.offsets.CustomBusinessDay(holidays=["2024-03-25"])
    assert model.forecast(frame, 4, freq=holiday)["ds"].iloc[0] == pd.Timestamp("2024-03-26")
    assert model.simulate(frame, 4, freq=holiday)["ds"].iloc[0] == pd.Timestamp("2024-03-26")
    days = frame.assign(ds=week.date)
    assert model.forecast(days, 4, freq="B")["ds"].iloc[0] == pd.Timestamp("2024-03-25")
    numbered = long(a=9).assign(ds=range(0, 18, 2))
    assert model.forecast(numbered, 4, freq=2)["ds"].tolist() == [18, 20, 22, 24]
    whole = long(a=60).assign(ds=pd.bdate_range("2024-03-04", periods=60))
    holidays = whole.drop(index=[7, 31])
    pd.testing.assert_frame_equal(
        model.forecast(holidays, 4, freq="B"), model.forecast(holidays, 4)
    )


def test_mistakes_are_reported(model):
    frame = long(a=40, b=40)
    wide = frame.pivot(index="ds", columns="unique_id", values="y").reset_index()
    gap = frame.drop(index=10)
    twice = pd.concat([frame, frame.iloc[[45]]], ignore_index=True).sort_values(["unique_id", "ds"])
    cases = [
        (
            gap,
            {},
            "series 'a': the date .* is 2 days.* after that of the row before; expected 1 day",
        ),
        (twice, {}, "series 'b': the date .* is that of the row before"),
        (wide.iloc[::-1], {}, "frame row 1: the date .* is earlier than that of the row before"),
        (
            wide.set_index("ds").iloc[[0, 0, *range(1, 40)]],
            {},
            "frame row 1: the date .* is that of the row before",
        ),
        ({"a": [1]}, {}, "df is a dict: expected a pandas.DataFrame"),
        (frame["y"], {}, "df is a Series: expected a pandas.DataFrame"),
        (frame, {"X_df": [1]}, "X_df is a list: expected a pandas.DataFrame"),
        (long(a=40, b=3), {}, "b has 3 rows: expected more than the data.options.context = 4"),
        (frame.assign(y=np.nan), {}, "series 'a' holds no value"),
        (frame.assign(y="x"), {}, "frame row 0, series 'a', column 'y': 'x' is no number"),
        (frame.drop(columns="ds"), {}, "frame has no date column 'date' but unique_id, y"),
        (frame.assign(ds=pd.NaT), {}, "column 'ds': None is no date"),
        (
            frame,
            {"h": 7, "direct": True},
            r"direct head reaches 6 steps: train one with codec\.horizon=7",
        ),
        (frame, {"h": 28}, "horizon = 28: expected 1 to 27"),
        (frame, {"quantiles": [0.9, 1.0]}, "quantiles = "),
        (
            frame,
            {"samples": 0, "direct": False},
            "samples = 0: expected a whole number of at least 2",
        ),
        (frame, {"h": 8, "samples": 1}, "samples = 1: expected a whole number of at least 2"),
        (frame.iloc[:0], {}, "frame has no row"),
        (frame, {"level": 100}, "level = 100: expected coverages in percent"),
        (
            frame,
            {"id_col": "shop"},
            "df has no column 'shop' but unique_id, ds, y: expected .* id_col",
        ),
        (frame, {"freq": "fortnight"}, "freq = 'fortnight': expected a frequency of pandas"),
        (
            frame,
            {"freq": 2},
            "freq = 2 does not follow 2024-01-30 .* a frequency of pandas for dates",
        ),
        (
            frame.assign(ds=range(len(frame))),
            {"freq": "D"},
            "follow 0: it is a number: expected a step",
        ),
        (
            frame.assign(ds=range(len(frame))),
            {"freq": "B"},
            "follow 0: it is a number: expected a step",
        ),
        (frame, {"freq": "h"}, "is not 2024-01-30 01:00:00, one step of freq = 'h' after that of"),
    ]
    for each, options, message in cases:
        with pytest.raises(UserError, match=message):
            model.forecast(each, **{"h": 5} | options)
    with pytest.raises(UserError, match="df is a dict: expected"):
        model.cross_validation({"a": [1]}, 5)
    with pytest.raises(UserError, match="expected a model of text"):
        model.tokens("x")


@pytest.mark.parametrize("direct", [True, False])
def test_a_window_is_forecast_as_a_frame_which_ends_at_its_cutoff(model, direct):
    frame = long(b=70, a=52)
    options = {"quantiles": [0.1, 0.9], "samples": 6, "direct": direct}
    windows = model.cross_validation(frame, 5, **options)
    assert list(windows.columns) == [
        "unique_id",
        "ds",
        "cutoff",
        "y",
        "tokenv",
        "tokenv-q-10",
        "tokenv-q-90",
    ]
    history = pd.concat([each[:-5] for _, each in frame.groupby("unique_id", sort=False)])
    pd.testing.assert_frame_equal(
        windows.drop(columns=["cutoff", "y"]), model.forecast(history, 5, **options)
    )
    last = history.groupby("unique_id")["ds"].max()
    assert (windows["cutoff"] == windows["unique_id"].map(last)).all()


def test_windows_hold_the_truth_in_the_order_of_series_and_cutoffs(model):
    frame = long(b=70, a=52)
    forecasts = model.cross_validation(frame, 5, n_windows=3, step_size=4)
    assert forecasts["unique_id"].tolist() == ["b"] * 15 + ["a"] * 15
    assert forecasts.groupby("unique_id")["cutoff"].is_monotonic_increasing.all()
    both = forecasts.merge(frame, on=["unique_id", "ds"], suffixes=("", " given"))
    assert len(both) == len(forecasts)
    assert (both["y"] == both["y given"]).all()


def test_values_after_a_cutoff_are_not_read(model):
    frame = long(a=60)
    changed = frame.assign(y=frame["y"].where(frame.index < 48, 1e3))
    one, other = (model.cross_validation(each, 6, n_windows=2) for each in (frame, changed))
    pd.testing.assert_frame_equal(one.drop(columns="y")[:6], other.drop(columns="y")[:6])


@pytest.mark.parametrize("order", ["by series", "shuffled", "wide"])
def test_a_model_trained_again_reads_the_frame_up_to_each_cutoff(model, order):
    frame = long(b=70, a=52)
    names = {"id_col": "unique_id", "time_col": "day", "target_col": "y"}
    if order == "shuffled":
        frame = frame.sample(frac=1, random_state=0)
    if order == "wide":
        frame = long(a=60).set_index("ds")[["y"]]
        names = {}
    else:
        frame = frame.rename(columns={"ds": "day"})
    given = {"n_windows": 3, "step_size": 4, "level": 80, **names}
    seen = []

    def refit(known):
        seen.append(known)
        return model

    windows = model.cross_validation(frame, 5, refit=refit, **given)
    fixed = model.cross_validation(frame, 5, **given)
    places = ["unique_id", names.get("time_col", "ds"), "cutoff", "y"]
    pd.testing.assert_frame_equal(windows[places], fixed[places])
    number = windows.groupby("unique_id")["cutoff"].rank("dense")
    for window, known in enumerate(seen, start=1):
        found = windows[number == window].drop(columns=["cutoff", "y"]).reset_index(drop=True)
        forecasts = model.forecast(known, 5, level=80, **names)
        pd.testing.assert_frame_equal(found, forecasts)
    assert len(seen) == 3


def test_nothing_is_trained_again_for_windows_which_do_not_fit(model):
    with pytest.raises(UserError, match="choose fewer windows"):
        model.cross_validation(long(a=40), 5, n_windows=8, refit=pytest.fail)


def test_windows_without_dates_have_numbers_of_rows(model):
    wide = pd.DataFrame({"a": np.arange(60.0), "b": np.arange(60.0) % 7})
    options = replace(model.config.data.options, date=None)
    undated = replace(model.config, data=replace(model.config.data, options=options))
    undated_model = tokenv.SeriesModel(replace(model._trained, config=undated))
    forecasts = undated_model.cross_validation(wide, 4, n_windows=2, level=80, samples=5)
    assert forecasts["unique_id"].tolist() == ["a"] * 8 + ["b"] * 8
    assert forecasts["y"].tolist()[:8] == forecasts["ds"].tolist()[:8] == list(range(52, 60))
    assert forecasts["cutoff"].tolist()[:8] == [51] * 4 + [55] * 4


def test_windows_that_do_not_fit_are_refused(model):
    frame = long(a=40)
    for options, message in (
        ({"n_windows": 0}, "n_windows = 0: expected a whole number of at least 1"),
        ({"n_windows": 2, "step_size": 0}, "step_size = 0: expected a whole number of at least 1"),
        (
            {"n_windows": 8},
            "a has 40 rows: expected more than .* besides the 40 of 8 windows.*choose fewer windows",
        ),
    ):
        with pytest.raises(UserError, match=message):
            model.cross_validation(frame, 5, **options)


def scored(margin_of, windows=40, steps=1, generator=1):
    """Return forecasts of noise whose scale is a series' margin, and grows with the step."""
    generator = np.random.default_rng(generator)
    cutoff, ds = np.divmod(np.arange(windows * steps), steps)
    parts = [
        pd.DataFrame(
            {
                "unique_id": name,
                "ds": cutoff * steps + ds,
                "cutoff": cutoff * steps - 1,
                "tokenv": 0.0,
                "tokenv-q-10": -1.0,
                "tokenv-q-90": 1.0,
                "y": margin * (1 + ds) * generator.normal(size=windows * steps),
            }
        )
        for name, margin in margin_of.items()
    ]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("level", [50, 80, 95])
@pytest.mark.parametrize(("lower", "upper"), [("tokenv-q-10", "tokenv-q-90"), ("tokenv", "tokenv")])
def test_conformal_intervals_cover_exactly_the_rank_of_their_scores(level, lower, upper):
    table = scored({"a": 0.1, "b": 3.0}, steps=3)
    intervals = tokenv.conformal_intervals(table, table, level=level, lower=lower, upper=upper)
    inside = table["y"].between(
        intervals[f"tokenv-lo-{level}"] - 1e-9, intervals[f"tokenv-hi-{level}"] + 1e-9
    )
    rank = int(np.ceil(41 * level / 100))
    assert (intervals[f"tokenv-lo-{level}"] <= intervals[f"tokenv-hi-{level}"]).all()
    step = table["ds"] - table["cutoff"]
    for (name, _), share in inside.groupby([table["unique_id"], step]).sum().items():
        # a's interval would have shrunk below its middle
        assert share == rank or (name == "a" and share > rank)


def test_conformal_coverage_is_the_level_at_every_step():
    """Check the mean coverage over calibrations: between the level and the level + 1 / (n + 1) at each step.

    One margin for all steps, of noise which grows from 1 to 4, would hold 99% of the first and 60% of the last.
    """
    generator = np.random.default_rng(0)
    n = 9
    rows = n * 4
    inside = []
    for _ in range(200):
        draw = scored({"a": 1.0}, n + 20, 4, generator)
        future = tokenv.conformal_intervals(draw[rows:], draw[:rows], level=[60, 80])
        for level in (60, 80):
            held = future["y"].between(future[f"tokenv-lo-{level}"], future[f"tokenv-hi-{level}"])
            inside.append(held.groupby(future["ds"] - future["cutoff"]).mean().to_list())
    assert np.mean(inside[::2], 0) == pytest.approx([0.6] * 4, abs=0.03)
    assert np.mean(inside[1::2], 0) == pytest.approx([0.8] * 4, abs=0.03)


def test_rows_of_windows_may_have_any_order_and_any_index():
    known = scored({"b": 1.0, "a": 2.0}, steps=3)
    expected = tokenv.conformal_intervals(known, known)
    order = np.random.default_rng(0).permutation(len(known))
    shuffled = known.iloc[order].set_axis(order % 7)
    intervals = tokenv.conformal_intervals(shuffled, known.iloc[::-1])
    pd.testing.assert_frame_equal(intervals, expected.iloc[order].set_axis(order % 7))


def test_a_library_scores_frames_as_they_are(model):
    """Check against utilsforecast: squared errors of the mean, and the share of values inside conformal intervals."""
    known = model.cross_validation(long(a=120, b=90), 5, n_windows=12)
    intervals = tokenv.conformal_intervals(known, known, level=[75]).drop(columns="cutoff")
    score = evaluate(intervals, [mse, coverage], ["tokenv"], level=[75]).set_index(
        ["metric", "unique_id"]
    )["tokenv"]
    for name, of_series in intervals.groupby("unique_id"):
        assert score["mse", name] == pytest.approx(
            np.square(of_series["tokenv"] - of_series["y"]).mean()
        )
        inside = of_series["y"].between(of_series["tokenv-lo-75"], of_series["tokenv-hi-75"]).mean()
        assert score["coverage_level75", name] == pytest.approx(inside)


def test_conformal_mistakes_are_reported():
    table = scored({"a": 1.0}, steps=2)
    for forecast, calibration, options, message in (
        (table, table, {"level": [80, 100]}, r"level = \[80, 100\]: expected coverages in percent"),
        (
            table,
            table.drop(columns="y"),
            {},
            "calibration has no column 'y' but unique_id, ds, cutoff, tokenv, tokenv-q-10, tokenv-q-90",
        ),
        (table, table, {"lower": "low"}, "forecast has no column 'low'"),
        (
            table,
            table[:7],
            {},
            "calibration has 3 known windows of series 'a' at step 2: expected at least 4 for level = 80",
        ),
        (scored({"b": 1.0}), table, {}, "calibration has 0 known windows of series 'b' at step 1"),
    ):
        with pytest.raises(UserError, match=message):
            tokenv.conformal_intervals(forecast, calibration, **options)


def test_a_direct_model_forecasts_any_shorter_horizon(tmp_path):
    from tiny import settings as tiny_settings

    series = {"context": 4, "count": 6, "length": 300, "dwell": 8}
    data = {
        "kind": "series",
        "source": "regimes",
        "seq_len": 32,
        "validation": 0.2,
        "options": series | {"context": 26},
    }
    of = tiny_settings(loss={"early": 0.0})
    of |= {"data": data, "codec": {"name": "series", "horizon": 6, "direct": True}}
    train(resolve([], of), tmp_path / "checkpoints", lambda *_: None)
    model = tokenv.load(tmp_path)
    frame = long(a=60)
    six, four = (model.forecast(frame, h) for h in (6, 4))
    pd.testing.assert_frame_equal(six[:4], four)
    assert len(model.cross_validation(frame, 4, n_windows=2)) == 8
    with pytest.raises(UserError, match="horizon = 7"):
        model.forecast(frame, 7)
