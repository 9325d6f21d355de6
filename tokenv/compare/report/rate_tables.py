"""Show methods at the requested rates: a picture and tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from rich.table import Column, Table
from rich.text import Text

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.aggregate import (
    Band,
    assign_styles,
    draw_lines,
    format_number,
    format_with_error,
    style_class,
)
from tokenv.compare.score_statistics import Difference, describe_difference
from tokenv.evaluation.calibration import CALIBRATED, NATIVE
from tokenv.plotting.characters import escape_line
from tokenv.plotting.figures import Picture

_OWN_RATE = "its own"


class Cell(NamedTuple):
    """Cell of a table: its text, smaller text below it, its style class, and its tooltip."""

    text: str
    small: str = ""
    style: str = ""
    tip: str = ""


def rate_columns(comparison: Comparison) -> list[str]:
    """Return the requested rates, ascending, and last that of methods which take no request."""
    rates = comparison.rates
    if not len(rates):
        return []
    own = [_OWN_RATE] if (rates.way == NATIVE).any() else []
    return [f"{rate:g}" for rate in sorted(set(rates.asked[rates.way != NATIVE]))] + own


def rate_losses(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Return method, way, and its loss at each of ``rate_columns``: mean ± standard error over seeds."""

    def show(row: Any) -> Cell:
        return Cell(format_with_error(row.loss, row.seed_error), f"drawn {format_number(row.drawn, '.4f')}")

    return _arrange(comparison, comparison.rates, show)


def rate_differences(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Return method, way, and its loss minus the reference's at each requested rate, but for the reference."""

    def show(row: Any) -> Cell:
        if not row.verdict:
            return Cell("–")
        errors = (row.difference_document_error, row.difference_seed_error)
        difference = Difference(row.difference, *errors, row.low, row.high, row.p, row.p_holm)
        text = describe_difference(row.method, comparison.rates_reference, difference, comparison.unit_in_words)
        p = f"p {format_number(row.p_holm, '.2g')}"
        return Cell(format_number(row.difference, "+.4f"), p, style_class(difference), f"At {row.asked:g}: {text}")

    rates = comparison.rates
    if not len(rates):
        return []
    tested = set(rates.method[rates.verdict != ""])
    rows = _arrange(comparison, rates[rates.compared & rates.method.isin(tested)], show)
    requested = len(set(rate_columns(comparison)) - {_OWN_RATE})
    return [(method, way, cells[:requested]) for method, way, cells in rows]


def _arrange(
    comparison: Comparison, rates: pd.DataFrame, show: Callable[[Any], Cell]
) -> list[tuple[str, str, list[Cell]]]:
    """Return a row for every method and way: a cell for each of ``rate_columns``."""
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in rates.itertuples(index=False):
        column = _OWN_RATE if row.way == NATIVE else f"{row.asked:g}"
        cells.setdefault((row.method, row.way), {})[column] = show(row)
    columns = rate_columns(comparison)
    return [(*key, [own.get(column, Cell("–")) for column in columns]) for key, own in cells.items()]


def rates_table(comparison: Comparison) -> Table:
    """Return a table for a rich console, one line a method and way."""
    names = [Column(f"at {column}", justify="right") for column in rate_columns(comparison)]
    title = f"{comparison.unit_in_words} ± seeds"
    table = Table("method", "way", *names, title=Text(title), title_justify="left")
    for method, way, cells in rate_losses(comparison):
        table.add_row(Text(escape_line(method)), way, *(cell.text for cell in cells))
    return table


def draw_rates(comparison: Comparison) -> Picture | None:
    """Draw the loss against the cost of reading; return None if nothing was measured at several rates."""
    if not len(comparison.rates):
        return None
    rates = comparison.rates[comparison.rates.compared]
    columns = ["flops", "loss", "lowest", "highest"]
    curves = {
        name: Band(*(rows[column].to_numpy() for column in columns))
        for name, rows in rates.groupby("method", sort=False)
    }
    trained = {method.name: method.runs[0].config.rate for method in comparison.methods}
    rings = [row for row in rates.itertuples() if row.asked == trained[row.method]]
    colours = {name: style.colour for name, style in assign_styles(comparison).items()}
    unit, symbol = comparison.unit_in_words, comparison.words.symbol

    def finish(axes: Axes) -> None:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=f"FLOPs per {symbol}, forward", ylabel=f"held-out {unit}")
        for row in rings:
            axes.plot(row.flops, row.loss, "o", color=colours[row.method], ms=11, mfc="none", mew=1)

    requested = ", ".join(name for name in rate_columns(comparison) if name != _OWN_RATE)
    caption = (
        f"Held-out {unit} against the cost of reading a {symbol}, at the rates {requested}: mean over the seeds; band "
        "from the lowest to the highest seed."
    )
    if (rates.way == CALIBRATED).any():
        caption += " Logits are shifted until other held-out data have the rate."
    if rings:
        caption += " Rings: the rate for which a method was trained."
    return draw_lines(comparison, "rates", caption, curves, finish)
