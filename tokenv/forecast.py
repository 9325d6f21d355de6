"""Forecasting a series: many possible continuations, boundaries drawn on the way, and how good they were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tokenv import keys
from tokenv.build import Parts
from tokenv.config import Config
from tokenv.data.memory import spread_order
from tokenv.data.series import Series, SeriesData, frame, moments
from tokenv.data.series_table import Recording
from tokenv.lm.generate import generate
from tokenv.lm.series import LOCATION, SCALE, VALUE
from tokenv.report.forecast import Forecasted
from tokenv.report.series import Patched
from tokenv.rollout import rollout

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Forecast:
    """One series' continuations.

    Attributes:
        name: of the series.
        history_LC: what was known, NaN where missing.
        sample_SHC: S equally probable continuations of H steps, on the original scale.
        boundary_L: where patches end in the history, bool; as drawn for the first continuation.
        probability_L: of a boundary in the history.
    """

    name: str
    history_LC: Array
    sample_SHC: Array
    boundary_L: Array
    probability_L: Array


@dataclass(frozen=True)
class ForecastScore:
    """Errors on standardised values (by the training range's mean and standard deviation), missing ones left out.

    Attributes:
        windows: forecasts that were scored.
        mse: mean squared error of the mean forecast.
        mae: mean absolute error of the median forecast.
        crps: continuous ranked probability score, see ``crps``.
        mse_error: standard error of ``mse`` over windows; likewise the others.
        mae_error: see ``mse_error``.
        crps_error: see ``mse_error``.
    """

    windows: int
    mse: float
    mae: float
    crps: float
    mse_error: float
    mae_error: float
    crps_error: float


def history_steps(config: Config, horizon: int) -> int:
    """Steps of history that a model reads before a forecast: all that its sequences leave.

    Raises:
        ValueError: ``horizon`` is below 1, or leaves no step between the context and the forecast.
    """
    known = config.data.seq_len - horizon
    if horizon < 1 or known <= config.data.series.context:
        most = config.data.seq_len - config.data.series.context - 1
        raise ValueError(
            f"horizon = {horizon}: expected 1 to {most}, for the model was trained on sequences of data.seq_len = "
            f"{config.data.seq_len} steps, of which the first {config.data.series.context} are context: train one with "
            "a longer data.seq_len"
        )
    return known


def last_windows(recording: Recording, config: Config, horizon: int) -> tuple[list[str], Tensor]:
    """The end of recorded series, as histories to forecast from.

    Args:
        recording: read with the run's options.
        config: of the run.
        horizon: steps to be forecast.

    Returns:
        Names, and framed symbols [B, L, C, 4]; B series of one channel, or one of all where the run's are joint.

    Raises:
        ValueError: the recording is too short, or a column holds no value.
    """
    wanted, options = history_steps(config, horizon), config.data.series
    value_LC = recording.value_LC[-wanted:]
    if len(value_LC) <= options.context:
        raise ValueError(
            f"{recording.name} has {len(recording.value_LC)} rows: expected more than the data.series.context = "
            f"{options.context} that the model reads first"
        )
    mean_C, std_C = moments(recording.value_LC)
    for column, mean in zip(recording.columns, mean_C, strict=True):
        if math.isnan(mean):
            raise ValueError(f"column {column!r} of {recording.name} holds no value: name others in columns")
    std_C = np.where(std_C > 0, std_C, 1.0)
    if options.joint:
        names, value_BLC, mean_BC, std_BC = [recording.name], value_LC[None], mean_C[None], std_C[None]
    else:
        names, value_BLC = recording.columns, value_LC.T[:, :, None]
        mean_BC, std_BC = mean_C[:, None], std_C[:, None]
    symbol = frame(value_BLC, options.context, mean_BC=mean_BC, std_BC=std_BC, floor=options.floor)
    return names, torch.from_numpy(symbol)


@torch.no_grad()
def forecast(
    parts: Parts,
    names: Sequence[str],
    history_BL: Tensor,
    horizon: int,
    *,
    samples: int = 100,
    seed: int = 0,
    batch_size: int = 512,
    progress: bool = False,
) -> list[Forecast]:
    """Continue histories, value by value, as the model's own density and policy draw them.

    Args:
        parts: model and agent, in evaluation mode.
        names: of the B series.
        history_BL: framed symbols [B, L, C, 4].
        horizon: steps H to write.
        samples: continuations S of every history.
        seed: of values and boundaries.
        batch_size: continuations written together.
        progress: show a bar.

    Raises:
        ValueError: ``samples`` below 2.
    """
    if samples < 2:
        raise ValueError(f"samples = {samples}: expected at least 2, to tell a spread")
    device = parts.lm.head.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    known = history_BL.shape[1]
    prompt = history_BL.repeat_interleave(samples, 0)
    written = []
    for rows in tqdm(prompt.split(batch_size), desc="forecast", unit="batch", leave=False, disable=not progress):
        continued = generate(parts.lm, parts.agent, rows.to(device), horizon, generator=generator)
        z_RHC = continued.symbol_BN[:, known:, :, VALUE].cpu()
        written.append(z_RHC * rows[:, :1, :, SCALE] + rows[:, :1, :, LOCATION])
    sample_BSHC = torch.cat(written).unflatten(0, (-1, samples)).numpy()
    td = rollout(parts.lm, parts.agent, history_BL.to(device), generator=generator)
    boundary_BT, probability_BT = td[keys.ACTION].bool().cpu().numpy(), td[keys.BOUNDARY_PROB].float().cpu().numpy()
    return [
        Forecast(name, history_LC, sample_SHC, boundary_T, probability_T)
        for name, history_LC, sample_SHC, boundary_T, probability_T in zip(
            names, history_BL[..., VALUE].numpy(), sample_BSHC, boundary_BT, probability_BT, strict=True
        )
    ]


def held_out_windows(data: SeriesData, count: int) -> tuple[list[str], list[Series], Tensor]:
    """Windows of the test steps, evenly over all of them.

    Returns:
        Names, series and framed symbols [B, N, C, 4]; the last of the N steps are to be forecast.

    Raises:
        ValueError: the test steps are too few for a window.
    """
    windows = data.windows("test")
    chosen = np.sort(spread_order(len(windows))[:count])
    batch = windows.take(chosen)
    return batch.origin, [data.series[place] for place in windows.place_P[chosen]], batch.symbol_BN


def crps(sample_S: Array, truth: Array) -> Array:
    """Continuous ranked probability score of samples: [S, ..], [..] -> [..], in the values' unit.

    ``E|X - y| - E|X - X'| / 2`` (Gneiting & Raftery 2007), the second mean over all pairs of different samples, which
    is unbiased in S.
    """
    count = len(sample_S)
    ordered_S = np.sort(sample_S, axis=0)
    # Sorted, the k-th value is the larger one of k pairs and the smaller one of S - 1 - k.
    weight_S = (2 * np.arange(count) - count + 1).reshape(-1, *[1] * truth.ndim)
    spread = (weight_S * ordered_S).sum(0) / (count * (count - 1))
    return np.asarray(np.abs(sample_S - truth).mean(0) - spread)


def score(forecasts: Sequence[Forecast], series: Sequence[Series], truth_BHC: Array) -> ForecastScore:
    """Hold forecasts against what came.

    Args:
        forecasts: B of them.
        series: the series of each, by which values are standardised.
        truth_BHC: what came, NaN where missing.
    """
    errors = []
    for made, of, truth_HC in zip(forecasts, series, truth_BHC, strict=True):
        sample_SHC, value_HC = of.standardise(made.sample_SHC), of.standardise(truth_HC)
        each = (
            np.square(sample_SHC.mean(0) - value_HC),
            np.abs(np.median(sample_SHC, 0) - value_HC),
            crps(sample_SHC, value_HC),
        )
        if not np.isnan(value_HC).all():
            errors.append([np.nanmean(error) for error in each])
    error_W3 = np.array(errors).reshape(-1, 3)
    if not len(error_W3):
        return ForecastScore(0, *[math.nan] * 6)
    spread = error_W3.std(0, ddof=1) / math.sqrt(len(error_W3)) if len(error_W3) > 1 else np.full(3, math.nan)
    return ForecastScore(len(error_W3), *error_W3.mean(0).tolist(), *spread.tolist())


def as_pictures(
    forecasts: Sequence[Forecast], quantiles: Sequence[float], context: int, truth_BHC: Array | None
) -> list[Forecasted]:
    """What a report shows of forecasts.

    Args:
        forecasts: B of them.
        quantiles: probabilities.
        context: leading steps of the histories that nothing is predicted of.
        truth_BHC: what came; None if unknown.
    """
    return [
        Forecasted(
            past=Patched(made.name, made.history_LC, made.boundary_L, made.probability_L, context),
            mean_HC=made.sample_SHC.mean(0),
            quantile_QHC=np.quantile(made.sample_SHC, quantiles, axis=0),
            truth_HC=None if truth_BHC is None else truth_BHC[number],
        )
        for number, made in enumerate(forecasts)
    ]
