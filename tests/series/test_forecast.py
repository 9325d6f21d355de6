"""Forecasts: exact distributions, scaling with the data, and errors."""

import csv
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import overrides

from tokenv.agents.learned import Learned
from tokenv.cli.main import run_command
from tokenv.config.components import Components
from tokenv.config.files import resolve
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.series.baseline_models import naive_baselines
from tokenv.series.codec import DENSITIES, SeriesCodec
from tokenv.series.contexts import held_out_windows, history_steps, last_windows
from tokenv.series.forecaster import forecast
from tokenv.series.scores import ParametricForecast, SampleForecast, ScoreAccumulator, crps
from tokenv.series.tables import Recording
from tokenv.series.windows import load_series

VALUES = st.floats(-10, 10)
SERIES = {
    "data": {
        "kind": "series",
        "source": "regimes",
        "seq_len": 24,
        "validation": 0.2,
        "options": {"context": 8, "count": 3, "length": 200},
    },
    "codec": {"name": "series"},
}


def config(**changes) -> Config:
    return resolve([], SERIES | changes)


def parts_with(**codec):
    torch.manual_seed(0)
    size = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=8)
    made = Components(
        UNet(size, SeriesCodec(16, **codec)).double(), Learned(16, window=1).double(), None, None
    )
    made.train(False)
    return made


@pytest.fixture(scope="module")
def parts():
    return parts_with()


def histories(value_LC, horizon):
    """Return the last steps of a table's columns, 24 with the horizon."""
    names = [chr(ord("a") + c) for c in range(value_LC.shape[1])]
    return last_windows([Recording("x.csv", names, value_LC)], config(), horizon)


def only(of):
    (batch,) = of.batches(1000)
    return batch


@given(st.lists(VALUES, min_size=2, max_size=8), VALUES)
def test_crps_equals_its_definition(sample, truth):
    sample_S = np.array(sample)
    pairs = [abs(a - b) for i, a in enumerate(sample) for j, b in enumerate(sample) if i != j]
    expected = np.abs(sample_S - truth).mean() - np.mean(pairs) / 2
    assert crps(sample_S, np.array(truth)) == pytest.approx(expected, abs=1e-9)


def test_crps_of_a_normal_forecast():
    """Closed form for N(0, 1) and y = 0: 2 phi(0) - 1 / sqrt(pi)."""
    sample_S = np.random.default_rng(0).normal(size=(400, 200))
    expected = 2 / np.sqrt(2 * np.pi) - 1 / np.sqrt(np.pi)
    assert crps(sample_S, np.zeros(200)).mean() == pytest.approx(expected, abs=0.003)


def test_intervals_of_samples_have_their_coverage():
    """A further draw is inside of them as often: 25 draws, whose 10% and 90% points plain interpolation puts inside."""
    draw = np.random.default_rng(0).normal(size=(40_000, 26))
    quantile_BQ = SampleForecast(draw[:, :25, None, None]).quantile([0.1, 0.9])[..., 0, 0]
    inside = (quantile_BQ[:, 0] <= draw[:, 25]) & (draw[:, 25] <= quantile_BQ[:, 1])
    assert inside.mean() == pytest.approx(0.8, abs=4 * (0.16 / 40_000) ** 0.5)


@settings(max_examples=5)
@given(shift=st.floats(-50, 50), scale=st.floats(0.1, 20))
def test_forecasts_shift_and_scale_with_the_data(parts, shift, scale):
    value_LC = np.random.default_rng(0).normal(size=(19, 2)).cumsum(0)

    def continued(value):
        generator = torch.Generator().manual_seed(1)
        return forecast(parts, only(histories(value, 5)), 5, samples=3, generator=generator)

    plain = continued(value_LC)
    moved = continued(shift + scale * value_LC)
    assert plain.distribution.sample_BSHC.shape == (2, 3, 5, 1)
    np.testing.assert_allclose(
        moved.distribution.sample_BSHC,
        shift + scale * plain.distribution.sample_BSHC,
        rtol=1e-6,
        atol=1e-6,
    )
    assert (plain.boundary_BL == moved.boundary_BL).all()
    assert len(np.unique(plain.distribution.sample_BSHC[0, :, 0, 0])) == 3


def test_there_is_one_held_out_window_per_step_of_the_test_range():
    data = load_series(config().data)
    batch = only(held_out_windows(data, 8))
    border = data.series[0].borders
    assert len(batch.names) == 3 * (border.test - border.validation - 8 + 1)
    assert [int(name.rpartition(" ")[2]) for name in batch.names[:2]] == [
        border.validation - 16,
        border.validation - 15,
    ]
    both_NC = np.concatenate([batch.symbol_BL[0, :, :, 0].numpy(), batch.truth_BHC[0]])
    np.testing.assert_allclose(
        both_NC, data.series[0].value_LC[border.validation - 16 : border.validation + 8]
    )
    some = held_out_windows(data, 8, 6)
    assert (len(some), some.total) == (6, len(batch.names))
    assert len({s.name for s in only(some).series}) == 3
    assert len(only(some).cluster_B.unique()) in (3, 6)


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("residual", [False, True])
def test_direct_forecasts_equal_the_densities_of_the_direct_head(residual, density):
    """In units of the frame: location (or the last value) plus scale times the density's own quantile."""
    parts = parts_with(horizon=6, residual=residual, density=density)
    codec = parts.lm.codec
    value_LC = 100 + np.random.default_rng(0).normal(size=(24, 3)).cumsum(0)
    batch = only(histories(value_LC, 5))
    probabilities = [0.05, 0.3, 0.5, 0.9]
    made = forecast(parts, batch, 5, direct=True)
    assert isinstance(made.distribution, ParametricForecast)
    quantile_BQHC = made.distribution.quantile(probabilities)
    assert quantile_BQHC.shape == (3, 4, 5, 1)
    assert (np.diff(quantile_BQHC, axis=1) > 0).all()
    for row in range(3):
        action_BL = torch.from_numpy(made.boundary_BL[row]).long()[None]
        history_BL = batch.symbol_BL[row : row + 1]
        with torch.no_grad():
            y_BLD = parts.lm.decode_hidden(parts.lm.encode(history_BL), action_BL)
            parameters_HP = parts.lm.auxiliary_head(y_BLD[0, -1])[:5]
        _, location, scale = history_BL[0, -1, 0, :3].tolist()
        base = value_LC[-1, row] if residual else location
        for number, q in enumerate(probabilities):
            expected_H = base + scale * codec.quantile(parameters_HP, q)[:, 0].numpy()
            np.testing.assert_allclose(quantile_BQHC[row, number, :, 0], expected_H, rtol=1e-9)
        np.testing.assert_allclose(
            made.distribution.mean_BHC[row, :, 0],
            base + scale * codec.mean(parameters_HP)[:, 0].numpy(),
        )
        below_H = codec.cdf(
            parameters_HP, torch.from_numpy((quantile_BQHC[row, 1] - base) / scale)
        )[:, 0]
        np.testing.assert_allclose(below_H.numpy(), 0.3, rtol=1e-9)
    many = np.quantile(
        made.distribution.quantile(((np.arange(2000) + 0.5) / 2000).tolist()), [0.2], axis=1
    )
    truth_BHC = many[0]
    grid_SBHC = np.moveaxis(
        made.distribution.quantile(((np.arange(2000) + 0.5) / 2000).tolist()), 1, 0
    )
    np.testing.assert_allclose(
        made.distribution.crps(truth_BHC), crps(grid_SBHC, truth_BHC), rtol=0.01
    )


@pytest.mark.parametrize("direct", [False, True])
def test_a_rate_conditioned_model_forecasts_at_the_given_rate(direct):
    made = parts_with(horizon=6)
    made.agent = Learned(16, window=1, rates=RateRange(0.1, 0.6)).double().eval()
    batch = only(histories(np.random.default_rng(0).normal(size=(60, 4)).cumsum(0), 6))
    by_rate = {}
    for rate in (None, RateRange(0.1, 0.6).mean, 0.1, 0.9):
        result = forecast(made, batch, 6, EvalOptions(rate=rate), samples=3, direct=direct)
        by_rate[rate] = result.boundary_BL.mean(), result.distribution.mean_BHC
    own, mean, few, many = by_rate.values()
    assert (own[1] == mean[1]).all()
    assert few[0] < mean[0] < many[0]
    assert (few[1] != many[1]).any()


def test_windows_in_batches_equal_all_at_once():
    """Forecasts and scores, to rounding: noise is drawn window by window."""
    parts = parts_with(horizon=8)
    windows = held_out_windows(load_series(config().data), 8)
    scored = []
    for size in (1000, 16, 7):
        generator = torch.Generator().manual_seed(3)
        scores = ScoreAccumulator([0.1, 0.5, 0.9])
        quantiles = []
        for batch in windows.batches(size):
            made = forecast(parts, batch, 8, generator=generator, direct=True)
            quantiles.append(made.distribution.quantile([0.1, 0.5, 0.9]))
            points = {name: point(batch) for name, point in naive_baselines(8, 5).items()}
            scores.add(made.distribution, quantiles[-1], batch, points)
        score = asdict(scores.result())
        against = score.pop("against")
        peers = [figure for peer in against.values() for figure in peer.values()]
        figures = [*score.pop("quantiles"), *score.pop("below"), *score.values(), *peers]
        scored.append((np.concatenate(quantiles), figures))
    (whole, figures), *rest = scored
    assert len(figures) == 33
    for quantile_PQHC, others in rest:
        np.testing.assert_allclose(quantile_PQHC, whole, rtol=1e-9)
        np.testing.assert_allclose(others, figures, rtol=1e-9)


def test_a_direct_head_which_is_too_short_is_reported():
    batch = only(histories(np.arange(48.0).reshape(24, 2), 7))
    with pytest.raises(
        ValueError, match=r"direct head reaches 6 steps: train one with codec\.horizon=7"
    ):
        forecast(parts_with(horizon=6), batch, 7, direct=True)


def test_histories_are_as_long_as_the_model_allows():
    assert history_steps(config(), 10) == 14
    for horizon in (0, 16, 100):
        with pytest.raises(ValueError, match=rf"horizon = {horizon}: expected 1 to 15"):
            history_steps(config(), horizon)
    batch = only(histories(np.arange(60.0).reshape(30, 2), 10))
    assert batch.names == ["a", "b"]
    assert batch.symbol_BL.shape == (2, 14, 1, 5)
    assert batch.symbol_BL[1, :, 0, 0].tolist() == list(np.arange(33.0, 60.0, 2))
    with pytest.raises(
        ValueError, match=r"x\.csv has 1 rows: expected more than .* full history of 14"
    ):
        histories(np.zeros((1, 1)), 10)
    with pytest.raises(ValueError, match=r"column 'a' of x\.csv holds no value"):
        histories(np.full((30, 1), np.nan), 10)


def test_histories_of_different_lengths_are_in_different_batches():
    long, short, same = (Recording(name, [""], np.arange(float(n))[:, None]) for name, n in
                         (("long", 40), ("short", 11), ("same", 35)))  # fmt: skip
    batches = list(last_windows([long, short, same], config(), 10).batches(8))
    assert [(batch.names, batch.symbol_BL.shape[1]) for batch in batches] == [
        (["short"], 11),
        (["long", "same"], 14),
    ]
    one_each = [batch.names for batch in last_windows([long, short, same], config(), 10).batches(1)]
    assert one_each == [["short"], ["long"], ["same"]]


def test_the_command_prints_and_stores_scores_and_forecasts(
    tiny_settings, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    settings = (
        tiny_settings
        | SERIES
        | {"validation": {"every_symbols": 2000, "sequences": 4, "batch_size": 4}}
    )
    words = overrides(settings)
    run_command("train", ["with", *words])
    scores = run_command(
        "forecast",
        ["with", "run=runs/1", "horizon=6", "samples=4", "windows=2", "season=5", "json=f.json"],
    )
    stored = json.loads((tmp_path / "f.json").read_text())
    assert stored["scores"] == json.loads(json.dumps(scores))
    assert len(stored["forecasts"]) == 2
    assert [
        len(each) for each in (stored["forecasts"][0]["mean"], stored["forecasts"][0]["truth"])
    ] == [6, 6]
    assert list(stored["forecasts"][0]["quantiles"]) == ["0.1", "0.5", "0.9"]
    assert scores["windows"] == 2
    assert scores["crps"] > 0
    assert list(scores["against"]) == ["last value", "season 5", "mean"]
    printed = capsys.readouterr()
    for words in (
        "against what came",
        "against season 5",
        "of 4 drawn continuations",
        "2 of 105 windows, 6 steps",
    ):
        assert words in " ".join(printed.out.split())
    rows = "date,a,b\n" + "".join(
        f"2020-01-{day:02} 00:00:00,{day},{-day}\n" for day in range(1, 29)
    )
    (tmp_path / "my.csv").write_text(rows)
    run_command(
        "forecast", ["with", "run=runs/1", "csv=my.csv", "horizon=6", "samples=4", "out=mine"]
    )
    with (tmp_path / "mine.csv").open() as file:
        stored = list(csv.DictReader(file))
    assert [row["series"] for row in stored] == ["a"] * 6 + ["b"] * 6
    assert [row["column"] for row in stored] == ["a"] * 6 + ["b"] * 6
    assert stored[0]["date"] == "2020-01-29 00:00:00"
    assert all(float(row["q0.1"]) <= float(row["q0.5"]) <= float(row["q0.9"]) for row in stored)
    assert (tmp_path / "mine.png").stat().st_size > 5000
    with pytest.raises(
        ValueError, match=r"direct head is missing: train one with codec\.horizon=6"
    ):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "direct=True"])
    with pytest.raises(
        UserError, match=r"1,000,000,000,000 samples of a forecast would need at least .* GiB"
    ):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "windows=2", "samples=1e12"])
    with pytest.raises(UserError, match=r"season = 19: expected 1 to 18"):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "season=19"])
    with pytest.raises(UserError, match=r"peers = \['arima'\]: expected names among dlinear"):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "peers=arima"])
    with pytest.raises(UserError, match=r"rate = 0\.5: this run was trained for one rate"):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "windows=2", "rate=0.5"])
    with pytest.raises(ValueError, match="horizon = 0"):
        run_command("forecast", ["with", "run=runs/1", "horizon=0"])
    with pytest.raises(ValueError, match="quantiles = "):
        run_command("forecast", ["with", "run=runs/1", "quantiles=[0.9,0.1]"])
    with pytest.raises(FileNotFoundError):
        run_command("forecast", ["with", "run=runs/1", "csv=none.csv", "horizon=6"])


def test_text_has_no_forecast(tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = overrides(tiny_settings)
    run_command("train", ["with", *words])
    with pytest.raises(
        ValueError, match="expected a run of series, for this command can use no other"
    ):
        run_command("forecast", ["with", "run=runs/1"])
