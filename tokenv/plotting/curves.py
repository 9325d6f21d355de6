"""Curves over training: what can be drawn of them, their running mean, and one curve on its axes."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes

Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]  # training symbols and values

_SMOOTHING = 50  # a running mean spans one part in so many of its curve
_HUGE = 1e100  # matplotlib's own arithmetic on axis limits overflows well before floats end


def drawable(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where both are finite and not too large to be drawn, bool."""
    return np.asarray((np.abs(x) < _HUGE) & (np.abs(y) < _HUGE))


def running_mean(y: np.ndarray, span: int) -> np.ndarray:
    """Mean of the ``span`` values around each; NaN values and those beyond the ends count for nothing."""
    known = np.isfinite(y)
    window = np.ones(span)
    total = np.convolve(np.where(known, y, 0.0), window, mode="same")
    count = np.convolve(known, window, mode="same")
    return np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0.5)


def draw_curve(axes: Axes, curve: Curve, *, label: str, colour: str, log: bool = False, sparse: bool = False) -> bool:
    """Draw one curve: a long one faintly with its running mean on top.

    Args:
        axes: to draw on.
        curve: of any finite values; others are left out.
        label: in the legend.
        colour: of the line.
        log: the vertical axis will be logarithmic: values up to 0 are left out, the mean is geometric.
        sparse: there are few values: each is a point.

    Returns:
        Whether it has a value that can be drawn; if not, nothing is.
    """
    x, y = (np.asarray(values, dtype=float) for values in curve)
    y = np.where(drawable(x, y) & ((y > 0) | (not log)), y, np.nan)
    if not np.isfinite(y).any():
        return False
    span = len(y) // _SMOOTHING
    if sparse:
        axes.plot(x, y, color=colour, marker="o", markersize=4, linewidth=1.2, label=label)
    elif span < 2:
        axes.plot(x, y, color=colour, marker=".", markersize=3, linewidth=1.2, label=label)
    else:
        axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
        label = f"{label}, {'geometric mean' if log else 'mean'} of {span} (faint: raw)"
        mean = np.exp(running_mean(np.log(y), span)) if log else running_mean(y, span)
        axes.plot(x, mean, color=colour, linewidth=1.8, label=label)
    return True
