"""Forecasts: exact scores, frames that scale with the data, and what goes wrong."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from tokenv.agents.learned import Learned
from tokenv.cli.main import run_command
from tokenv.config.files import resolve
from tokenv.config.schema import Config
from tokenv.data.series.tables import Recording
from tokenv.data.series.windows import frame, load_series
from tokenv.errors import UserError
from tokenv.forecast.forecast import forecast, held_out_windows, history_steps, last_windows
from tokenv.forecast.scores import crps, score_forecasts
from tokenv.lm.codecs.series import SeriesCodec
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.run.parts import Parts

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
    quantile_S = norm.ppf((np.arange(400) + 0.5) / 400)
    assert crps(quantile_S, np.array(0.0), drawn=False) == pytest.approx(expected, abs=0.0005)


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
    held_out = held_out_windows(load_series(config().data), 8, 3)
    symbol_BN = held_out.symbol_BN.clone()
    symbol_BN[0, 19:, :, 0] = np.nan
    symbol_BN[2, 16:, :, 0] = np.nan
    made = forecast(parts, held_out.names, symbol_BN[:, :16], 8, samples=5)
    found = score_forecasts(made, replace(held_out, symbol_BN=symbol_BN))
    truth = [symbol_BN[0, 16:19, :, 0].numpy(), symbol_BN[1, 16:, :, 0].numpy()]
    squares = [
        np.square((m.sample_SHC.mean(0)[: len(t)] - t) / s.std_C).mean()
        for m, s, t in zip(made, held_out.series, truth, strict=False)
    ]
    assert found.windows == 2
    assert found.mse == pytest.approx(np.mean(squares))
    assert found.mse_error == pytest.approx(np.std(squares, ddof=1) / np.sqrt(2))


def test_held_out_windows_are_one_a_step_and_end_in_the_test_range():
    data = load_series(config().data)
    found = held_out_windows(data, 8)
    border = data.series[0].borders
    assert len(found.names) == 3 * (border.test - border.validation - 8 + 1)
    assert [int(name.rpartition(" ")[2]) for name in found.names[:2]] == [
        border.validation - 16,
        border.validation - 15,
    ]
    truth_NC = data.series[0].value_LC[border.validation - 16 : border.validation + 8]
    np.testing.assert_allclose(found.symbol_BN[0, :, :, 0].numpy(), truth_NC)
    some = held_out_windows(data, 8, 6)
    assert len({s.name for s in some.series}) == 3
    assert len(some.cluster_B.unique()) == 6 or len(some.cluster_B.unique()) == 3


@pytest.mark.parametrize("residual", [False, True])
def test_direct_forecasts_are_the_direct_heads_quantiles(residual):
    """In units of the frame: location (or the last value) plus scale times the density's own quantile."""
    torch.manual_seed(0)
    size = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=8, horizon=6)
    codec = SeriesCodec(16, residual=residual)
    parts = Parts(UNet(size, codec).double(), Learned(16, window=1).double(), None, None)
    parts.train(False)
    value_BLC = 100 + np.random.default_rng(0).normal(size=(3, 14, 1)).cumsum(1)
    history_BL = torch.from_numpy(frame(value_BLC, 8, mean_BC=np.zeros((3, 1)), std_BC=np.ones((3, 1)), floor=0.1))
    made = forecast(parts, ["a", "b", "c"], history_BL, 5, samples=3, direct=True, batch_size=2)
    again = forecast(parts, ["a", "b", "c"], history_BL, 6, samples=3, direct=True, batch_size=2)
    for row, (one, other) in enumerate(zip(made, again, strict=True)):
        assert one.sample_SHC.shape == (3, 5, 1)
        assert not one.drawn
        np.testing.assert_allclose(one.sample_SHC, other.sample_SHC[:, :5])
        action_BL = torch.from_numpy(one.boundary_L).long()[None]
        with torch.no_grad():
            y_BLD = parts.lm.read_out(parts.lm.encode(history_BL[row : row + 1]), action_BL)
            median_H = codec.quantile(parts.lm.direct(y_BLD[0, -1]), 0.5)[:5, 0]
        _, location, scale = history_BL[row, -1, 0, :3].tolist()
        expected = (value_BLC[row, -1, 0] if residual else location) + scale * median_H.numpy()
        np.testing.assert_allclose(one.sample_SHC[1, :, 0], expected)
    with pytest.raises(ValueError, match=r"direct head reaches 6 steps: train one with model\.horizon=7"):
        forecast(parts, ["a"], history_BL[:1], 7, direct=True)


def test_histories_are_as_long_as_the_model_allows():
    assert history_steps(config(), 10) == 14
    for horizon in (0, 16, 100):
        with pytest.raises(ValueError, match=rf"horizon = {horizon}: expected 1 to 15"):
            history_steps(config(), horizon)
    recording = Recording("x.csv", ["a", "b"], np.arange(60.0).reshape(30, 2))
    names, symbol = last_windows(recording, config(), 10)
    assert names == ["a", "b"]
    assert symbol.shape == (2, 14, 1, 5)
    assert symbol[1, :, 0, 0].tolist() == list(np.arange(33.0, 60.0, 2))
    with pytest.raises(ValueError, match="has 1 rows: expected more than"):
        last_windows(Recording("x.csv", ["a"], np.zeros((1, 1))), config(), 10)
    with pytest.raises(ValueError, match=r"column 'a' of x\.csv holds no value"):
        last_windows(Recording("x.csv", ["a"], np.full((30, 1), np.nan)), config(), 10)


def test_the_command(tiny_settings, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = tiny_settings | SERIES | {"validation": {"every_symbols": 2000, "sequences": 4, "batch_size": 4}}
    words = [f"{section}.{key}={value}" for section, of in settings.items() for key, value in of.items()]
    run_command("train", ["with", *words])
    found = run_command("forecast", ["with", "run=runs/1", "horizon=6", "samples=4", "windows=2", "json=f.json"])
    told = json.loads((tmp_path / "f.json").read_text())
    assert told["scores"] == found
    assert len(told["forecasts"]) == 2
    assert [len(each) for each in (told["forecasts"][0]["mean"], told["forecasts"][0]["truth"])] == [6, 6]
    assert list(told["forecasts"][0]["quantiles"]) == ["0.1", "0.5", "0.9"]
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
    with pytest.raises(ValueError, match=r"direct head is missing: train one with model\.horizon=6"):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "direct=True"])
    for direct in (True, False):
        with pytest.raises(UserError, match=r"1,000,000,000,000 samples of 2 forecasts would need at least .* GiB"):
            run_command(
                "forecast", ["with", "run=runs/1", "horizon=6", "windows=2", "samples=1e12", f"direct={direct}"]
            )
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
