"""Held-out windows of series, as every method of a comparison cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.numbers import ranked
from tokenv.report.canvas import Picture, draw_both, legend_below, short
from tokenv.report.characters import plain
from tokenv.run.report import draw_windows
from tokenv.run.windows import Window

_ROW, _REST = 1.15, 0.9  # inches of a method, and of axis and legend


def window_pictures(comparison: Comparison) -> Iterator[Picture]:
    """Draw one picture a window, named ``window-1`` and so on, with one row a method, the best on top."""
    context = comparison.methods[0].runs[0].config.data.series.context
    firsts = {method.name: method.runs[0].assessment.windows for method in ranked(comparison)}
    for number in range(max(map(len, firsts.values()))):
        having = {name: windows[number] for name, windows in firsts.items() if number < len(windows)}
        rows = [replace(window, name=short(name)) for name, window in having.items()]
        caption = (
            f"{plain(next(iter(having.values())).name)}, as the first seed of each method cuts it: bands are patches, "
            "bars below them boundary probabilities."
        )
        yield draw_both(
            f"window-{number + 1}", caption, _REST + _ROW * len(rows), partial(_fill, shown=rows, context=context)
        )


def _fill(figure: Figure, shown: list[Window], context: int) -> None:
    handles = draw_windows(figure, shown, context)
    legend_below(figure, handles, [str(handle.get_label()) for handle in handles])
