"""How the lines of a comparison's pictures look: one a method, the same in all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.numbers import Band
from tokenv.report.canvas import Picture, draw_both, legend_below, legend_columns, short
from tokenv.report.theme import LINES, MARKERS

_DASHES = ("solid", "dashed", "dotted", "dashdot")


class Style(NamedTuple):
    """How a method's lines look: colour as ``#rrggbb``, line style by its CSS-like name, marker."""

    colour: str
    line: str
    marker: str


def styles(comparison: Comparison) -> dict[str, Style]:
    """Method to its look in all pictures, by its place in the comparison."""
    return {
        method.name: Style(LINES[i % len(LINES)], _DASHES[i // len(LINES) % len(_DASHES)], MARKERS[i % len(MARKERS)])
        for i, method in enumerate(comparison.methods)
    }


def line_picture(
    name: str, caption: str, curves: Mapping[str, Band], looks: Mapping[str, Style], finish: Callable[[Axes], None]
) -> Picture:
    """Lines with bands, one a method, and a legend.

    Args:
        name: of the picture.
        caption: of the picture.
        curves: method to what is drawn; at least one.
        looks: method to style.
        finish: sets the axes' labels, limits and formats.
    """
    names = [short(method) for method in curves]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        handles = []
        for method, band in curves.items():
            look = looks[method]
            each = max(1, len(band.x) // 8)
            # Markers of different methods stand at different places, or they would hide one another.
            first = list(looks).index(method) * each // len(looks)
            axes.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.15, lw=0)
            handles += axes.plot(
                band.x, band.mean, color=look.colour, ls=look.line, marker=look.marker, markevery=(first, each)
            )
        finish(axes)
        legend_below(figure, handles, names)

    rows = math.ceil(len(names) / legend_columns(names))
    return draw_both(name, caption, 3.6 + 0.19 * rows, draw)
