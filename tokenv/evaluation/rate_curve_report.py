"""The report of a model at several rates: a table, a CSV file and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from tokenv.core.rates import Rate, RateRange
from tokenv.evaluation.rate_curve import CALIBRATED, DOUBT, TOLD, RatePoint
from tokenv.plotting.characters import escape
from tokenv.plotting.console import write_csv
from tokenv.plotting.figures import save_png, short, titled_figure
from tokenv.plotting.theme import LINES, in_words

STYLES = {TOLD: "o-", CALIBRATED: "s--", DOUBT: "^:"}


def rates_table(points: Sequence[RatePoint], *, unit: str, title: str) -> Table:
    """A row for every point.

    Args:
        points: at least one.
        unit: of the losses.
        title: written above, literally.
    """
    names = ["asked", "drawn", f"{in_words(unit)} ±", "FLOPs/symbol", "bias"]
    doubted = any(point.difference is not None for point in points)
    right = [Column(name, justify="right") for name in [*names, *(["than constant ±"] if doubted else [])]]
    table = Table("run", "way", *right, title=Text(escape(title)), title_justify="left")
    for point in points:
        table.add_row(
            Text(escape(point.run)),
            way_of(point),
            f"{point.asked:.3f}",
            f"{point.rate:.4f}",
            f"{point.loss:.4f} ± {point.standard_error:.4f}",
            f"{point.flops:,.0f}",
            "" if point.way == TOLD else f"{point.logit_bias:+.3f}",
            *([_than_constant(point)] if doubted else []),
        )
    return table


def way_of(point: RatePoint) -> str:
    """How it was asked, for people."""
    return f"{point.way}, {point.doubt:g} a nat" if point.way == DOUBT else point.way


def _than_constant(point: RatePoint) -> str:
    return "" if point.difference is None else f"{point.difference:+.4f} ± {point.difference_error:.4f}"


def write_rates(points: Sequence[RatePoint], path: Path) -> Path:
    """Write them as a CSV file in an existing folder."""
    return write_csv(path, list(asdict(points[0])), [list(asdict(point).values()) for point in points])


def draw_rates(points: Sequence[RatePoint], path: Path, *, unit: str, title: str, trained: Rate | None = None) -> Path:
    """Draw the loss against FLOPs per symbol, and drawn rates against asked ones.

    Args:
        points: at least one.
        path: the PNG to write, in an existing folder; it is replaced in one step.
        unit: of the losses.
        title: written above, literally.
        trained: the rates that the first model was trained for.

    Raises:
        OSError: the file cannot be written.
    """
    figure = titled_figure(11, 4.4, dpi=120, title=title)
    left, right = figure.subplots(1, 2)
    runs = list(dict.fromkeys(point.run for point in points))
    colours = list(dict.fromkeys((point.run, point.doubt) for point in points))
    for run, way, doubt in dict.fromkeys((point.run, point.way, point.doubt) for point in points):
        same = (p for p in points if (p.run, p.way, p.doubt) == (run, way, doubt))
        some = sorted(same, key=lambda point: point.rate)
        look: dict[str, Any] = {
            "color": LINES[colours.index((run, doubt)) % len(LINES)],
            "markersize": 4,
            "linewidth": 1.2,
        }
        named = way_of(some[0])
        look["label"] = f"{short(run)} {named}" if len(runs) > 1 else named
        asked, drawn, loss, flops = zip(*((p.asked, p.rate, p.loss, p.flops) for p in some), strict=True)
        left.errorbar(flops, loss, [p.standard_error for p in some], fmt=STYLES[way], elinewidth=0.4, **look)
        right.plot(asked, drawn, STYLES[way], **look)
        for point in some if len(runs) == 1 and way == points[0].way else ():
            where = (point.flops, point.loss)
            left.annotate(f"{point.rate:.2f}", where, (4, 5), textcoords="offset points", fontsize="x-small")
    left.set(xlabel="FLOPs per symbol, forward", ylabel=in_words(unit))
    right.set(xlabel="asked: boundaries per symbol", ylabel="drawn")
    ends = min(p.asked for p in points), max(p.asked for p in points)
    right.plot(ends, ends, color="0.5", linestyle="--", linewidth=1, label="asked = drawn")
    if isinstance(trained, RateRange):
        right.axvspan(trained.min, trained.max, color="0.94", zorder=0, label="trained for")
    elif trained is not None:
        right.axvline(trained, color="0.8", linewidth=4, zorder=0, label="trained for")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, fontsize="small")
    return save_png(figure, path)
