"""Held-out windows of series, as every method of a comparison cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from matplotlib.figure import Figure

from tokenv.compare.compared import Comparison
from tokenv.compare.report.canvas import Picture, draw_both, legend_below, short
from tokenv.compare.report.numbers import plain, ranked
from tokenv.report.series import Patched, draw_rows, legend_handles

_ROW, _REST = 1.15, 0.9  # inches of a method, and of axis and legend


def draw_windows(comparison: Comparison) -> Iterator[Picture]:
    """Draw one picture a window, named ``window-1`` and so on, with one row a method, the best on top."""
    firsts = {method.name: method.runs[0].windows for method in ranked(comparison)}
    for number in range(max(map(len, firsts.values()))):
        having = {name: windows[number] for name, windows in firsts.items() if number < len(windows)}
        rows = [replace(window, name=short(name)) for name, window in having.items()]
        caption = (
            f"{plain(next(iter(having.values())).name)}, as the first seed of each method cuts it: bands are patches, "
            "bars below them boundary probabilities."
        )
        yield draw_both(f"window-{number + 1}", caption, _REST + _ROW * len(rows), partial(_fill, shown=rows))


def _fill(figure: Figure, shown: Sequence[Patched]) -> None:
    draw_rows(figure, shown)
    handles = legend_handles(shown)
    legend_below(figure, handles, [str(handle.get_label()) for handle in handles])
