"""Bias, variance and direction of gradients, computed from their inner products alone.

With draws g_1, ..., g_n of an estimator and r_1, ..., r_m of an unbiased reference (or the true gradient, m = 1), all
of them are functions of the Gram matrices. Products of *different* draws estimate |E g|^2 and E g . E r without the
bias that a draw's own noise would bring; errors are delete-one jackknife errors (Efron & Stein 1981).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of an estimator's gradient, from its draws.

    Attributes:
        variance: trace of the covariance of one draw.
        noise: variance over the squared norm of the mean: 1 / SNR^2.
        snr: norm of the mean over the root of the variance.
        bias: relative bias ``|E g - true| / |true|``.
        turn: bias of direction alone: ``1 - cos(E g, true)``.
        cosine: mean cosine of single draws with the true gradient.
        scale: length of the mean along the true gradient, relative to it; 1 for an unbiased estimator.
    """

    variance: Estimate
    noise: Estimate
    snr: Estimate
    bias: Estimate
    turn: Estimate
    cosine: Estimate
    scale: Estimate


@dataclass(frozen=True)
class _Sums:
    """Means from which all figures are computed, tensors of one shape.

    Attributes:
        size: mean of |g_i|^2.
        mean2: unbiased estimate of |E g|^2.
        true2: unbiased estimate of |true|^2.
        along: mean of E g . true.
        single: mean of g_i . mean r / |g_i|.
    """

    size: Tensor
    mean2: Tensor
    true2: Tensor
    along: Tensor
    single: Tensor


def _signed_root(x: Tensor) -> Tensor:
    """Return the root of an estimate of a square, negative where noise has made the estimate negative."""
    return x.sign() * x.abs().sqrt()


def _figures(s: _Sums) -> dict[str, Tensor]:
    """Return all figures; infinite or NaN where noise hides the value to which they are relative."""
    variance = s.size - s.mean2
    unknown = torch.full_like(variance, math.nan)
    norm, length = _signed_root(s.true2), _signed_root(s.mean2)
    known, has_signal = norm > 0, length > 0
    return {
        "variance": variance,
        "noise": torch.where(has_signal, variance / s.mean2, math.inf),
        "snr": torch.where(variance > 0, length / variance.sqrt(), math.inf),
        "bias": torch.where(known, _signed_root(s.mean2 + s.true2 - 2 * s.along) / norm, unknown),
        "turn": torch.where(known & has_signal, 1 - s.along / (length * norm), unknown),
        "cosine": torch.where(known, s.single / norm, unknown),
        "scale": torch.where(known, s.along / s.true2, unknown),
    }


def _off_diagonal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean product of different draws, and the same without each draw in turn: [] and [n]."""
    n, diagonal = len(gram), gram.diagonal()
    total = gram.sum() - diagonal.sum()
    without = total - 2 * (gram.sum(0) - diagonal)
    return total / (n * (n - 1)), without / ((n - 1) * (n - 2))


def _leave_out(x: Tensor) -> Tensor:
    """Return the mean without each entry in turn: [n] -> [n]."""
    return (x.sum() - x) / (len(x) - 1)


def _squared_errors(delete_one: dict[str, Tensor]) -> dict[str, float]:
    """Return (n - 1) / n times the sum of squared deviations of the delete-one values; NaN if one is not finite."""
    return {name: ((len(x) - 1) / len(x) * (x - x.mean()).square().sum()).item() for name, x in delete_one.items()}


def gradient_statistics(draws: Tensor, reference: Tensor) -> GradientStatistics:
    """Return bias, variance and direction of an estimator.

    Args:
        draws: gradients, [n, d], n >= 3.
        reference: gradients of an unbiased estimator [m, d], m >= 3, or the true one, [1, d].

    Returns:
        Values with jackknife standard errors, which include the reference's own.
    """
    assert len(draws) >= 3
    assert len(reference) != 2
    draws, reference = draws.double(), reference.double()
    gram, cross = draws @ draws.T, draws @ reference.T
    size = gram.diagonal()
    direction = cross / size.sqrt().clamp(min=1e-300).unsqueeze(1)
    mean2, mean2_without = _off_diagonal(gram)
    if len(reference) > 1:
        true2, true2_without = _off_diagonal(reference @ reference.T)
    else:
        true2, true2_without = reference.square().sum(), None
    along, single = cross.mean(), direction.mean()
    figures = _figures(_Sums(size.mean(), mean2, true2, along, single))
    squared = _squared_errors(
        _figures(
            _Sums(
                _leave_out(size),
                mean2_without,
                true2.expand(len(size)),
                _leave_out(cross.mean(1)),
                _leave_out(direction.mean(1)),
            )
        )
    )
    if true2_without is not None:
        m = len(reference)
        of_reference = _Sums(
            size.mean().expand(m),
            mean2.expand(m),
            true2_without,
            _leave_out(cross.mean(0)),
            _leave_out(direction.mean(0)),
        )
        for name, value in _squared_errors(_figures(of_reference)).items():
            squared[name] += value
    return GradientStatistics(
        **{f.name: Estimate(figures[f.name].item(), math.sqrt(squared[f.name])) for f in fields(GradientStatistics)}
    )
