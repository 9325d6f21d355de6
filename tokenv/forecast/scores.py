"""How good forecasts were."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tokenv.forecast.forecast import Array, Forecast, HeldOut
from tokenv.lm.codecs.series import VALUE
from tokenv.run.evaluate import clustered_standard_error


@dataclass(frozen=True)
class ForecastScore:
    """Errors on standardised values (by the training range's mean and standard deviation), missing ones left out.

    Attributes:
        windows: forecasts that were scored.
        mse: mean squared error of the mean forecast.
        mae: mean absolute error of the median forecast.
        crps: continuous ranked probability score, see ``crps``.
        mse_error: standard error of ``mse``, windows of one cluster depending on one another; likewise the others.
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


def crps(sample_S: Array, truth: Array, *, drawn: bool = True) -> Array:
    """Continuous ranked probability score of samples: [S, ..], [..] -> [..], in the values' unit.

    ``E|X - y| - E|X - X'| / 2`` (Gneiting & Raftery 2007). Of drawn samples the second mean is over all pairs of
    different ones, which is unbiased in S (Ferro 2014); of quantiles it is over all pairs.
    """
    count = len(sample_S)
    ordered_S = np.sort(sample_S, axis=0)
    # Sorted, the k-th value is the larger one of k pairs and the smaller one of S - 1 - k.
    weight_S = (2 * np.arange(count) - count + 1).reshape(-1, *[1] * truth.ndim)
    spread = (weight_S * ordered_S).sum(0) / (count * (count - drawn))
    return np.asarray(np.abs(sample_S - truth).mean(0) - spread)


def score_forecasts(forecasts: Sequence[Forecast], held_out: HeldOut) -> ForecastScore:
    """Hold forecasts against what came.

    Args:
        forecasts: B of them.
        held_out: the windows that they continue the beginnings of.
    """
    errors, clusters = [], []
    truth_BNC = held_out.symbol_BN[..., VALUE].numpy()
    for made, of, truth_NC, cluster in zip(forecasts, held_out.series, truth_BNC, held_out.cluster_B, strict=True):
        sample_SHC, value_HC = of.standardise(made.sample_SHC), of.standardise(truth_NC[-made.sample_SHC.shape[1] :])
        each = (
            np.square(sample_SHC.mean(0) - value_HC),
            np.abs(np.median(sample_SHC, 0) - value_HC),
            crps(sample_SHC, value_HC, drawn=made.drawn),
        )
        if not np.isnan(value_HC).all():
            errors.append([np.nanmean(error) for error in each])
            clusters.append(cluster)
    if not errors:
        return ForecastScore(0, *[math.nan] * 6)
    error_W3, cluster_W = torch.tensor(np.array(errors)), torch.stack(clusters)
    spread = [clustered_standard_error(error_W, cluster_W) for error_W in error_W3.T]
    return ForecastScore(len(errors), *error_W3.mean(0).tolist(), *spread)
