"""Methods at the rates that they were asked for: a picture, tables, and rows of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter
from rich.table import Column, Table
from rich.text import Text

from tokenv.compare.comparison import Comparison
from tokenv.compare.rate_curves import MethodRateCurve, MethodRatePoint
from tokenv.compare.report.aggregate import Band, Style, line_picture, number, with_error
from tokenv.compare.significance import sentence
from tokenv.evaluation.calibration import CALIBRATED, NATIVE
from tokenv.plotting.characters import escape_line
from tokenv.plotting.figures import Picture

_OWN_RATE = "its own"


class Cell(NamedTuple):
    """A cell of a table: what stands in it, smaller below it, its style class, and what pointing at it says."""

    text: str
    small: str = ""
    style: str = ""
    tip: str = ""


def columns(comparison: Comparison) -> list[str]:
    """The asked rates, ascending, and last that of methods which nobody can ask."""
    asked = sorted({cell.asked for line in comparison.rates if line.way != NATIVE for cell in line.cells})
    own = [_OWN_RATE] if any(line.way == NATIVE for line in comparison.rates) else []
    return [f"{rate:g}" for rate in asked] + own


def losses(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Method, way, and its loss at each of ``columns``: mean ± standard error over seeds."""

    def shown(cell: MethodRatePoint) -> Cell:
        return Cell(with_error(cell.scores.mean, cell.scores.seed_error), f"drawn {number(cell.rate, '.4f')}")

    return [(line.method, line.way, _row(line, comparison, shown)) for line in comparison.rates]


def differences(comparison: Comparison) -> list[tuple[str, list[Cell]]]:
    """Every method but the reference, and its loss minus the reference's at each asked rate."""
    reference = comparison.rates_against

    def shown(line: MethodRateCurve, cell: MethodRatePoint) -> Cell:
        found = cell.difference
        if found is None:
            return Cell("–")
        said = sentence(line.method, reference, found, comparison.unit_in_words)
        style = found.verdict.replace(" ", "-")
        return Cell(number(found.mean, "+.4f"), f"p {number(found.p_holm, '.2g')}", style, f"At {cell.asked:g}: {said}")

    held = [line for line in comparison.rates if any(cell.difference for cell in line.cells)]
    return [(line.method, _row(line, comparison, partial(shown, line))[: _asked(comparison)]) for line in held]


def _asked(comparison: Comparison) -> int:
    return len(set(columns(comparison)) - {_OWN_RATE})


def _row(line: MethodRateCurve, comparison: Comparison, shown: Callable[[MethodRatePoint], Cell]) -> list[Cell]:
    cells = {_OWN_RATE if line.way == NATIVE else f"{cell.asked:g}": shown(cell) for cell in line.cells}
    return [cells.get(column, Cell("–")) for column in columns(comparison)]


def rate_rows(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    """Header and rows of a file: one for every method, way and rate, in full precision."""
    errors = ["seed_error", "document_error"]
    header = ["method", "way", "asked", "drawn", "flops", "seeds", comparison.unit, *errors]
    header += ["difference", *(f"difference_{error}" for error in errors), "low", "high", "p", "p_holm", "verdict"]
    rows: list[list[Any]] = []
    for line in comparison.rates:
        for cell in line.cells:
            of, found = cell.scores, cell.difference
            row: list[Any] = [line.method, line.way, cell.asked, cell.rate, cell.flops, len(of.seeds), of.mean]
            row += [of.seed_error, of.document_error]
            if found is None:
                row += [""] * 8
            else:
                row += [found.mean, found.seed_error, found.document_error, found.low, found.high, found.p]
                row += [found.p_holm, found.verdict]
            rows.append(row)
    return header, rows


def rates_table(comparison: Comparison) -> Table:
    """One line a method and way, for a rich console."""
    names = [Column(f"at {column}", justify="right") for column in columns(comparison)]
    title = f"{comparison.unit_in_words} ± seeds"
    table = Table("method", "way", *names, title=Text(title), title_justify="left")
    for method, way, cells in losses(comparison):
        table.add_row(Text(escape_line(method)), way, *(cell.text for cell in cells))
    return table


def rate_picture(comparison: Comparison, looks: Mapping[str, Style]) -> Picture | None:
    """The loss against what reading costs; None where nothing was measured at rates."""
    lines = [line for line in comparison.rates if line.compared]
    if not lines:
        return None
    curves = {line.method: _band(line.cells) for line in lines}
    trained = {method.name: method.runs[0].config.rate for method in comparison.methods}
    rings = [(line.method, cell) for line in lines for cell in line.cells if cell.asked == trained[line.method]]
    unit, symbol = comparison.unit_in_words, comparison.words.symbol

    def finish(axes: Axes) -> None:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=f"FLOPs per {symbol}, forward", ylabel=f"held-out {unit}")
        for method, cell in rings:
            axes.plot(cell.flops, cell.scores.mean, "o", color=looks[method].colour, ms=11, mfc="none", mew=1)

    asked = ", ".join(name for name in columns(comparison) if name != _OWN_RATE)
    caption = (
        f"Held-out {unit} against what reading a {symbol} costs, at the rates {asked}: mean over the seeds; band from "
        "the lowest to the highest seed."
    )
    if any(line.way == CALIBRATED for line in lines):
        caption += " Logits are shifted until held-out data of their own have the rate."
    if rings:
        caption += " Rings: the rate that a method was trained for."
    return line_picture("rates", caption, curves, looks, finish)


def _band(cells: Sequence[MethodRatePoint]) -> Band:
    seeds = [cell.scores.loss_SB.mean(1) for cell in cells]
    ends = [(each.mean(), each.min(), each.max()) for each in seeds]
    mean, low, high = (np.array(of) for of in zip(*ends, strict=True))
    return Band(np.array([cell.flops for cell in cells]), mean, low, high)
