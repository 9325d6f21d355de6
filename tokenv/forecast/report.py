"""Forecasts: a picture with history, patches and intervals, and a CSV file."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from tokenv.report.saving import save_png
from tokenv.report.series import Patched, draw_values

_MEDIAN, _TRUTH = "#D55E00", "0.15"


@dataclass(frozen=True)
class Forecasted:
    """One series' forecast.

    Attributes:
        past: The history with its patches.
        mean_HC: Mean forecast of H steps and C channels.
        quantile_QHC: Its quantiles.
        truth_HC: What came; None if unknown.
    """

    past: Patched
    mean_HC: np.ndarray
    quantile_QHC: np.ndarray
    truth_HC: np.ndarray | None = None


def draw_forecasts(shown: Sequence[Forecasted], quantiles: Sequence[float], path: Path, *, title: str) -> Path:
    """Draw histories with their patches as bands, then the median and the outermost quantiles.

    Args:
        shown: The series, from top to bottom.
        quantiles: Probabilities of the Q quantiles, ascending.
        path: The PNG to write, in an existing folder; it is replaced in one step.
        title: Written above, literally.

    Raises:
        OSError: The file cannot be written.
    """
    figure = Figure(figsize=(13, 0.9 + 2.6 * len(shown)), dpi=110, layout="constrained")
    figure.suptitle(title, parse_math=False)
    for axes, series in zip(figure.subplots(len(shown), 1, squeeze=False)[:, 0], shown, strict=True):
        draw_values(axes, series.past)
        known = len(series.past.value_NC)
        step_H = np.arange(known, known + len(series.mean_HC))
        low_HC, high_HC = series.quantile_QHC[0], series.quantile_QHC[-1]
        middle_HC = series.quantile_QHC[len(quantiles) // 2]
        for channel in range(series.mean_HC.shape[1]):
            first = channel == 0
            label = f"{quantiles[0]:g} to {quantiles[-1]:g} quantile" if first else None
            axes.fill_between(
                step_H, low_HC[:, channel], high_HC[:, channel], color=_MEDIAN, alpha=0.25, linewidth=0, label=label
            )
            label = f"{quantiles[len(quantiles) // 2]:g} quantile" if first else None
            axes.plot(step_H, middle_HC[:, channel], color=_MEDIAN, linewidth=1.4, label=label)
            if series.truth_HC is not None:
                label = "what came" if first else None
                axes.plot(step_H, series.truth_HC[:, channel], color=_TRUTH, linewidth=1.0, linestyle=":", label=label)
        axes.set_xlim(-0.5, step_H[-1] + 0.5)
    axes.set_xlabel("step; bands are patches of the history")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return save_png(figure, path)


def write_forecasts(shown: Sequence[Forecasted], quantiles: Sequence[float], path: Path) -> Path:
    """Write one row a series, channel and step: mean, quantiles and, where it is known, what came."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["series", "channel", "step", "mean", *(f"q{q:g}" for q in quantiles), "truth"])
        for series in shown:
            steps, channels = series.mean_HC.shape
            for channel in range(channels):
                for step in range(steps):
                    truth = "" if series.truth_HC is None else series.truth_HC[step, channel]
                    values = series.quantile_QHC[:, step, channel].tolist()
                    writer.writerow(
                        [series.past.name, channel, step + 1, series.mean_HC[step, channel], *values, truth]
                    )
    return path
