"""Forecasts of many histories, made a batch at a time, beside those that others make of the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tokenv.data.series.windows import SeriesData
from tokenv.forecast.dlinear import fit_dlinear
from tokenv.forecast.forecast import Forecast, forecast, histories_together
from tokenv.forecast.histories import Array, Batch, Histories
from tokenv.forecast.yardsticks import Points
from tokenv.run.parts import Parts

_FIT = {"dlinear": fit_dlinear}


@dataclass(frozen=True)
class Made:
    """Forecasts of a batch.

    Attributes:
        batch: what they go on from, and what came where that is known.
        forecast: the model's.
        quantile_BQHC: its quantiles of the probabilities asked for.
        point_BHC: forecasts of single values, by name.
    """

    batch: Batch
    forecast: Forecast
    quantile_BQHC: Array
    point_BHC: Mapping[str, Array]


def fit_peers(names: Sequence[str], data: SeriesData, horizon: int) -> Points:
    """Fit peers by name to the data's training windows.

    Raises:
        UserError: see ``fit_dlinear``.
    """
    return {name: _FIT[name](data, horizon) for name in names}


def make_forecasts(
    parts: Parts,
    histories: Histories,
    points: Points,
    quantiles: Sequence[float],
    *,
    samples: int,
    direct: bool,
    seed: int = 0,
    rate: float | None = None,
    logit_bias: float = 0.0,
) -> Iterator[Made]:
    """Forecast all histories.

    Args:
        parts: model and agent, in evaluation mode.
        histories: what to go on from.
        points: forecasts of single values by name, made beside.
        quantiles: probabilities, ascending.
        samples: see ``forecast``.
        direct: see ``forecast``.
        seed: of values and boundaries.
        rate: see ``forecast``.
        logit_bias: see ``forecast``.

    Raises:
        UserError: see ``forecast``.
    """
    generator = torch.Generator(parts.lm.head.weight.device).manual_seed(seed)
    for batch in histories.batches(histories_together(samples, direct=direct)):
        made = forecast(
            parts,
            batch,
            histories.horizon,
            samples=samples,
            generator=generator,
            direct=direct,
            rate=rate,
            logit_bias=logit_bias,
        )
        yield Made(batch, made, made.law.quantile(quantiles), {name: point(batch) for name, point in points.items()})
