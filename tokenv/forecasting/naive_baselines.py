"""Forecasts that everybody has for nothing: the last value, the last season's, the history's mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from tokenv.core.errors import UserError
from tokenv.data.series.windows import Series, moments
from tokenv.forecasting.contexts import Array, ContextBatch
from tokenv.lm.codecs.series import LAST, LOCATION, VALUE

Points: TypeAlias = dict[str, Callable[[ContextBatch], Array]]  # name to forecasts [B, H, C] of single values
CLEAR = 0.1  # an autocorrelation below this is no season, nor one within four standard errors of noise
NEARLY = 0.8  # of the best, or three standard errors below: the shortest such season is taken, not its multiples
AROUND = 1.2  # times that season: the highest peak up to here, as a broad one has noise upon it


def naive_baselines(horizon: int, season: int) -> Points:
    """Yardsticks by name.

    Args:
        horizon: steps H to forecast.
        season: steps of one, see ``find_season``; where it is 1 its forecast is the last value, and left out.
    """
    seasonal = {f"season {season}": partial(_seasonal, horizon=horizon, season=season)} if season > 1 else {}
    return {"last value": partial(_seasonal, horizon=horizon, season=1), **seasonal, "mean": partial(_mean, horizon)}


def check_season(season: int, history: int) -> None:
    """Refuse a season that no history holds.

    Raises:
        UserError: ``season`` is not from 1 to the steps of a history.
    """
    if not 1 <= season <= history:
        raise UserError(f"season = {season}: expected 1 to {history}, the steps that a forecast goes on from")


def _mean(horizon: int, batch: ContextBatch) -> Array:
    """The history's mean; its frame's location where it holds no value."""
    mean_BC, _ = moments(batch.symbol_BL[..., VALUE].numpy(), axis=1)
    mean_BC = np.where(np.isnan(mean_BC), batch.symbol_BL[:, 0, :, LOCATION].numpy(), mean_BC)
    return mean_BC[:, None].repeat(horizon, 1)


def _seasonal(batch: ContextBatch, *, horizon: int, season: int) -> Array:
    """The value of the same place in the last season that is known; the last value where that is missing."""
    value_BLC, known = batch.symbol_BL[..., VALUE].numpy(), batch.symbol_BL.shape[1]
    last_BC = np.where(np.isnan(value_BLC[:, -1]), batch.symbol_BL[:, -1, :, LAST].numpy(), value_BLC[:, -1])
    place_H = known - season + np.arange(horizon) % season
    found_BHC = value_BLC[:, np.maximum(place_H, 0)]
    missing = np.isnan(found_BHC) | (place_H < 0)[:, None]
    return np.where(missing, last_BC[:, None], found_BHC)


def find_season(series: Sequence[Series], longest: int) -> int:
    """Steps of a season, by the autocorrelation of the training steps' differences, averaged over all series.

    Differences are free of trends and of a wandering level. Of the local maxima that stand out from noise and from
    the lags before, the first that comes near the highest is taken; 1 where there is none.

    Args:
        series: whose training steps are read.
        longest: seasons of more steps are not looked for.
    """
    found_SK = []
    for each in series:
        for value_L in each.value_LC[: each.borders.train].T:
            found_SK.append(_autocorrelation(np.diff(value_L), longest))
    steps = max((each.borders.train for each in series), default=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # lags that no series is long enough for
        found_K = np.nanmean(found_SK, 0)
    noise, inner_K = 1 / np.sqrt(max(steps, 1)), found_K[1:-1]
    clear = max(CLEAR, 4 * noise)
    rise_K = inner_K - np.fmin.accumulate(inner_K)
    peak_K = (inner_K > found_K[:-2]) & (inner_K >= found_K[2:]) & (inner_K >= clear) & (rise_K >= clear)
    if not peak_K.any():
        return 1
    top = inner_K[peak_K].max()
    first = int(np.flatnonzero(peak_K & (inner_K >= min(NEARLY * top, top - 3 * noise)))[0])
    return first + int(np.argmax(inner_K[first : int(AROUND * (first + 1))])) + 1


def _autocorrelation(value_L: Array, longest: int) -> Array:
    """Of lags 0 to ``longest`` + 1, over the pairs that are known; NaN where a lag is over half the steps: [K]."""
    lags = longest + 2
    seen_L = ~np.isnan(value_L)
    found_K = np.full(lags, np.nan)
    if seen_L.sum() < 2:
        return found_K
    centred_L = np.where(seen_L, value_L - value_L[seen_L].mean(), 0.0)
    size = 1 << (len(value_L) + lags).bit_length()
    both = [np.fft.irfft(np.abs(np.fft.rfft(x_L, size)) ** 2, size) for x_L in (centred_L, seen_L.astype(np.float64))]
    usable = min(lags, len(value_L) // 2)
    product_K, pairs_K = (x_L[:usable] for x_L in both)
    covariance_K = product_K / np.maximum(pairs_K, 1.0)
    if usable and covariance_K[0] > 0:
        found_K[:usable] = covariance_K / covariance_K[0]
    return found_K
