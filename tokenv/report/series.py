"""Series and the patches drawn in them, as one picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tokenv.report.saving import save_png

_BLUE, _ORANGE = "#0072B2", "#D55E00"  # of Okabe and Ito's colour-blind-safe set
_BANDS = ("#E3EEF6", "#FBEEDC")
_LINES = ("0.15", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")


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
    axes = figure.subplots(2 * len(shown), 1, height_ratios=[3, 1] * len(shown), squeeze=False)[:, 0]
    for series, above, below in zip(shown, axes[::2], axes[1::2], strict=True):
        draw_values(above, series)
        above.set_xticklabels([])
        _draw_probabilities(below, series)
    axes[-1].set_xlabel("step")
    figure.legend(handles=_legend(shown), loc="outside lower center", ncols=5, frameon=False, fontsize="small")

    return save_png(figure, path)


def draw_values(axes: Axes, series: Patched) -> None:
    """Draw a series over its patches as alternating bands."""
    length = len(series.value_NC)
    ends = [*(np.flatnonzero(series.boundary_T) + 0.5).tolist(), length - 0.5]
    for number, (start, end) in enumerate(zip([-0.5, *ends[:-1]], ends, strict=True)):
        axes.axvspan(start, end, color=_BANDS[number % 2], linewidth=0)
    for number, value_N in enumerate(series.value_NC.T):
        # A value between two missing ones would be no line.
        axes.plot(value_N, color=_LINES[number % len(_LINES)], linewidth=1.1, marker=".", markersize=2.5)
    if series.gold_N is not None:
        for step in np.flatnonzero(series.gold_N):
            axes.axvline(step + 0.5, color=_ORANGE, linewidth=1.3, linestyle=(0, (4, 2)))
    if series.context:
        axes.axvspan(-0.5, series.context - 0.5, facecolor="none", edgecolor="0.6", hatch="//", linewidth=0, alpha=0.5)
    axes.set_title(series.name, loc="left", fontsize="small", parse_math=False)
    axes.set(xlim=(-0.5, length - 0.5))
    axes.spines[["top", "right"]].set_visible(False)


def _draw_probabilities(axes: Axes, series: Patched) -> None:
    axes.bar(np.arange(len(series.probability_T)), series.probability_T, width=1.0, color=_BLUE)
    axes.set(xlim=(-0.5, len(series.value_NC) - 0.5), ylim=(0, 1), yticks=[0, 1], ylabel="P(boundary)")
    axes.spines[["top", "right"]].set_visible(False)


def _legend(shown: Sequence[Patched]) -> list[Patch | Line2D]:
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
