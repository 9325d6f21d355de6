"""Series and the patches drawn in them, as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tokenv.report.saving import save_png

_BLUE, _ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito's colour-blind-safe set
_BANDS = (("#0072B2", 0.14), ("#E69F00", 0.2))  # seen through, so that they fit a light and a dark page
_FURTHER = ("#009E73", "#CC79A7", "#56B4E9", "#E69F00")  # channels beyond the first, which has the page's ink


@dataclass(frozen=True)
class Patched:
    """One series with its boundaries.

    Attributes:
        name: Written above it.
        value_NC: Values [N, C], NaN where missing.
        boundary_T: Where patches end, bool [T], T <= N.
        probability_T: Of a boundary, [T].
        context: Leading steps that nothing is predicted of.
        gold_N: Last steps before a change, bool [N]; None if unknown.
    """

    name: str
    value_NC: np.ndarray
    boundary_T: np.ndarray
    probability_T: np.ndarray
    context: int = 0
    gold_N: np.ndarray | None = None


def draw_patches(shown: Sequence[Patched], path: Path, *, title: str) -> Path:
    """Draw series with their patches as alternating bands, and the boundary probabilities below.

    Args:
        shown: The series, from top to bottom.
        path: The PNG to write, in an existing folder; it is replaced in one step.
        title: Written above, literally.

    Returns:
        ``path``.

    Raises:
        ValueError: There is no series.
        OSError: The file cannot be written.
    """
    if not shown:
        raise ValueError("no series to draw")
    figure = Figure(figsize=(13, 0.9 + 2.9 * len(shown)), dpi=110, layout="constrained")
    figure.suptitle(title, parse_math=False)
    draw_rows(figure, shown)
    figure.legend(handles=legend_handles(shown), loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    return save_png(figure, path)


def draw_rows(figure: Figure, shown: Sequence[Patched]) -> None:
    """Fill an empty figure with series, from top to bottom: each over its patches, boundary probabilities below."""
    axes = figure.subplots(2 * len(shown), 1, height_ratios=[3, 1] * len(shown), squeeze=False)[:, 0]
    longest = max(len(series.value_NC) for series in shown)
    for series, above, below in zip(shown, axes[::2], axes[1::2], strict=True):
        draw_values(above, series)
        _draw_probabilities(below, series)
    for each in axes:  # one scale, read off below the last
        each.set_xlim(-0.5, longest - 0.5)
        each.tick_params(labelbottom=each is axes[-1])
    axes[-1].set_xlabel("step")


def draw_values(axes: Axes, series: Patched) -> None:
    """Draw a series over its patches as alternating bands."""
    length, colours = len(series.value_NC), (mpl.rcParams["text.color"], *_FURTHER)
    ends = [*(np.flatnonzero(series.boundary_T) + 0.5).tolist(), length - 0.5]
    for number, (start, end) in enumerate(zip([-0.5, *ends[:-1]], ends, strict=True)):
        axes.axvspan(start, end, color=_BANDS[number % 2], linewidth=0)
    for number, value_N in enumerate(series.value_NC.T):
        # A value between two missing ones would be no line.
        axes.plot(value_N, color=colours[number % len(colours)], linewidth=1.1, marker=".", markersize=2.5)
    if series.gold_N is not None:
        for step in np.flatnonzero(series.gold_N):
            axes.axvline(step + 0.5, color=_ORANGE, linewidth=1.3, linestyle=(0, (4, 2)))
    if series.context:
        axes.axvspan(-0.5, series.context - 0.5, facecolor="none", edgecolor="0.6", hatch="//", linewidth=0, alpha=0.5)
    axes.set_title(series.name, loc="left", fontsize="small", parse_math=False)
    axes.set(xlim=(-0.5, length - 0.5))
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_probabilities(axes: Axes, series: Patched) -> None:
    axes.bar(np.arange(len(series.probability_T)), series.probability_T, width=1.0, color=_BLUE)
    axes.set(ylim=(0, 1), yticks=[0, 1])
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)


def legend_handles(shown: Sequence[Patched]) -> list[Patch | Line2D]:
    """What a legend of drawn series explains."""
    handles: list[Patch | Line2D] = [
        Patch(color=_BANDS[0], label="a patch"),
        Patch(color=_BANDS[1], label="the next one"),
        Patch(color=_BLUE, label="boundary probability"),
    ]
    if any(series.gold_N is not None for series in shown):
        handles.append(Line2D([], [], color=_ORANGE, linestyle=(0, (4, 2)), label="true change"))
    if any(series.context for series in shown):
        handles.append(Patch(facecolor="none", edgecolor="0.6", hatch="//", label="context, not predicted"))
    return handles
