"""Predictive distributions, and scores of forecasts with standard errors, accumulated batch by batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from tokenv.core.clustered_errors import clustered_standard_error
from tokenv.series.codec import SeriesCodec
from tokenv.series.contexts import Array, ContextBatch

MEDIAN = 0.5


@dataclass(frozen=True)
class PeerScore:
    """Errors of a baseline on the same windows.

    Attributes:
        mse: mean squared error.
        mae: mean absolute error, which is a single value's continuous ranked probability score, too.
        skill_mse: 1 - the model's MSE / ``mse``.
        skill_mae: 1 - the model's MAE / ``mae``.
        skill_crps: 1 - the model's CRPS / ``mae``.
        z_score: difference between ``mse`` and the model's in standard errors, window by window; NaN for one cluster.
    """

    mse: float
    mae: float
    skill_mse: float
    skill_mae: float
    skill_crps: float
    z_score: float


@dataclass(frozen=True)
class ForecastScore:
    """Errors on standardised values (by the training range's mean and standard deviation), missing ones left out.

    Attributes:
        windows: number of scored forecasts.
        mse: mean squared error of the mean forecast.
        mae: mean absolute error of the median forecast.
        crps: continuous ranked probability score.
        mse_error: standard error of ``mse``, with dependent windows within a cluster; likewise the others.
        mae_error: see ``mse_error``.
        crps_error: see ``mse_error``.
        quantiles: probabilities of the quantiles.
        below: share of values at most each quantile.
        inside: share of values between the outermost quantiles.
        inside_error: see ``mse_error``.
        against: baselines by name.
    """

    windows: int
    mse: float
    mae: float
    crps: float
    mse_error: float
    mae_error: float
    crps_error: float
    quantiles: list[float]
    below: list[float]
    inside: float
    inside_error: float
    against: dict[str, PeerScore]


class ScoreAccumulator:
    """Accumulate the errors of many forecasts, a few numbers each.

    Args:
        quantiles: probabilities of the quantiles, ascending.
    """

    def __init__(self, quantiles: Sequence[float]) -> None:
        self._quantiles = list(quantiles)
        self._errors: dict[str, list[Array]] = {}
        self._clusters: list[Array] = []

    def add(
        self,
        distribution: PredictiveDistribution,
        quantile_BQHC: Array,
        batch: ContextBatch,
        points: Mapping[str, Array],
    ) -> None:
        """Score forecasts against the true values.

        Args:
            distribution: the model's forecast.
            quantile_BQHC: quantiles of the model's forecast.
            batch: histories and true values.
            points: forecasts of the baselines by name, [B, H, C] each.
        """
        truth_BHC = batch.truth_BHC
        assert truth_BHC is not None
        std_B1C = np.stack([each.std_C for each in batch.series])[:, None]
        missing_BHC = np.isnan(truth_BHC)
        scored_B = ~missing_BHC.all((1, 2))
        quantile_QBHC = quantile_BQHC.swapaxes(0, 1)
        if MEDIAN in self._quantiles:
            median_BHC = quantile_QBHC[self._quantiles.index(MEDIAN)]
        else:
            median_BHC = distribution.quantile([MEDIAN])[:, 0]

        def add_error(name: str, error_BHC: Array) -> None:
            error_BHC = np.where(missing_BHC, np.nan, error_BHC)[scored_B]
            self._errors.setdefault(name, []).append(np.nanmean(error_BHC, (1, 2)))

        add_error("crps", distribution.crps(truth_BHC) / std_B1C)
        for number, quantile_BHC in enumerate(quantile_QBHC):
            add_error(f"below {number}", (truth_BHC <= quantile_BHC).astype(np.float64))
        inside_BHC = (quantile_QBHC[0] <= truth_BHC) & (truth_BHC <= quantile_QBHC[-1])
        add_error("inside", inside_BHC.astype(np.float64))
        add_error("mse", np.square((distribution.mean_BHC - truth_BHC) / std_B1C))
        add_error("mae", np.abs((median_BHC - truth_BHC) / std_B1C))
        for name, point_BHC in points.items():
            deviation_BHC = (point_BHC - truth_BHC) / std_B1C
            add_error(f"mse {name}", np.square(deviation_BHC))
            add_error(f"mae {name}", np.abs(deviation_BHC))
        self._clusters.append(batch.cluster_B.numpy()[scored_B])

    def each(self) -> tuple[dict[str, Array], Array]:
        """Return the errors of every window by name, [W] each, and the windows' clusters [W].

        The model's are ``mse``, ``mae``, ``crps``, ``inside`` (between the outermost quantiles) and ``below 0`` and so
        on (at most each quantile); a baseline's ``mse`` and ``mae`` are followed by a space and its name.
        """
        error = {name: np.concatenate(values) for name, values in self._errors.items()}
        return error, np.concatenate(self._clusters or [np.zeros(0, np.int64)])

    def result(self) -> ForecastScore:
        """Return means over all windows added so far; NaN without any."""
        error, cluster_W = self.each()
        names = [name.removeprefix("mse ") for name in error if name.startswith("mse ")]

        def mean(name: str) -> float:
            if not len(cluster_W):
                return math.nan
            return float(error[name].mean())

        def standard_error(name: str) -> float:
            if not len(cluster_W):
                return math.nan
            return clustered_standard_error(error[name], cluster_W)

        def peer_score(name: str) -> PeerScore:
            mse = mean(f"mse {name}")
            mae = mean(f"mae {name}")
            difference = clustered_standard_error(error[f"mse {name}"] - error["mse"], cluster_W)
            z_score = math.nan
            if difference > 0:
                z_score = (mse - mean("mse")) / difference
            return PeerScore(
                mse=mse,
                mae=mae,
                skill_mse=_skill(mean("mse"), mse),
                skill_mae=_skill(mean("mae"), mae),
                skill_crps=_skill(mean("crps"), mae),
                z_score=z_score,
            )

        own = ("mse", "mae", "crps", "inside")
        return ForecastScore(
            windows=len(cluster_W),
            **{name: mean(name) for name in own},
            **{f"{name}_error": standard_error(name) for name in own},
            quantiles=self._quantiles,
            below=[mean(f"below {number}") for number in range(len(self._quantiles))],
            against={name: peer_score(name) for name in names},
        )


def _skill(own: float, other: float) -> float:
    return 1 - own / other if other > 0 else math.nan


@dataclass(frozen=True)
class SampleForecast:
    """Equally probable continuations of B histories: H steps of C channels, on the original scale.

    Attributes:
        sample_BSHC: S continuations of each history, float64.
    """

    sample_BSHC: Array

    @property
    def source(self) -> str:
        """Description of where quantiles come from."""
        return f"of {self.sample_BSHC.shape[1]} drawn continuations"

    @property
    def mean_BHC(self) -> Array:
        """Expected values: the mean of the continuations."""
        return np.asarray(self.sample_BSHC.mean(1))

    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Return quantiles [B, Q, H, C] of every step, for Q probabilities in (0, 1).

        They are empirical: k-th smallest of S as k / (S + 1) quantile, linear between, constant beyond. A further
        sample of the same distribution lies below the k-th smallest with exactly this probability (Weibull).
        """
        quantile_QBHC = np.quantile(self.sample_BSHC, probabilities, axis=1, method="weibull")
        return np.moveaxis(quantile_QBHC, 0, 1)

    def crps(self, truth_BHC: Array) -> Array:
        """Return the continuous ranked probability score of every step, in the values' unit: [B, H, C]."""
        return crps(np.moveaxis(self.sample_BSHC, 1, 0), truth_BHC)


@dataclass(frozen=True)
class ParametricForecast:
    """A density of every step, without the dependence between steps; exact, in float64.

    Attributes:
        codec: codec of the parameters.
        parameters_BHP: parameters of the densities, float64, on the CPU.
        location_BHC: zero of the densities on the original scale; the same for all steps if H is 1.
        scale_B1C: scale of the codec's unit.
    """

    codec: SeriesCodec
    parameters_BHP: Tensor
    location_BHC: Tensor
    scale_B1C: Tensor

    @property
    def source(self) -> str:
        """Description of where quantiles come from."""
        return "of a density for every step"

    @property
    def mean_BHC(self) -> Array:
        """Expected values: the mean of the density."""
        return self.codec.mean(self.parameters_BHP, self.location_BHC, self.scale_B1C).numpy()

    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Return quantiles [B, Q, H, C] of every step, for Q probabilities in (0, 1)."""
        q_Q = torch.tensor(probabilities, dtype=torch.float64)
        frame = (self.location_BHC.unsqueeze(1), self.scale_B1C.unsqueeze(1))
        return self.codec.quantile(
            self.parameters_BHP.unsqueeze(1), q_Q[:, None, None], *frame
        ).numpy()

    def crps(self, truth_BHC: Array) -> Array:
        """Return the continuous ranked probability score of every step, in the values' unit: [B, H, C]."""
        truth = torch.from_numpy(truth_BHC)
        return self.codec.crps(
            self.parameters_BHP, truth, self.location_BHC, self.scale_B1C
        ).numpy()


PredictiveDistribution: TypeAlias = SampleForecast | ParametricForecast


def crps(sample_S: Array, truth: Array) -> Array:
    """Return the continuous ranked probability score of samples: [S, ..], [..] -> [..], in the values' unit.

    ``E|X - y| - E|X - X'| / 2`` (Gneiting & Raftery 2007), the second mean over all pairs of different samples, which
    is unbiased in S (Ferro 2014).
    """
    count = len(sample_S)
    ordered_S = np.sort(sample_S, axis=0)
    # Sorted, the k-th value is the larger one of k pairs and the smaller one of S - 1 - k.
    weight_S = (2 * np.arange(count) - count + 1).reshape(-1, *[1] * truth.ndim)
    spread = (weight_S * ordered_S).sum(0) / (count * (count - 1))
    return np.asarray(np.abs(sample_S - truth).mean(0) - spread)
