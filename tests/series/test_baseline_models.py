"""Baselines: naive ones, the estimated season, and a linear model."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_forecast import config, histories, only

from tokenv.core.errors import UserError
from tokenv.series.baseline_models import check_season, find_season, fit_dlinear, naive_baselines
from tokenv.series.config import SeriesConfig
from tokenv.series.contexts import ContextBatch, held_out_windows
from tokenv.series.tables import Recording
from tokenv.series.windows import SeriesData, SplitBorders, series_of


def series(*values):
    return [
        each
        for value_L in values
        for each in series_of(
            Recording("x", [""], np.asarray(value_L)[:, None]),
            SplitBorders(*[len(value_L)] * 3),
            SeriesConfig(),
        )
    ]


def test_naive_baselines_have_known_values():
    value_LC = np.stack([np.arange(24.0), np.arange(24.0) ** 2], 1)
    value_LC[22, 1] = np.nan
    batch = only(histories(value_LC, 7))  # 17 steps of history, from 7 on
    forecasts = {name: point(batch)[..., 0] for name, point in naive_baselines(7, 4).items()}
    assert list(forecasts) == ["last value", "season 4", "mean"]
    assert forecasts["last value"].tolist() == [[23.0] * 7, [529.0] * 7]
    assert forecasts["season 4"][0].tolist() == [20, 21, 22, 23, 20, 21, 22]
    # the last value where one is missing
    assert forecasts["season 4"][1].tolist() == [400, 441, 529, 529, 400, 441, 529]
    np.testing.assert_allclose(forecasts["mean"][:, 3], [15, np.nanmean(value_LC[7:, 1])])
    assert list(naive_baselines(7, 1)) == ["last value", "mean"]
    assert (naive_baselines(7, 20)["season 20"](batch)[0, :, 0] == [23, 23, 23, 7, 8, 9, 10]).all()


@pytest.mark.parametrize("period", [4, 7, 24])
def test_the_season_is_found_under_noise_and_a_trend(period):
    generator = np.random.default_rng(period)
    step = np.arange(600)
    wave = np.sin(2 * np.pi * step / period)
    value = 3 * wave + 0.3 * generator.normal(size=600).cumsum() + 0.1 * step
    value[generator.random(600) < 0.1] = np.nan
    assert find_season(series(value), 100) == period
    assert find_season(series(value, generator.normal(size=300)), 100) == period


def test_a_series_without_season_has_none():
    generator = np.random.default_rng(0)
    for value in (
        generator.normal(size=500),
        generator.normal(size=500).cumsum(),
        np.ones(500),
        np.arange(500.0),
        np.ones(3),
    ):
        assert find_season(series(value), 100) == 1
    check_season(1, 10)
    for season in (0, 11):
        with pytest.raises(UserError, match=f"season = {season}: expected 1 to 10"):
            check_season(season, 10)


class Both(torch.nn.Module):
    """DLinear as published: a linear map of the moving average over 25 steps, and one of the rest."""

    def __init__(self, history, horizon):
        super().__init__()
        self.trend, self.rest = (torch.nn.Linear(history, horizon).double() for _ in range(2))

    def forward(self, x_BL):
        average_BL = F.avg_pool1d(F.pad(x_BL, (12, 12), mode="replicate"), 25, stride=1)
        return self.trend(average_BL) + self.rest(x_BL - average_BL)


def test_the_exact_solution_is_the_limit_of_training_dlinear():
    """Trained by gradients on the same windows for long, DLinear comes near its error and not below."""
    generator = np.random.default_rng(0)
    value_L = np.sin(np.arange(400) / 3) + 0.5 * generator.normal(size=400).cumsum()
    data = SeriesData([Recording("x", [""], value_L[:, None])], config().data)
    windows = data.windows("training")
    symbol_BN = windows.take(np.arange(len(windows))).symbol_BN
    history = symbol_BN[:, :16]
    scale_B = symbol_BN[:, 0, 0, 2]
    batch = ContextBatch(["x"] * len(windows), data.series * len(windows), history, [None] * len(windows), None,
                  torch.arange(len(windows)))  # fmt: skip
    truth_BH = symbol_BN[:, 16:, 0, 0]
    std = float(data.series[0].std_C[0])
    found_BH = torch.from_numpy(fit_dlinear(data, 8)(batch))[..., 0]
    least = ((found_BH - truth_BH) / std).square().mean().item()
    model = Both(16, 8)
    x_BL = (history[..., 0, 0] - history[..., 0, 1]) / history[..., 0, 2]
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=400, line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        made_BH = history[:, :1, 0, 1] + scale_B[:, None] * model(x_BL)
        value = ((made_BH - truth_BH) / std).square().mean()
        value.backward()
        return value

    optimizer.step(loss)
    assert loss().item() == pytest.approx(least, rel=0.05)


def test_a_linear_model_forecasts_a_linear_series():
    """A wave without noise is a linear function of any of its histories."""
    step = np.arange(900)
    value_L = np.sin(2 * np.pi * step / 8) + 0.5 * np.sin(2 * np.pi * step / 5)
    value_L[200:203] = np.nan
    data = SeriesData([Recording("x", [""], value_L[:, None])], config().data)
    fitted = fit_dlinear(data, 8)
    batch = only(held_out_windows(data, 8, 20))
    others = [
        np.square(point(batch) - batch.truth_BHC).mean() for point in naive_baselines(8, 1).values()
    ]
    assert np.square(fitted(batch) - batch.truth_BHC).mean() < 0.001 * min(others)
    short = only(histories(value_L[:11, None], 8))
    assert fitted(short).shape == (1, 8, 1)
