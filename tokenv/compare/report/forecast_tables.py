"""Show the forecasts of a comparison: windows, tables and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from rich.table import Table
from rich.text import Text

from tokenv.compare.comparison import Comparison, finite_mean
from tokenv.compare.forecast_comparison import ForecastComparison
from tokenv.compare.report.aggregate import (
    format_number,
    format_with_error,
    label_rows,
    sort_methods,
    style_class,
    write_frame,
)
from tokenv.compare.score_statistics import add_reversed_pairs, describe_difference, tabulate_differences
from tokenv.evaluation.boundary_stats import SeriesExcerpt
from tokenv.evaluation.report import draw_windows
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.figures import Picture, draw_both, legend_below, short

_ROW, _REST = 1.15, 0.9  # inches of a method, and of axis and legend
_FAR = 1.5  # forecasts with more than this times the highest MSE of a method are beyond the axis


def window_pictures(comparison: Comparison) -> Iterator[Picture]:
    """Draw one picture a window, named ``window-1`` and so on, with one row a method, the best on top."""
    context = comparison.methods[0].runs[0].config.data.series.context
    firsts = {method.name: method.runs[0].evaluation.windows for method in sort_methods(comparison)}
    for index in range(max(map(len, firsts.values()))):
        known = {name: windows[index] for name, windows in firsts.items() if index < len(windows)}
        rows = [replace(window, name=short(name)) for name, window in known.items()]
        caption = (
            f"{escape_line(next(iter(known.values())).name)}, as the first seed of each method cuts it: bands are "
            "patches, bars below them boundary probabilities."
        )
        draw = partial(_draw_window, excerpts=rows, context=context)
        yield draw_both(f"window-{index + 1}", caption, _REST + _ROW * len(rows), draw)


def _draw_window(figure: Figure, excerpts: list[SeriesExcerpt], context: int) -> None:
    handles = draw_windows(figure, excerpts, context)
    legend_below(figure, handles, [str(handle.get_label()) for handle in handles])


def forecast_title(forecasts: ForecastComparison) -> str:
    """Return the title of the table."""
    return f"Forecasts of {forecasts.horizon} steps, {forecasts.windows:,} of {forecasts.total:,} test windows"


def forecast_cells(row: Mapping[str, Any], forecasts: ForecastComparison) -> dict[str, str]:
    """Return header and text of the cells for a row of the forecasts' table, beside the forecaster's name."""
    skills = {name: format_number(row[f"skill against {name}"], "+.3f") for name in forecasts.baselines}
    return {
        "MSE ± seeds": _format_score(row, "mse"),
        "error over windows": format_number(row["mse_window_error"]),
        "MAE ± seeds": _format_score(row, "mae"),
        "CRPS ± seeds": _format_score(row, "crps"),
        "80% interval holds": format_number(100 * row["inside"], ".1f") + "%" if row["is_method"] else "–",
        **{f"skill: {escape_line(name)}": "" if name == row["forecaster"] else skills[name] for name in skills},
    }


def _format_score(row: Mapping[str, Any], score: str) -> str:
    mean, error = row[score], row[f"{score}_seed_error"]
    return format_with_error(mean, error) if row["is_method"] else format_number(mean)


def list_forecasters(forecasts: ForecastComparison) -> list[dict[str, Any]]:
    """Return the rows of the forecasts' table, lowest MSE first."""
    return forecasts.table.to_dict("records")


def forecast_table(forecasts: ForecastComparison) -> Table:
    """Return a table for a rich console, one line a forecaster, without skills, which need wider pages."""
    table = Table(title=Text(forecast_title(forecasts)), title_justify="left")
    table.add_column("forecaster", overflow="fold")
    for row in list_forecasters(forecasts):
        cells = {name: text for name, text in forecast_cells(row, forecasts).items() if not name.startswith("skill")}
        for name in cells if not table.rows else ():
            table.add_column(name, justify="right")
        table.add_row(Text(escape_line(row["forecaster"])), *cells.values())
    return table


def describe_forecasts(forecasts: ForecastComparison) -> list[str]:
    """Return sentences which compare the best method with all other forecasters, by MSE."""
    best = next(row for row in list_forecasters(forecasts) if row["is_method"])
    pairs, name = add_reversed_pairs(forecasts.differences["mse"]), best["forecaster"]
    known = [(escape_line(other), pairs[name, other]) for other in forecasts.table.forecaster if (name, other) in pairs]
    sentences = [f"{escape_line(name)} has the methods' lowest MSE: {_format_score(best, 'mse')}."]
    counted = sum(math.isfinite(pair.p_holm) for pair in forecasts.differences["mse"].values())
    if not counted:
        return [*sentences, "One seed is separable from nothing: how much another would change is unknown."]
    for verdict in ("better", "worse"):
        names = [other for other, pair in known if pair.verdict == verdict]
        if names:
            sentences.append(f"After Holm's correction for {counted} pairs it is {verdict} than {', '.join(names)}.")
    rest = [other for other, pair in known if pair.verdict == "not separable"]
    if rest:
        sentences.append(f"Not separable from it: {', '.join(rest)}.")
    return sentences


def forecast_matrix(forecasts: ForecastComparison) -> list[tuple[str, list[tuple[str, str, str] | None]]]:
    """Return a row a method: class, text and tooltip of its difference in MSE from each other forecaster."""
    pairs = add_reversed_pairs(forecasts.differences["mse"])

    def make_cell(row: str, other: str) -> tuple[str, str, str] | None:
        if row == other:
            return None
        difference = pairs[row, other]
        tip = escape(describe_difference(row, other, difference, "MSE"))
        return style_class(difference), format_number(difference.mean, "+.4f"), tip

    table = forecasts.table
    methods = table.forecaster[table.is_method]
    return [(escape_line(row), [make_cell(row, other) for other in table.forecaster]) for row in methods]


def tabulate_pairs(forecasts: ForecastComparison) -> pd.DataFrame:
    """Return the differences of all scores, one row a score and pair."""
    frames = {score: tabulate_differences(pairs) for score, pairs in forecasts.differences.items()}
    return pd.concat(frames, names=["score"]).reset_index()


def forecasts_by_protocol(comparisons: Mapping[str, Comparison]) -> list[tuple[str, list[tuple[str, str] | None]]]:
    """Return MSE and MAE of every forecaster in every protocol, lowest mean MSE first; None where it has none."""
    every = [
        {row["forecaster"]: row for row in list_forecasters(each.forecasts)} if each.forecasts else {}
        for each in comparisons.values()
    ]
    names = dict.fromkeys(name for rows in every for name in rows)
    order = sorted(names, key=lambda name: finite_mean(rows[name]["mse"] for rows in every if name in rows))

    def make_cell(row: Mapping[str, Any] | None) -> tuple[str, str] | None:
        return None if row is None else (_format_score(row, "mse"), _format_score(row, "mae"))

    return [(escape_line(name), [make_cell(rows.get(name)) for rows in every]) for name in order]


def write_protocols(comparisons: Mapping[str, Comparison], path: Path) -> list[Path]:
    """Write the forecasts of all protocols as one CSV file, without skills; nothing if there are none."""
    tables = {name: each.forecasts.table for name, each in comparisons.items() if each.forecasts is not None}
    if not tables:
        return []
    frame = pd.concat(tables, names=["protocol"]).reset_index(level=0).reset_index(drop=True)
    return [write_frame(path, frame[[name for name in frame if not name.startswith("skill against ")]])]


def draw_forecasts(forecasts: ForecastComparison, colours: Mapping[str, str]) -> Picture:
    """Draw the MSE of every forecaster, each seed as a ring.

    Args:
        forecasts: what to draw.
        colours: method to its colour; others are in the page's ink.
    """
    rows = list_forecasters(forecasts)
    largest = _FAR * max(row["mse"] for row in rows if row["is_method"])

    def draw(figure: Figure) -> None:
        axes, ink = figure.subplots(), mpl.rcParams["text.color"]
        for y, row in enumerate(rows):
            mse, error, colour = row["mse"], row["mse_seed_error"], colours.get(row["forecaster"], ink)
            if mse > largest:
                axes.annotate(
                    f"{format_number(mse, '.3f')} →", (0.99, y), xycoords=("axes fraction", "data"), ha="right",
                    va="center", color=colour, fontsize="small",
                )  # fmt: skip
                continue
            if math.isfinite(error):
                axes.plot((mse - error, mse + error), (y, y), color=colour, lw=6, alpha=0.35, solid_capstyle="butt")
            seeds = forecasts.seed_mse.get(row["forecaster"], [])
            axes.plot(seeds, [y + 0.24] * len(seeds), "o", color=colour, mfc="none", ms=3.5, mew=1)
            axes.plot(mse, y, "D" if row["is_method"] else "|", color=colour, ms=6 if row["is_method"] else 11)
        label_rows(axes, [row["forecaster"] for row in rows])
        axes.set_xlabel(f"MSE of {forecasts.horizon} steps, standardised (left is better)")

    caption = (
        "Mean squared error of forecasts of test windows: mean (diamonds), each seed (rings) and standard error over "
        "seeds of the methods; baselines as strokes, as they have no seeds. Arrows: beyond the axis."
    )
    return draw_both("forecasts", caption, 1.0 + 0.3 * len(rows), draw)
