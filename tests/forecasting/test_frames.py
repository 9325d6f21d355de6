"""Forecasts of data frames: continued dates, series of any length, and error messages."""

import numpy as np
import pandas as pd
import pytest

import tokenv
from tokenv.config.files import resolve
from tokenv.core.errors import UserError
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tiny import settings

    folder = tmp_path_factory.mktemp("run")
    series = {"context": 4, "count": 6, "length": 300, "dwell": 8}
    data = {"kind": "series", "source": "regimes", "seq_len": 32, "validation": 0.2, "series": series}
    of = settings(model={"horizon": 6}) | {"data": data, "codec": {"name": "series"}}
    train(resolve([], of), folder / "checkpoints", lambda *_: None)
    return tokenv.load(folder)


def long(**lengths):
    dice = np.random.default_rng(0)
    return pd.concat(
        [
            pd.DataFrame(
                {
                    "unique_id": name,
                    "ds": pd.date_range("2024-01-30", periods=length, freq="D"),
                    "y": dice.normal(size=length).cumsum(),
                }
            )
            for name, length in lengths.items()
        ],
        ignore_index=True,
    )


def test_many_series_of_different_length_are_continued(model):
    frame = long(b=60, a=20, c=45)
    found = model.forecast(frame, horizon=5, quantiles=[0.05, 0.5, 0.95])
    assert list(found.columns) == ["unique_id", "ds", "mean", "q0.05", "q0.5", "q0.95"]
    assert found["unique_id"].tolist() == [name for name in "bac" for _ in range(5)]
    assert found["ds"].tolist() == [
        day for length in (60, 20, 45) for day in pd.date_range("2024-01-30", periods=length + 5, freq="D")[length:]
    ]
    assert (found["q0.05"] < found["q0.5"]).all()
    assert (found["q0.5"] < found["q0.95"]).all()
    alone = model.forecast(frame[frame["unique_id"] == "a"], horizon=5, quantiles=[0.5])
    assert alone.shape == (5, 4)
    pd.testing.assert_frame_equal(found, model.forecast(frame, horizon=5, quantiles=[0.05, 0.5, 0.95]))


def test_wide_frames_and_those_without_dates(model):
    wide = long(b=60, a=60).pivot(index="ds", columns="unique_id", values="y")
    found = model.forecast(wide, horizon=4, samples=8, direct=False)
    assert found["unique_id"].tolist() == ["a"] * 4 + ["b"] * 4
    assert found["ds"].iloc[0] == wide.index[-1] + pd.Timedelta(days=1)
    assert np.isfinite(found[["mean", "q0.1", "q0.5", "q0.9"]].to_numpy()).all()


def test_mistakes_are_reported(model):
    frame = long(a=40, b=40)
    gap = frame.drop(index=10)
    twice = pd.concat([frame, frame.iloc[[45]]], ignore_index=True).sort_values(["unique_id", "ds"])
    cases = [
        (gap, {}, "series 'a': the date .* is 2 days.* after that of the row before; expected 1 day"),
        (twice, {}, "series 'b': the date .* is that of the row before"),
        (frame.iloc[::-1], {}, "series 'b': the date .* is earlier than that of the row before"),
        (long(a=40, b=3), {}, "b has 3 rows: expected more than the data.series.context = 4"),
        (frame.assign(y=np.nan), {}, "series 'a' holds no value"),
        (frame.assign(y="x"), {}, "frame row 0, series 'a', column 'y': 'x' is no number"),
        (frame.drop(columns="ds"), {}, "frame has no date column 'date' but unique_id, y"),
        (frame.assign(ds=pd.NaT), {}, "column 'ds': None is no date"),
        (frame, {"horizon": 7, "direct": True}, r"direct head reaches 6 steps: train one with model\.horizon=7"),
        (frame, {"horizon": 28}, "horizon = 28: expected 1 to 27"),
        (frame, {"quantiles": [0.9, 0.1]}, "quantiles = "),
        (frame, {"samples": 0, "direct": False}, "samples = 0: expected a whole number of at least 2"),
        (frame, {"horizon": 8, "samples": 1}, "samples = 1: expected a whole number of at least 2"),
        (frame.iloc[:0], {}, "frame has no row"),
    ]
    for each, options, message in cases:
        with pytest.raises(UserError, match=message):
            model.forecast(each, **{"horizon": 5} | options)
    with pytest.raises(UserError, match="expected a model of text; forecast does these"):
        model.tokens("x")
