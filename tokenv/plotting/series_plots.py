"""Series and the patches drawn in them."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from tokenv.plotting.theme import AMBER, BLUE, GREEN, ORANGE, PINK, SKY

_BANDS = ((BLUE, 0.14), (AMBER, 0.2))  # seen through, so that they fit a light and a dark page
_FURTHER = (GREEN, PINK, SKY, AMBER)  # channels beyond the first, which has the page's ink


def draw_values(
    axes: Axes,
    value_NC: np.ndarray,
    boundary_T: ArrayLike,
    *,
    title: str,
    context: int = 0,
    gold_N: ArrayLike | None = None,
) -> None:
    """Draw a series over its patches as alternating bands.

    Args:
        axes: to draw on.
        value_NC: values [N, C], NaN where missing.
        boundary_T: where patches end, [T], T <= N.
        title: written above, literally.
        context: leading steps that nothing is predicted of.
        gold_N: last steps before a change, [N]; None if unknown.
    """
    length, colours = len(value_NC), (mpl.rcParams["text.color"], *_FURTHER)
    ends = [*(np.flatnonzero(boundary_T) + 0.5).tolist(), length - 0.5]
    for number, (start, end) in enumerate(zip([-0.5, *ends[:-1]], ends, strict=True)):
        axes.axvspan(start, end, color=_BANDS[number % 2], linewidth=0)
    for number, value_N in enumerate(value_NC.T):
        # A value between two missing ones would be no line.
        axes.plot(value_N, color=colours[number % len(colours)], linewidth=1.1, marker=".", markersize=2.5)
    if gold_N is not None:
        for step in np.flatnonzero(gold_N):
            axes.axvline(step + 0.5, color=ORANGE, linewidth=1.3, linestyle=(0, (4, 2)))
    if context:
        axes.axvspan(-0.5, context - 0.5, facecolor="none", edgecolor="0.6", hatch="//", linewidth=0, alpha=0.5)
    axes.set_title(title, loc="left", fontsize="small", parse_math=False)
    axes.set(xlim=(-0.5, length - 0.5))
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)


def date_labels(date_N: Sequence[Any], count: int = 8) -> tuple[list[int], list[str]]:
    """Places on a time axis, and the dates there; midnights and full minutes are left out.

    Args:
        date_N: of every step.
        count: labels, at most.
    """
    places = np.unique(np.linspace(0, len(date_N) - 1, count).round().astype(int)).tolist()
    labels = [str(date_N[place]) for place in places]
    for ending in (":00", " 00:00"):
        if all(label.endswith(ending) for label in labels):
            labels = [label.removesuffix(ending) for label in labels]
    return places, labels


def draw_probabilities(axes: Axes, probability_T: ArrayLike) -> None:
    """Draw boundary probabilities [T] as bars."""
    heights = np.asarray(probability_T)
    axes.bar(np.arange(len(heights)), heights, width=1.0, color=BLUE)
    axes.set(ylim=(0, 1), yticks=[0, 1])
    axes.grid(visible=False)
    axes.spines[["top", "right"]].set_visible(False)


def legend_handles(*, context: bool, gold: bool) -> list[Patch | Line2D]:
    """What a legend of drawn series explains, with the context and true changes where there are any."""
    handles: list[Patch | Line2D] = [
        Patch(color=_BANDS[0], label="a patch"),
        Patch(color=_BANDS[1], label="the next one"),
        Patch(color=BLUE, label="boundary probability"),
    ]
    if gold:
        handles.append(Line2D([], [], color=ORANGE, linestyle=(0, (4, 2)), label="true change"))
    if context:
        handles.append(Patch(facecolor="none", edgecolor="0.6", hatch="//", label="context, not predicted"))
    return handles
