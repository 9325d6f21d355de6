"""Baselines of forecasts: the last value, the last season's, the history's mean, and DLinear, fitted to a run's data.

DLinear (Zeng et al. 2023, arXiv 2205.13504) is solved exactly. It forecasts a history by one linear map of its moving
average and one of the remainder, whose sum is any linear map of the history: least squares finds the minimum of its
squared error on the training windows in one pass, which its published training approaches (Toner & Darlow 2024, arXiv
2403.14587). A ridge, chosen on the validation windows, takes the place of early stopping. ``codec.linear_path`` puts
this map into a model.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from scipy import signal
from torch import Tensor

from tokenv.core.errors import UserError
from tokenv.lm.unet import UNet
from tokenv.series.codec import (
    LAST,
    LOCATION,
    SCALE,
    VALUE,
    SeriesCodec,
    known_values,
    predict_linear,
)
from tokenv.series.contexts import Array, ContextBatch
from tokenv.series.windows import Series, SeriesData, Windows, moments

# name to point forecasts [B, H, C]
Baselines: TypeAlias = dict[str, Callable[[ContextBatch], Array]]
MIN_AUTOCORRELATION = 0.1  # of a season, which must also exceed four standard errors of noise
# of the best, or three standard errors below: the shortest such season is taken, not its multiples
NEAR_BEST = 0.8
# times that season: range in which the highest peak is taken, because noise lies on a broad one
PEAK_RANGE = 1.2
RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # relative to a window's mean square
MAX_BATCH = 256
MAX_VALIDATION_WINDOWS = 4096


def naive_baselines(horizon: int, season: int) -> Baselines:
    """Return the naive baselines by name.

    Args:
        horizon: number of steps H.
        season: steps of a season, see ``find_season``; 1 for none, whose forecast would be the last value.
    """
    baselines: Baselines = {"last value": partial(_seasonal, horizon=horizon, season=1)}
    if season > 1:
        baselines[f"season {season}"] = partial(_seasonal, horizon=horizon, season=season)
    baselines["mean"] = partial(_mean, horizon)
    return baselines


def check_season(season: int, history: int) -> None:
    """Check that a history holds a season.

    Raises:
        UserError: ``season`` is not from 1 to the steps of a history.
    """
    if not 1 <= season <= history:
        raise UserError(
            f"season = {season}: expected 1 to {history}, the steps of history before a forecast"
        )


def _mean(horizon: int, batch: ContextBatch) -> Array:
    """Forecast the history's mean, or its frame's location if it holds no value."""
    mean_BC, _ = moments(batch.channel_BL[..., VALUE].numpy(), axis=1)
    mean_BC = np.where(np.isnan(mean_BC), batch.channel_BL[:, 0, :, LOCATION].numpy(), mean_BC)
    return mean_BC[:, None].repeat(horizon, 1)


def _seasonal(batch: ContextBatch, *, horizon: int, season: int) -> Array:
    """Forecast the value of the same step in the last known season, or the last value if that is missing."""
    value_BLC = batch.channel_BL[..., VALUE].numpy()
    before_BC = batch.channel_BL[:, -1, :, LAST].numpy()
    last_BC = np.where(np.isnan(value_BLC[:, -1]), before_BC, value_BLC[:, -1])
    index_H = value_BLC.shape[1] - season + np.arange(horizon) % season
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
    # of lags for which no series is long enough
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        correlation_K = np.nanmean(correlation_SK, 0)
    noise = 1 / np.sqrt(max(steps, 1))
    threshold = max(MIN_AUTOCORRELATION, 4 * noise)
    inner_K = correlation_K[1:-1]
    highest_K = (inner_K > correlation_K[:-2]) & (inner_K >= correlation_K[2:])
    rise_K = inner_K - np.fmin.accumulate(inner_K)
    peak_K = highest_K & (inner_K >= threshold) & (rise_K >= threshold)
    if not peak_K.any():
        return 1
    top = inner_K[peak_K].max()
    high_K = inner_K >= min(NEAR_BEST * top, top - 3 * noise)
    first = int(np.flatnonzero(peak_K & high_K)[0])
    near_K = inner_K[first : int(PEAK_RANGE * (first + 1))]
    return first + int(np.argmax(near_K)) + 1


def _autocorrelation(value_L: Array, longest: int) -> Array:
    """Return the autocorrelation [K] of lags 0 to ``longest`` + 1 over known pairs; NaN for over half the steps."""
    lags = longest + 2
    known_L = ~np.isnan(value_L)
    correlation_K = np.full(lags, np.nan)
    if known_L.sum() < 2:
        return correlation_K
    centred_L = np.where(known_L, value_L - value_L[known_L].mean(), 0.0)
    usable = min(lags, len(value_L) // 2)
    product_K = _lagged_products(centred_L)[:usable]
    pairs_K = _lagged_products(known_L.astype(np.float64))[:usable]
    covariance_K = product_K / np.maximum(pairs_K, 1.0)
    if usable and covariance_K[0] > 0:
        correlation_K[:usable] = covariance_K / covariance_K[0]
    return correlation_K


def _lagged_products(x_L: Array) -> Array:
    """Return the sums of products of all pairs which lie 0, 1, … steps apart."""
    return np.asarray(signal.correlate(x_L, x_L, method="fft")[len(x_L) - 1 :])


def fit_linear_map(data: SeriesData, horizon: int) -> Tensor:
    """Fit the map to the windows on which a run trains, framed as the run's model reads them.

    The squared error is that of standardised values, by which forecasts are scored. Missing values of a history are
    replaced by the last known one; windows with a missing target value are left out.

    Args:
        data: data of the run.
        horizon: number of steps H at the end of every window.

    Returns:
        Weights, float64 [L + 1, H], for ``tokenv.series.codec.predict_linear``.

    Raises:
        UserError: every window has a missing value.
    """
    training = data.windows("training")
    square_FF, product_FH = _sums(training, np.arange(len(training)), horizon)
    if not square_FF[-1, -1]:  # the sum of all weights
        raise UserError(
            "peers = ['dlinear'] or codec.linear_path: every training window has a missing value in its last "
            f"{horizon} steps: expected some without"
        )
    held_out = data.windows("validation", before=data.config.seq_len - horizon, stride=1)
    count = min(len(held_out), MAX_VALIDATION_WINDOWS)
    chosen_P = np.linspace(0, len(held_out) - 1, count).astype(np.int64)
    validation = _sums(held_out, chosen_P, horizon)
    ridge = square_FF.diagonal().mean() * torch.eye(len(square_FF), dtype=torch.float64)
    weights = [torch.linalg.solve(square_FF + factor * ridge, product_FH) for factor in RIDGES]
    return min(weights, key=lambda weight_FH: _squared_error(weight_FH, *validation))


def fit_to_training_steps(lm: UNet, data: SeriesData) -> None:
    """Set what a model takes from the training steps before its first update: linear path, moments of covariates."""
    codec = lm.codec
    if not isinstance(codec, SeriesCodec):
        return
    if codec.linear_path:
        lm.auxiliary_head.linear_path.copy_(fit_linear_map(data, codec.horizon))
    if codec.covariates:
        codec.set_covariate_moments(*data.covariate_moments())


def fit_dlinear(data: SeriesData, horizon: int) -> Callable[[ContextBatch], Array]:
    """Fit DLinear to all training windows; see ``fit_linear_map``.

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
        frame_B1C = batch.channel_BL[:, :1]
        scaled_BHC = predict_linear(batch.channel_BL, weight_FH)
        return np.asarray((frame_B1C[..., LOCATION] + frame_B1C[..., SCALE] * scaled_BHC).numpy())

    return predict


def fit_peers(names: Sequence[str], data: SeriesData, horizon: int) -> Baselines:
    """Fit peer models by name, of which there is one, to the data's training windows.

    Raises:
        UserError: see ``fit_dlinear``.
    """
    return {name: fit_dlinear(data, horizon) for name in names}


def _sums(windows: Windows, index_P: Array, horizon: int) -> tuple[Tensor, Tensor]:
    """Return sums over windows of features times features, the last of which is the weight, and times targets."""
    features = windows.config.seq_len - horizon + 1
    square_FF = torch.zeros(features, features, dtype=torch.float64)
    product_FH = torch.zeros(features, horizon, dtype=torch.float64)
    for x_WF, y_WH in _examples(windows, index_P, horizon):
        square_FF += x_WF.T @ x_WF
        product_FH += x_WF.T @ y_WH
    return square_FF, product_FH


def _examples(windows: Windows, index_P: Array, horizon: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features and targets, both weighted such that errors are those of standardised values."""
    for first in range(0, len(index_P), MAX_BATCH):
        index_B = index_P[first : first + MAX_BATCH]
        series = [windows.series[index] for index in windows.series_P[index_B]]
        std_BC = torch.from_numpy(np.stack([each.std_C for each in series]))
        symbol_BN = windows.take(index_B).symbol_BN[:, :, : std_BC.shape[1]]  # without covariates
        ahead = symbol_BN[:, -horizon:]
        value, location, scale, _, _ = ahead.unbind(-1)
        weight_BC1 = (scale[:, 0] / std_BC).unsqueeze(-1)
        y_BCH = ((value - location) / scale).mT
        complete_BC = ~y_BCH.isnan().any(-1)
        x_BCF = F.pad(known_values(symbol_BN[:, :-horizon]).mT, (0, 1), value=1.0)
        yield (x_BCF * weight_BC1)[complete_BC], (y_BCH * weight_BC1)[complete_BC]


def _squared_error(weight_FH: Tensor, square_FF: Tensor, product_FH: Tensor) -> float:
    """Return the squared error of a map on windows with these sums, up to a constant."""
    return float(((square_FF @ weight_FH - 2 * product_FH) * weight_FH).sum())
