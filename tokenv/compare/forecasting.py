"""Forecasts of a run's test windows, held against what came, beside yardsticks and peers."""

from __future__ import annotations

from tokenv.compare.assessment import Forecasts
from tokenv.compare.wishes import ForecastWish
from tokenv.config.schema import Config
from tokenv.data.series.windows import SeriesData
from tokenv.errors import UserError
from tokenv.forecast.histories import Array, held_out_windows
from tokenv.forecast.made import checked_history, fit_peers, make_forecasts
from tokenv.forecast.scores import Scores
from tokenv.forecast.yardsticks import find_season, yardsticks
from tokenv.run.parts import Parts

QUANTILES = (0.1, 0.5, 0.9)  # the outermost bound the interval whose coverage is told
OF_MODEL, OF_PEER = ("mse", "mae", "crps", "inside"), ("mse", "mae")


def check_wish(config: Config, wish: ForecastWish) -> int:
    """Steps of history that forecasts go on from; refuses what a run of this configuration could not be asked.

    Raises:
        UserError: it is of text, its direct head does not reach so far, its sequences or memory are too short, or the
            season is longer than a history.
    """
    if config.data.kind != "series":
        raise UserError(f"forecast with data.kind = {config.data.kind!r}: expected series, or leave forecast out")
    horizon = _horizon(config, wish)
    return checked_history(config, horizon, samples=wish.samples, direct=wish.direct, season=wish.season)


def _horizon(config: Config, wish: ForecastWish) -> int:
    if wish.horizon is None and not config.model.horizon:
        raise UserError(
            "forecast.horizon is null and model.horizon = 0: expected one of them, the steps to forecast or those that "
            "a direct head predicts"
        )
    return wish.horizon or config.model.horizon


def score_forecasts(
    config: Config, parts: Parts, data: SeriesData, wish: ForecastWish, logit_bias: float = 0.0
) -> Forecasts:
    """Forecast test windows.

    Args:
        config: of the run.
        parts: of the run, in evaluation mode.
        data: of the run.
        wish: what to forecast.
        logit_bias: see ``tokenv.forecast.forecast.forecast``.

    Raises:
        UserError: see ``check_wish``; or there are too few test steps.
    """
    known, horizon = check_wish(config, wish), _horizon(config, wish)
    season = wish.season or find_season(data.series, known)
    histories, points = held_out_windows(data, horizon, wish.windows), yardsticks(horizon, season)
    points |= fit_peers(wish.peers, data, horizon)
    scores = Scores(QUANTILES)
    every = make_forecasts(
        parts, histories, points, QUANTILES, samples=wish.samples, direct=wish.direct, logit_bias=logit_bias
    )
    for made in every:
        scores.add(made.forecast.law, made.quantile_BQHC, made.batch, made.point_BHC)
    error, cluster_W = scores.each()

    def listed(name: str) -> list[float]:
        value_W: Array = error[name]
        return [float(value) for value in value_W]

    return Forecasts(
        horizon=horizon,
        total=histories.total,
        cluster=cluster_W.tolist(),
        error={name: listed(name) for name in OF_MODEL},
        peers={peer: {name: listed(f"{name} {peer}") for name in OF_PEER} for peer in points},
    )
