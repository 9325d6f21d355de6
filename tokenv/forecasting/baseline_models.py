"""Baselines of forecasts: the last value, the last season's, the history's mean, DLinear fitted to a run's data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np

from tokenv.core.errors import UserError
from tokenv.data.windows import Series, SeriesData, moments
from tokenv.forecasting.contexts import Array, ContextBatch
from tokenv.forecasting.linear_fit import fit_linear_map
from tokenv.lm.codecs.series import LAST, LOCATION, SCALE, VALUE, predict_linear

Baselines: TypeAlias = dict[str, Callable[[ContextBatch], Array]]  # name to point forecasts [B, H, C]
MIN_AUTOCORRELATION = 0.1  # of a season, which must also exceed four standard errors of noise
NEAR_BEST = 0.8  # of the best, or three standard errors below: the shortest such season is taken, not its multiples
PEAK_RANGE = 1.2  # times that season: range in which the highest peak is taken, because noise lies on a broad one


def naive_baselines(horizon: int, season: int) -> Baselines:
    """Return the naive baselines by name.

    Args:
        horizon: number of steps H.
        season: steps of a season, see ``find_season``; 1 for none, whose forecast would be the last value.
    """
    seasonal = {f"season {season}": partial(_seasonal, horizon=horizon, season=season)} if season > 1 else {}
    return {"last value": partial(_seasonal, horizon=horizon, season=1), **seasonal, "mean": partial(_mean, horizon)}


def check_season(season: int, history: int) -> None:
    """Check that a history holds a season.

    Raises:
        UserError: ``season`` is not from 1 to the steps of a history.
    """
    if not 1 <= season <= history:
        raise UserError(f"season = {season}: expected 1 to {history}, the steps of history before a forecast")


def _mean(horizon: int, batch: ContextBatch) -> Array:
    """Forecast the history's mean, or its frame's location if it holds no value."""
    mean_BC, _ = moments(batch.symbol_BL[..., VALUE].numpy(), axis=1)
    mean_BC = np.where(np.isnan(mean_BC), batch.symbol_BL[:, 0, :, LOCATION].numpy(), mean_BC)
    return mean_BC[:, None].repeat(horizon, 1)


def _seasonal(batch: ContextBatch, *, horizon: int, season: int) -> Array:
    """Forecast the value of the same step in the last known season, or the last value if that is missing."""
    value_BLC, length = batch.symbol_BL[..., VALUE].numpy(), batch.symbol_BL.shape[1]
    last_BC = np.where(np.isnan(value_BLC[:, -1]), batch.symbol_BL[:, -1, :, LAST].numpy(), value_BLC[:, -1])
    index_H = length - season + np.arange(horizon) % season
    seasonal_BHC = value_BLC[:, np.maximum(index_H, 0)]
    missing = np.isnan(seasonal_BHC) | (index_H < 0)[:, None]
    return np.where(missing, last_BC[:, None], seasonal_BHC)


def find_season(series: Sequence[Series], longest: int) -> int:
    """Return the steps of a season, by the autocorrelation of the training steps' differences, averaged over series.

    Differences are free of trends and of a drifting level. Of the local maxima which stand out from noise and from
    the lags before, the first which comes near the highest is taken; 1 if there is none.

    Args:
        series: series with training steps.
        longest: largest number of steps of a season.
    """
    correlation_SK = []
    for each in series:
        for value_L in each.value_LC[: each.borders.train].T:
            correlation_SK.append(_autocorrelation(np.diff(value_L), longest))
    steps = max((each.borders.train for each in series), default=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # lags for which no series is long enough
        correlation_K = np.nanmean(correlation_SK, 0)
    noise, inner_K = 1 / np.sqrt(max(steps, 1)), correlation_K[1:-1]
    threshold = max(MIN_AUTOCORRELATION, 4 * noise)
    rise_K = inner_K - np.fmin.accumulate(inner_K)
    peak_K = (
        (inner_K > correlation_K[:-2]) & (inner_K >= correlation_K[2:]) & (inner_K >= threshold) & (rise_K >= threshold)
    )
    if not peak_K.any():
        return 1
    top = inner_K[peak_K].max()
    first = int(np.flatnonzero(peak_K & (inner_K >= min(NEAR_BEST * top, top - 3 * noise)))[0])
    return first + int(np.argmax(inner_K[first : int(PEAK_RANGE * (first + 1))])) + 1


def _autocorrelation(value_L: Array, longest: int) -> Array:
    """Return the autocorrelation [K] of lags 0 to ``longest`` + 1 over known pairs; NaN for over half the steps."""
    lags = longest + 2
    known_L = ~np.isnan(value_L)
    correlation_K = np.full(lags, np.nan)
    if known_L.sum() < 2:
        return correlation_K
    centred_L = np.where(known_L, value_L - value_L[known_L].mean(), 0.0)
    size = 1 << (len(value_L) + lags).bit_length()
    spectra = [
        np.fft.irfft(np.abs(np.fft.rfft(x_L, size)) ** 2, size) for x_L in (centred_L, known_L.astype(np.float64))
    ]
    usable = min(lags, len(value_L) // 2)
    product_K, pairs_K = (x_L[:usable] for x_L in spectra)
    covariance_K = product_K / np.maximum(pairs_K, 1.0)
    if usable and covariance_K[0] > 0:
        correlation_K[:usable] = covariance_K / covariance_K[0]
    return correlation_K


def fit_dlinear(data: SeriesData, horizon: int) -> Callable[[ContextBatch], Array]:
    """Fit DLinear to all training windows; see ``tokenv.forecasting.linear_fit``.

    Args:
        data: data of the run.
        horizon: number of steps H at the end of every window.

    Returns:
        A function from histories to forecasts [B, H, C] on the original scale.

    Raises:
        UserError: every window has a missing value.
    """
    weight_FH = fit_linear_map(data, horizon)

    def predict(batch: ContextBatch) -> Array:
        frame_B1C = batch.symbol_BL[:, :1]
        scaled_BHC = predict_linear(batch.symbol_BL, weight_FH)
        return np.asarray((frame_B1C[..., LOCATION] + frame_B1C[..., SCALE] * scaled_BHC).numpy())

    return predict


_FITS = {"dlinear": fit_dlinear}


def fit_peers(names: Sequence[str], data: SeriesData, horizon: int) -> Baselines:
    """Fit peer models by name to the data's training windows.

    Raises:
        UserError: see ``fit_dlinear``.
    """
    return {name: _FITS[name](data, horizon) for name in names}
