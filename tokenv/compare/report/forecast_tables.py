"""Write the forecasts of a comparison: windows, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.table import Table
from rich.text import Text

from tokenv.compare.comparison import Comparison
from tokenv.compare.forecast_comparison import SCORES, ForecastComparison, Forecaster
from tokenv.compare.forecast_comparison import ScoreStatistics as Score
from tokenv.compare.report.aggregate import mean, number, ranked, with_error
from tokenv.compare.significance import sentence
from tokenv.evaluation.boundary_stats import SeriesExcerpt
from tokenv.evaluation.report import draw_windows
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.console import write_csv
from tokenv.plotting.figures import Picture, draw_both, legend_below, short

_ROW, _REST = 1.15, 0.9  # inches of a method, and of axis and legend


def window_pictures(comparison: Comparison) -> Iterator[Picture]:
    """Draw one picture a window, named ``window-1`` and so on, with one row a method, the best on top."""
    context = comparison.methods[0].runs[0].config.data.series.context
    firsts = {method.name: method.runs[0].assessment.windows for method in ranked(comparison)}
    for index in range(max(map(len, firsts.values()))):
        having = {name: windows[index] for name, windows in firsts.items() if index < len(windows)}
        rows = [replace(window, name=short(name)) for name, window in having.items()]
        caption = (
            f"{escape_line(next(iter(having.values())).name)}, as the first seed of each method cuts it: bands are "
            "patches, bars below them boundary probabilities."
        )
        yield draw_both(
            f"window-{index + 1}", caption, _REST + _ROW * len(rows), partial(_fill, shown=rows, context=context)
        )


def _fill(figure: Figure, shown: list[SeriesExcerpt], context: int) -> None:
    handles = draw_windows(figure, shown, context)
    legend_below(figure, handles, [str(handle.get_label()) for handle in handles])


_FIGURES = ("MSE ± seeds", "error over windows", "MAE ± seeds", "CRPS ± seeds", "80% interval holds")
_FAR = 1.5  # times the middle one's MSE: what lies beyond would press all others together
HEADER = ["forecaster", "is_method", "seeds", "horizon", "windows"]
PAIRS = [
    "score",
    "first",
    "second",
    "difference",
    "seed_error",
    "document_error",
    "low",
    "high",
    "p",
    "p_holm",
    "verdict",
]


def title(found: ForecastComparison) -> str:
    """What the figures are of."""
    return f"Forecasts of {found.horizon} steps, {found.windows:,} of {found.total:,} test windows"


def columns(found: ForecastComparison) -> list[str]:
    """Headers beside the name."""
    return [*_FIGURES, *(f"skill: {escape_line(name)}" for name in found.peers)]


def cells(each: Forecaster, found: ForecastComparison) -> list[str]:
    """One text for each of ``columns``."""
    inside, crps = each.figures.get("inside"), each.figures["crps"]
    return [
        _told(each.figures["mse"]),
        number(each.figures["mse"].window_error),
        _told(each.figures["mae"]),
        _told(crps) if each.is_method else number(crps.mean),
        number(100 * inside.mean, ".1f") + "%" if inside else "–",
        *("" if name == each.name else number(each.skill[name], "+.3f") for name in found.peers),
    ]


def _told(score: Score) -> str:
    return with_error(score.mean, score.seed_error) if score.each else number(score.mean)


def table(found: ForecastComparison) -> Table:
    """One line a forecaster, lowest MSE first, for a rich console; skill is for wider pages."""
    made = Table(title=Text(title(found)), title_justify="left")
    made.add_column("forecaster", overflow="fold")
    for name in _FIGURES:
        made.add_column(name, justify="right")
    for each in found.forecasters:
        made.add_row(Text(escape_line(each.name)), *cells(each, found)[: len(_FIGURES)])
    return made


def conclusion(found: ForecastComparison) -> list[str]:
    """Sentences: whom the best method is better than, by MSE, and whom it cannot be told from."""
    best = next(each for each in found.forecasters if each.is_method)
    pairs = found.oriented("mse")
    held = [(each, pairs[best.name, each.name]) for each in found.forecasters if (best.name, each.name) in pairs]
    said = [f"{escape_line(best.name)} has the methods' lowest MSE: {_told(best.figures['mse'])}."]
    counted = sum(math.isfinite(pair.p_holm) for pair in found.differences["mse"].values())
    if not counted:
        return [*said, "One seed is separable from nothing: what another would change is unknown."]
    for verdict, words in (("better", "better than"), ("worse", "worse than")):
        names = [escape_line(each.name) for each, pair in held if pair.verdict == verdict]
        if names:
            said.append(f"After Holm's correction for {counted} pairs it is {words} {', '.join(names)}.")
    rest = [escape_line(each.name) for each, pair in held if pair.verdict == "not separable"]
    if rest:
        said.append(f"Not separable from it: {', '.join(rest)}.")
    return said


def matrix(found: ForecastComparison) -> list[tuple[str, list[tuple[str, str, str] | None]]]:
    """A row a method: class, text and tooltip of its MSE's difference from every forecaster's; None for itself."""
    pairs = found.oriented("mse")

    def cell(row: Forecaster, other: Forecaster) -> tuple[str, str, str] | None:
        if row is other:
            return None
        difference = pairs[row.name, other.name]
        tip = escape(sentence(row.name, other.name, difference, "MSE"))
        return difference.verdict.replace(" ", "-"), number(difference.mean, "+.4f"), tip

    methods = [each for each in found.forecasters if each.is_method]
    return [(escape_line(row.name), [cell(row, other) for other in found.forecasters]) for row in methods]


def rows(found: ForecastComparison) -> Iterator[list[Any]]:
    """Every forecaster in full precision, by ``header``."""
    for each in found.forecasters:
        scores = [each.figures.get(name) for name in (*SCORES, "inside")]
        told = [value for score in scores for value in _numbers(score)]
        seeds = len(each.figures["mse"].each)
        yield [each.name, each.is_method, seeds, found.horizon, found.windows, *told, *each.skill.values()]


def header(found: ForecastComparison) -> list[str]:
    """Of ``rows``."""
    parts = ("", "_seed_error", "_window_error")
    scores = [f"{name}{part}" for name in (*SCORES, "inside") for part in parts]
    return [*HEADER, *scores, *(f"skill against {name}" for name in found.peers)]


def _numbers(score: Score | None) -> list[Any]:
    return ["", "", ""] if score is None else [score.mean, score.seed_error, score.window_error]


def write_tables(found: ForecastComparison, folder: Path) -> list[Path]:
    """``forecasts.csv`` and ``forecast-pairs.csv`` in an existing folder."""
    pairs = [
        [score, *pair, d.mean, d.seed_error, d.document_error, d.low, d.high, d.p, d.p_holm, d.verdict]
        for score, differences in found.differences.items()
        for pair, d in differences.items()
    ]
    return [
        write_csv(folder / "forecasts.csv", header(found), rows(found)),
        write_csv(folder / "forecast-pairs.csv", PAIRS, pairs),
    ]


def by_protocol(comparisons: Mapping[str, Comparison]) -> list[tuple[str, list[tuple[str, str] | None]]]:
    """MSE and MAE of every forecaster in every protocol, lowest mean MSE first; None where it has none."""
    every = {name: {each.name: each for each in comparison.forecasts.forecasters} if comparison.forecasts else {}
             for name, comparison in comparisons.items()}  # fmt: skip
    names = dict.fromkeys(name for of in every.values() for name in of)

    def mse(name: str) -> float:
        return mean(of[name].figures["mse"].mean for of in every.values() if name in of)

    def told(each: Forecaster | None) -> tuple[str, str] | None:
        return None if each is None else (_told(each.figures["mse"]), _told(each.figures["mae"]))

    return [(escape_line(name), [told(of.get(name)) for of in every.values()]) for name in sorted(names, key=mse)]


def write_protocols(comparisons: Mapping[str, Comparison], path: Path) -> list[Path]:
    """``rows`` of every protocol that has forecasts as one CSV file, but for skill; nothing where none has."""
    known = {name: found for name, comparison in comparisons.items() if (found := comparison.forecasts)}
    if not known:
        return []
    first = header(next(iter(known.values())))[: len(HEADER) + 12]
    return [
        write_csv(
            path,
            ["protocol", *first],
            ([name, *row[: len(first)]] for name, found in known.items() for row in rows(found)),
        )
    ]


def draw(found: ForecastComparison, colours: Mapping[str, str]) -> Picture:
    """MSE of every forecaster, each seed a ring.

    Args:
        found: what to draw.
        colours: method to its colour; others are in the page's ink.
    """
    known = sorted(each.figures["mse"].mean for each in found.forecasters if each.is_method)
    most = _FAR * known[-1]

    def fill(figure: Figure) -> None:
        axes, ink = figure.subplots(), mpl.rcParams["text.color"]
        for row, each in enumerate(found.forecasters):
            score, colour = each.figures["mse"], colours.get(each.name, ink)
            if score.mean > most:
                axes.annotate(
                    f"{number(score.mean, '.3f')} →", (0.99, row), xycoords=("axes fraction", "data"), ha="right",
                    va="center", color=colour, fontsize="small",
                )  # fmt: skip
                continue
            if math.isfinite(score.seed_error):
                ends = (score.mean - score.seed_error, score.mean + score.seed_error)
                axes.plot(ends, (row, row), color=colour, lw=6, alpha=0.35, solid_capstyle="butt")
            axes.plot(score.each, [row + 0.24] * len(score.each), "o", color=colour, mfc="none", ms=3.5, mew=1)
            axes.plot(score.mean, row, "D" if each.is_method else "|", color=colour, ms=6 if each.is_method else 11)
        axes.set_yticks(range(len(found.forecasters)), [short(each.name) for each in found.forecasters])
        axes.set_ylim(len(found.forecasters) - 0.5, -0.5)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_xlabel(f"MSE of {found.horizon} steps, standardised (left is better)")

    caption = (
        "Mean squared error of forecasts of test windows: mean (diamonds), each seed (rings) and standard error over "
        "seeds of the methods; yardsticks and peers as strokes, as they have no seeds. Arrows: beyond the axis."
    )
    return draw_both("forecasts", caption, 1.0 + 0.3 * len(found.forecasters), fill)
