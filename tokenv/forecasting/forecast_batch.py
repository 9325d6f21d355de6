"""Forecasts of many histories, made a batch at a time, beside those that others make of the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenv.config.components import Components
from tokenv.config.hardware import check_forecast
from tokenv.config.schema import Config
from tokenv.data.series.windows import SeriesData
from tokenv.evaluation.evaluator import DEFAULTS, EvalOptions
from tokenv.forecasting.contexts import Array, ContextBatch, ForecastContexts, history_steps
from tokenv.forecasting.dlinear import fit_dlinear
from tokenv.forecasting.forecaster import Forecast, check_horizon, forecast, histories_together
from tokenv.forecasting.naive_baselines import Points, check_season

_FIT = {"dlinear": fit_dlinear}


@dataclass(frozen=True)
class ForecastBatch:
    """Forecasts of a batch.

    Attributes:
        batch: what they go on from, and what came where that is known.
        forecast: the model's.
        quantile_BQHC: its quantiles of the probabilities asked for.
        point_BHC: forecasts of single values, by name.
    """

    batch: ContextBatch
    forecast: Forecast
    quantile_BQHC: Array
    point_BHC: Mapping[str, Array]


def checked_history(config: Config, horizon: int, *, samples: int, direct: bool, season: int | None = None) -> int:
    """Steps of history that forecasts go on from, of a run that can make them.

    Args:
        config: of the run.
        horizon: steps to forecast.
        samples: see ``forecast``.
        direct: see ``forecast``.
        season: steps of a season; None to find it.

    Raises:
        UserError: see ``history_steps``, ``check_season``, ``check_horizon`` and ``check_forecast``.
    """
    known = history_steps(config, horizon)
    check_season(season or 1, known)
    check_horizon(config.model, horizon, direct=direct)
    if not direct:
        check_forecast(config, samples, horizon)
    return known


def fit_peers(names: Sequence[str], data: SeriesData, horizon: int) -> Points:
    """Fit peers by name to the data's training windows.

    Raises:
        UserError: see ``fit_dlinear``.
    """
    return {name: _FIT[name](data, horizon) for name in names}


def make_forecasts(
    parts: Components,
    histories: ForecastContexts,
    points: Points,
    quantiles: Sequence[float],
    options: EvalOptions = DEFAULTS,
    *,
    samples: int,
    direct: bool,
) -> Iterator[ForecastBatch]:
    """Forecast all histories.

    Args:
        parts: model and agent, in evaluation mode.
        histories: what to go on from.
        points: forecasts of single values by name, made beside.
        quantiles: probabilities, ascending.
        options: see ``forecast``.
        samples: see ``forecast``.
        direct: see ``forecast``.

    Raises:
        UserError: see ``forecast``.
    """
    generator = torch.Generator(parts.lm.head.weight.device).manual_seed(options.seed)
    for batch in histories.batches(histories_together(samples, direct=direct)):
        made = forecast(
            parts,
            batch,
            histories.horizon,
            options,
            samples=samples,
            generator=generator,
            direct=direct,
        )
        yield ForecastBatch(
            batch, made, made.law.quantile(quantiles), {name: point(batch) for name, point in points.items()}
        )
