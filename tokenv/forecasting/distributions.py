"""What a forecast says of every step: continuations that were drawn, or a density."""

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
    """What may follow B histories: H steps of C channels, on the original scale."""

    @property
    @abstractmethod
    def source(self) -> str:
        """What quantiles are of, for people."""

    @property
    @abstractmethod
    def mean_BHC(self) -> Array:
        """Expected values."""

    @abstractmethod
    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Quantiles [B, Q, H, C] of every step, for Q probabilities in (0, 1)."""

    @abstractmethod
    def crps(self, truth_BHC: Array) -> Array:
        """Continuous ranked probability score of every step, in the values' unit: [B, H, C]."""


@dataclass(frozen=True)
class SampleForecast(PredictiveDistribution):
    """Equally probable continuations.

    Attributes:
        sample_BSHC: S of each history, float64.
    """

    sample_BSHC: Array

    @property
    def source(self) -> str:
        """Their number."""
        return f"of {self.sample_BSHC.shape[1]} drawn continuations"

    @property
    def mean_BHC(self) -> Array:
        """Their mean."""
        return np.asarray(self.sample_BSHC.mean(1))

    def quantile(self, probabilities: Sequence[float]) -> Array:
        """Empirical: the k-th smallest of S is the k / (S + 1) quantile, between them linear, beyond them constant.

        What is drawn from the same law lies below the k-th smallest with exactly this probability (Weibull).
        """
        found_QBHC = np.quantile(self.sample_BSHC, probabilities, axis=1, method="weibull")
        return np.moveaxis(found_QBHC, 0, 1)

    def crps(self, truth_BHC: Array) -> Array:
        """See ``crps``."""
        return crps(np.moveaxis(self.sample_BSHC, 1, 0), truth_BHC)


@dataclass(frozen=True)
class ParametricForecast(PredictiveDistribution):
    """A density of every step, nothing of how steps hang together. All is exact, in float64.

    Attributes:
        codec: of the parameters.
        parameters_BHP: float64, on the CPU.
        location_BC: of the codec's unit on the original scale.
        scale_BC: see ``location_BC``.
    """

    codec: SeriesCodec
    parameters_BHP: Tensor
    location_BC: Tensor
    scale_BC: Tensor

    @property
    def source(self) -> str:
        """A density's own."""
        return "of a density for every step"

    @property
    def mean_BHC(self) -> Array:
        """The density's."""
        found = self.codec.mean(self.parameters_BHP, self.location_BC[:, None], self.scale_BC[:, None])
        return np.asarray(found.numpy())

    def quantile(self, probabilities: Sequence[float]) -> Array:
        """The density's."""
        q_Q = torch.tensor(probabilities, dtype=torch.float64)
        frame = (self.location_BC[:, None, None], self.scale_BC[:, None, None])
        found = self.codec.quantile(self.parameters_BHP.unsqueeze(1), q_Q[:, None, None], *frame)
        return np.asarray(found.numpy())

    def crps(self, truth_BHC: Array) -> Array:
        """The density's."""
        truth = torch.from_numpy(truth_BHC)
        found = self.codec.crps(self.parameters_BHP, truth, self.location_BC[:, None], self.scale_BC[:, None])
        return np.asarray(found.numpy())


def crps(sample_S: Array, truth: Array) -> Array:
    """Continuous ranked probability score of drawn samples: [S, ..], [..] -> [..], in the values' unit.

    ``E|X - y| - E|X - X'| / 2`` (Gneiting & Raftery 2007), the second mean over all pairs of different samples, which
    is unbiased in S (Ferro 2014).
    """
    count = len(sample_S)
    ordered_S = np.sort(sample_S, axis=0)
    # Sorted, the k-th value is the larger one of k pairs and the smaller one of S - 1 - k.
    weight_S = (2 * np.arange(count) - count + 1).reshape(-1, *[1] * truth.ndim)
    spread = (weight_S * ordered_S).sum(0) / (count * (count - 1))
    return np.asarray(np.abs(sample_S - truth).mean(0) - spread)
