"""Predictive distributions of every step: sampled continuations, or a density."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tokenv.lm.codecs.series import SeriesCodec

Array: TypeAlias = np.ndarray[Any, Any]


class PredictiveDistribution(ABC):
    """Distribution of what follows B histories: H steps of C channels, on the original scale."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Description of where quantiles come from."""

    @property
    @abstractmethod
    def mean_BHC(self) -> Array:
        """Expected values."""

    @abstractmethod
    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Return quantiles [B, Q, H, C] of every step, for Q probabilities in (0, 1)."""

    @abstractmethod
    def crps(self, truth_BHC: Array) -> Array:
        """Return the continuous ranked probability score of every step, in the values' unit: [B, H, C]."""


@dataclass(frozen=True)
class SampleForecast(PredictiveDistribution):
    """Equally probable continuations.

    Attributes:
        sample_BSHC: S continuations of each history, float64.
    """

    sample_BSHC: Array

    @property
    def source(self) -> str:
        """Description with their number."""
        return f"of {self.sample_BSHC.shape[1]} drawn continuations"

    @property
    def mean_BHC(self) -> Array:
        """Mean of the continuations."""
        return np.asarray(self.sample_BSHC.mean(1))

    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Return empirical quantiles: k-th smallest of S as k / (S + 1) quantile, linear between, constant beyond.

        A further sample of the same distribution lies below the k-th smallest with exactly this probability (Weibull).
        """
        quantile_QBHC = np.quantile(self.sample_BSHC, probabilities, axis=1, method="weibull")
        return np.moveaxis(quantile_QBHC, 0, 1)

    def crps(self, truth_BHC: Array) -> Array:
        """Return the score of the continuations; see ``crps``."""
        return crps(np.moveaxis(self.sample_BSHC, 1, 0), truth_BHC)


@dataclass(frozen=True)
class ParametricForecast(PredictiveDistribution):
    """A density of every step, without the dependence between steps; exact, in float64.

    Attributes:
        codec: codec of the parameters.
        parameters_BHP: parameters of the densities, float64, on the CPU.
        location_BC: location of the codec's unit on the original scale.
        scale_BC: scale of that unit.
    """

    codec: SeriesCodec
    parameters_BHP: Tensor
    location_BC: Tensor
    scale_BC: Tensor

    @property
    def source(self) -> str:
        """Description of a density."""
        return "of a density for every step"

    @property
    def mean_BHC(self) -> Array:
        """Mean of the density."""
        result = self.codec.mean(self.parameters_BHP, self.location_BC[:, None], self.scale_BC[:, None])
        return np.asarray(result.numpy())

    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Return quantiles of the density."""
        q_Q = torch.tensor(probabilities, dtype=torch.float64)
        frame = (self.location_BC[:, None, None], self.scale_BC[:, None, None])
        result = self.codec.quantile(self.parameters_BHP.unsqueeze(1), q_Q[:, None, None], *frame)
        return np.asarray(result.numpy())

    def crps(self, truth_BHC: Array) -> Array:
        """Return the score of the density."""
        truth = torch.from_numpy(truth_BHC)
        result = self.codec.crps(self.parameters_BHP, truth, self.location_BC[:, None], self.scale_BC[:, None])
        return np.asarray(result.numpy())


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
