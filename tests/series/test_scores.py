"""Scores accumulated batch by batch equal those of all at once, and intervals have their coverage."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from tokenv.series.codec import SeriesCodec
from tokenv.series.contexts import ContextBatch
from tokenv.series.report import score_rows, warnings_of
from tokenv.series.scores import ParametricForecast, SampleForecast, ScoreAccumulator
from tokenv.series.windows import Series, SplitBorders

QUANTILES = [0.1, 0.5, 0.9]


def batch_of(truth_BHC, scale=1.0, clusters=None):
    count, _, channels = truth_BHC.shape
    series = Series("x", ["a"] * channels, np.zeros((9, channels)), SplitBorders(9, 9, 9), np.zeros(channels),
                    np.full(channels, scale))  # fmt: skip
    cluster_B = torch.arange(count) if clusters is None else torch.as_tensor(clusters)
    return ContextBatch(
        ["x"] * count,
        [series] * count,
        torch.zeros(count, 4, channels, 5),
        [None] * count,
        truth_BHC,
        cluster_B,
    )


def rows(forecast, chosen):
    return SampleForecast(forecast.sample_BSHC[chosen])


def added(forecast, batch, points, parts):
    scores = ScoreAccumulator(QUANTILES)
    for chosen in parts:
        some = ContextBatch(batch.names[chosen], batch.series[chosen], batch.symbol_BL[chosen], batch.date_BN[chosen],
                     batch.truth_BHC[chosen], batch.cluster_B[chosen])  # fmt: skip
        mine = rows(forecast, chosen)
        scores.add(
            mine,
            mine.quantile(QUANTILES),
            some,
            {name: value[chosen] for name, value in points.items()},
        )
    return scores.result()


def test_batches_add_up_and_leave_out_missing_values():
    generator = np.random.default_rng(0)
    forecast = SampleForecast(generator.normal(size=(9, 5, 4, 2)))
    truth_BHC = generator.normal(size=(9, 4, 2))
    truth_BHC[0, 2:] = np.nan
    truth_BHC[3] = np.nan
    points = {"zero": np.zeros((9, 4, 2))}
    batch = batch_of(truth_BHC, scale=2.0, clusters=[0, 0, 1, 1, 2, 2, 2, 3, 3])
    whole = added(forecast, batch, points, [slice(None)])
    for parts in ([slice(0, 4), slice(4, 9)], [slice(i, i + 1) for i in range(9)]):
        scores = added(forecast, batch, points, parts)
        assert scores.against == whole.against
        np.testing.assert_allclose(
            [*vars(scores).values()][:7], [*vars(whole).values()][:7], rtol=1e-12
        )
        assert (scores.below, scores.inside, scores.inside_error) == (
            whole.below,
            whole.inside,
            whole.inside_error,
        )
    squares = []
    inside = []
    for row in (0, 1, 2, 4, 5, 6, 7, 8):
        present = slice(0, 2) if row == 0 else slice(None)
        squares.append(
            np.square((forecast.sample_BSHC[row].mean(0) - truth_BHC[row])[present] / 2).mean()
        )
        low, high = np.quantile(forecast.sample_BSHC[row], [0.1, 0.9], axis=0, method="weibull")
        inside.append(((low <= truth_BHC[row]) & (truth_BHC[row] <= high))[present].mean())
    assert whole.windows == 8
    assert whole.mse == pytest.approx(np.mean(squares))
    assert whole.inside == pytest.approx(np.mean(inside))
    zero = np.mean([np.nanmean(np.square(truth_BHC[row] / 2)) for row in (0, 1, 2, 4, 5, 6, 7, 8)])
    assert whole.against["zero"].mse == pytest.approx(zero)
    assert whole.against["zero"].skill_mse == pytest.approx(1 - np.mean(squares) / zero)


def test_a_true_density_has_its_coverage():
    """Standard normal densities, and values drawn from them: coverage, scores and skill in closed form."""
    count = 4000
    codec = SeriesCodec(4, density="gaussian")
    raw = torch.zeros(count, 5, 2, dtype=torch.float64)
    raw[..., 1] = np.log(np.expm1(1 - 1e-3)) - np.log(np.e - 1)  # a scale of one
    forecast = ParametricForecast(
        codec, raw, torch.full((count, 1, 1), 3.0).double(), torch.full((count, 1, 1), 2.0).double()
    )
    truth_BHC = 3 + 2 * np.random.default_rng(0).normal(size=(count, 5, 1))
    scores = ScoreAccumulator(QUANTILES)
    scores.add(
        forecast,
        forecast.quantile(QUANTILES),
        batch_of(truth_BHC, scale=2.0),
        {"far": np.full((count, 5, 1), 5.0)},
    )
    result = scores.result()
    np.testing.assert_allclose(
        forecast.quantile(QUANTILES)[0, :, 0, 0], 3 + 2 * norm.ppf(QUANTILES), rtol=1e-12
    )
    np.testing.assert_allclose(result.below, QUANTILES, atol=4 * 0.5 / 20_000**0.5)
    assert result.inside == pytest.approx(0.8, abs=4 * result.inside_error)
    assert 0 < result.inside_error < 0.005
    assert result.mse == pytest.approx(1, abs=4 * result.mse_error)
    assert result.crps == pytest.approx(1 / np.sqrt(np.pi), abs=4 * result.crps_error)
    assert result.against["far"].skill_mse == pytest.approx(0.5, abs=0.02)
    assert result.against["far"].z_score > 20


def test_too_few_windows_are_reported():
    generator = np.random.default_rng(1)
    forecast = SampleForecast(generator.normal(size=(6, 30, 4, 1)))
    truth_BHC = generator.normal(size=(6, 4, 1))
    near = forecast.mean_BHC + 0.01 * generator.normal(size=(6, 4, 1))
    result = added(forecast, batch_of(truth_BHC), {"near": near, "far": near + 50}, [slice(None)])
    (warning,) = warnings_of(result, 100)
    assert "6 of 100 windows do not distinguish the model from near:" in warning
    assert warnings_of(result, 6) == []
    one = added(forecast, batch_of(truth_BHC, clusters=[0] * 6), {"far": near + 50}, [slice(None)])
    assert "from far" in warnings_of(one, 100)[0]


def test_what_is_unknown_is_not_written_as_a_number():
    """A single window has no standard error, a baseline without error no skill, and no window no score."""
    truth_BHC = np.ones((1, 4, 1))
    forecast = SampleForecast(np.random.default_rng(0).normal(size=(1, 3, 4, 1)))
    one = score_rows(
        added(forecast, batch_of(truth_BHC), {"perfect": truth_BHC}, [slice(None)]), 9, 4
    )
    none = score_rows(added(forecast, batch_of(truth_BHC * np.nan), {}, [slice(None)]), 9, 4)
    assert "nan" not in f"{one} {none}"
    assert "±" not in f"{one} {none}"
    assert one["against perfect"] == "0.0000, 0.0000; – – –"
    assert none["MSE"] == "–"


def test_no_windows_score_nan():
    forecast = SampleForecast(np.zeros((2, 3, 4, 1)))
    scores = added(forecast, batch_of(np.full((2, 4, 1), np.nan)), {}, [slice(None)])
    assert scores.windows == 0
    assert np.isnan([scores.mse, scores.mse_error, scores.inside]).all()
