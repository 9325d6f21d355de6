"""Forecasts: exact scores, frames that scale with the data, and what goes wrong."""

import csv

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.learned import Learned
from tokenv.build import Parts
from tokenv.config import Config
from tokenv.data.series import frame, load_series
from tokenv.data.series_table import Recording
from tokenv.experiment import run_command
from tokenv.forecast import crps, forecast, held_out_windows, history_steps, last_windows, score
from tokenv.lm.config import UNetConfig
from tokenv.lm.series import SeriesCodec
from tokenv.lm.unet import UNet
from tokenv.settings import resolve

VALUES = st.floats(-10, 10)
SERIES = {
    "data": {
        "kind": "series",
        "source": "regimes",
        "seq_len": 24,
        "validation": 0.2,
        "series": {"context": 8, "count": 3, "length": 200},
    },
    "codec": {"name": "series"},
}


def config(**changes) -> Config:
    return resolve([], SERIES | changes)


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    size = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=8)
    made = Parts(UNet(size, SeriesCodec(16)).double(), Learned(16, window=1).double(), None, None)
    made.train(False)
    return made


@given(st.lists(VALUES, min_size=2, max_size=8), VALUES)
def test_crps_is_its_definition(sample, truth):
    sample_S = np.array(sample)
    pairs = [abs(a - b) for i, a in enumerate(sample) for j, b in enumerate(sample) if i != j]
    expected = np.abs(sample_S - truth).mean() - np.mean(pairs) / 2
    assert crps(sample_S, np.array(truth)) == pytest.approx(expected, abs=1e-9)


def test_crps_of_a_normal_forecast():
    """Closed form for N(0, 1) and y = 0: 2 phi(0) - 1 / sqrt(pi)."""
    sample_S = np.random.default_rng(0).normal(size=(400, 200))
    expected = 2 / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi)
    assert crps(sample_S, np.zeros(200)).mean() == pytest.approx(expected, abs=0.003)


@settings(deadline=None, max_examples=5)
@given(shift=st.floats(-50, 50), scale=st.floats(0.1, 20))
def test_forecasts_move_and_stretch_with_the_data(parts, shift, scale):
    value_BLC = np.random.default_rng(0).normal(size=(2, 14, 1)).cumsum(1)

    def continued(value):
        symbol = frame(value, 8, mean_BC=np.zeros((2, 1)), std_BC=np.full((2, 1), 1e-3), floor=0.1)
        return forecast(parts, ["a", "b"], torch.from_numpy(symbol), 5, samples=3, seed=1)

    plain, moved = continued(value_BLC), continued(shift + scale * value_BLC)
    for one, other in zip(plain, moved, strict=True):
        assert one.sample_SHC.shape == (3, 5, 1)
        np.testing.assert_allclose(other.sample_SHC, shift + scale * one.sample_SHC, rtol=1e-6, atol=1e-6)
        assert (one.boundary_L == other.boundary_L).all()
    assert len({float(plain[0].sample_SHC[s, 0, 0]) for s in range(3)}) == 3


def test_a_batch_of_histories_is_each_alone(parts):
    """Batches that hold one history's continuations only give those of a batch of its own."""
    symbol = frame(
        np.random.default_rng(0).normal(size=(2, 14, 1)), 8, mean_BC=np.zeros((2, 1)), std_BC=np.ones((2, 1)), floor=0.1
    )
    history_BL = torch.from_numpy(symbol)
    both = forecast(parts, ["a", "b"], history_BL, 3, samples=4, batch_size=4)
    alone = forecast(parts, ["a"], history_BL[:1], 3, samples=4, batch_size=4)
    np.testing.assert_allclose(both[0].sample_SHC, alone[0].sample_SHC)


def test_scores_are_standardised_and_leave_out_what_is_missing(parts):
    data = load_series(config().data)
    names, series, window_BN = held_out_windows(data, 3)
    made = forecast(parts, names, window_BN[:, :16], 8, samples=5)
    truth_BHC = window_BN[:, 16:, :, 0].numpy().copy()
    truth_BHC[0, 3:] = np.nan
    truth_BHC[2] = np.nan
    found = score(made, series, truth_BHC)
    of = [(made[0], series[0], truth_BHC[0, :3]), (made[1], series[1], truth_BHC[1])]
    squares = [np.square((m.sample_SHC.mean(0)[: len(t)] - t) / s.std_C).mean() for m, s, t in of]
    assert found.windows == 2
    assert found.mse == pytest.approx(np.mean(squares))
    assert found.mse_error == pytest.approx(np.std(squares, ddof=1) / np.sqrt(2))


def test_histories_are_as_long_as_the_model_allows():
    assert history_steps(config(), 10) == 14
    for horizon in (0, 16, 100):
        with pytest.raises(ValueError, match=rf"horizon = {horizon}: expected 1 to 15"):
            history_steps(config(), horizon)
    recording = Recording("x.csv", ["a", "b"], np.arange(60.0).reshape(30, 2))
    names, symbol = last_windows(recording, config(), 10)
    assert names == ["a", "b"]
    assert symbol.shape == (2, 14, 1, 4)
    assert symbol[1, :, 0, 0].tolist() == list(np.arange(33.0, 60.0, 2))
    with pytest.raises(ValueError, match="has 1 rows: expected more than"):
        last_windows(Recording("x.csv", ["a"], np.zeros((1, 1))), config(), 10)
    with pytest.raises(ValueError, match=r"column 'a' of x\.csv holds no value"):
        last_windows(Recording("x.csv", ["a"], np.full((30, 1), np.nan)), config(), 10)


def test_the_command(tiny_settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = tiny_settings | SERIES | {"validation": {"every_bytes": 2000, "sequences": 4, "batch_size": 4}}
    words = [f"{section}.{key}={value}" for section, of in settings.items() for key, value in of.items()]
    run_command("train", ["with", *words])
    found = run_command("forecast", ["with", "run=runs/1", "horizon=6", "samples=4", "windows=2"])
    assert found["windows"] == 2
    assert found["crps"] > 0
    assert "against what came" in capsys.readouterr().out
    rows = "date,a,b\n" + "".join(f"2020-01-{day:02} 00:00:00,{day},{-day}\n" for day in range(1, 29))
    (tmp_path / "my.csv").write_text(rows)
    run_command("forecast", ["with", "run=runs/1", "csv=my.csv", "horizon=6", "samples=4", "out=mine"])
    with (tmp_path / "mine.csv").open() as file:
        told = list(csv.DictReader(file))
    assert [row["series"] for row in told] == ["a"] * 6 + ["b"] * 6
    assert all(float(row["q0.1"]) <= float(row["q0.5"]) <= float(row["q0.9"]) for row in told)
    assert (tmp_path / "mine.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="horizon = 0"):
        run_command("forecast", ["with", "run=runs/1", "horizon=0"])
    with pytest.raises(ValueError, match="quantiles = "):
        run_command("forecast", ["with", "run=runs/1", "quantiles=[0.9,0.1]"])
    with pytest.raises(FileNotFoundError):
        run_command("forecast", ["with", "run=runs/1", "csv=none.csv", "horizon=6"])


def test_text_has_no_forecast(tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [f"{section}.{key}={value}" for section, of in tiny_settings.items() for key, value in of.items()]
    run_command("train", ["with", *words])
    with pytest.raises(ValueError, match="is of text: expected a run of series"):
        run_command("forecast", ["with", "run=runs/1"])
