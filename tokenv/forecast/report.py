"""Forecasts: a picture with history, patches and intervals, and a CSV file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenv.forecast.forecast import Array, Forecast
from tokenv.report.canvas import save_png, titled_figure
from tokenv.report.series import draw_values
from tokenv.report.table import write_csv
from tokenv.report.theme import ORANGE

_TRUTH = "0.15"


def draw_forecasts(
    shown: Sequence[Forecast],
    quantiles: Sequence[float],
    path: Path,
    *,
    title: str,
    context: int = 0,
    truth_BHC: Array | None = None,
) -> Path:
    """Draw histories with their patches as bands, then the median and the outermost quantiles.

    Args:
        shown: B forecasts, from top to bottom.
        quantiles: Probabilities of the Q quantiles, ascending.
        path: The PNG to write, in an existing folder; it is replaced in one step.
        title: Written above, literally.
        context: Leading steps of the histories that nothing is predicted of.
        truth_BHC: What came; None if unknown.

    Raises:
        OSError: The file cannot be written.
    """
    figure = titled_figure(13, 0.9 + 2.6 * len(shown), dpi=110, title=title)
    middle = len(quantiles) // 2
    for number, axes in enumerate(figure.subplots(len(shown), 1, squeeze=False)[:, 0]):
        made = shown[number]
        draw_values(axes, made.history_LC, made.boundary_L, title=made.name, context=context)
        quantile_QHC, known = made.quantile_QHC(quantiles), len(made.history_LC)
        step_H = np.arange(known, known + quantile_QHC.shape[1])
        for channel in range(quantile_QHC.shape[2]):
            first = channel == 0
            low_H, middle_H, high_H = quantile_QHC[[0, middle, -1], :, channel]
            label = f"{quantiles[0]:g} to {quantiles[-1]:g} quantile" if first else None
            axes.fill_between(step_H, low_H, high_H, color=ORANGE, alpha=0.25, linewidth=0, label=label)
            label = f"{quantiles[middle]:g} quantile" if first else None
            axes.plot(step_H, middle_H, color=ORANGE, linewidth=1.4, label=label)
            if truth_BHC is not None:
                label = "what came" if first else None
                truth_H = truth_BHC[number, :, channel]
                axes.plot(step_H, truth_H, color=_TRUTH, linewidth=1.0, linestyle=":", label=label)
        axes.set_xlim(-0.5, step_H[-1] + 0.5)
    axes.set_xlabel("step; bands are patches of the history")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return save_png(figure, path)


def write_forecasts(
    shown: Sequence[Forecast], quantiles: Sequence[float], path: Path, *, truth_BHC: Array | None = None
) -> Path:
    """Write one row a series, channel and step: mean, quantiles and, where it is known, what came."""
    rows = []
    for number, made in enumerate(shown):
        mean_HC, quantile_QHC = made.mean_HC, made.quantile_QHC(quantiles)
        for channel, step in np.ndindex(mean_HC.shape[::-1]):
            truth = "" if truth_BHC is None else truth_BHC[number, step, channel]
            values = quantile_QHC[:, step, channel].tolist()
            rows.append([made.name, channel, step + 1, mean_HC[step, channel], *values, truth])
    return write_csv(path, ["series", "channel", "step", "mean", *(f"q{q:g}" for q in quantiles), "truth"], rows)


def as_dicts(shown: Sequence[Forecast], quantiles: Sequence[float], truth_BHC: Array | None) -> list[dict[str, Any]]:
    """The same for JSON: a forecast each, arrays of steps and channels [H, C]."""
    found = []
    for number, made in enumerate(shown):
        each = {f"{q:g}": value_HC for q, value_HC in zip(quantiles, made.quantile_QHC(quantiles), strict=True)}
        truth = {} if truth_BHC is None else {"truth": truth_BHC[number]}
        found.append({"series": made.name, "mean": made.mean_HC, "quantiles": each} | truth)
    return found
