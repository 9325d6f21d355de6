"""What the report of a comparison shows of series only: losses on test windows, forecasts, windows with patches."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from tokenv.compare.report.aggregate import (
    assign_styles,
    format_number,
    format_with_error,
    label_rows,
    sort_methods,
)
from tokenv.compare.report.kind_report import KindReport, Section, Summary
from tokenv.compare.report.report_tables import difference_matrix
from tokenv.compare.report.table import Column, Row, Table
from tokenv.compare.score_statistics import add_reversed_pairs, tabulate_differences
from tokenv.plotting.characters import escape_line
from tokenv.plotting.figures import Picture, draw_both, legend_below, short
from tokenv.series.patches import SeriesExcerpt
from tokenv.series.report import draw_windows
from tokenv.series.series_comparison import ForecastComparison

_ROW = 1.15
_REST = 0.9  # inches of a method in a window's picture, and of axis and legend
_FAR = 1.5  # forecasts with more than this times the highest MSE of a method are beyond the axis


class SeriesReport(KindReport):
    """What the report of a comparison shows of series alone."""

    notes: ClassVar[Sequence[str]] = (
        "Methods are ordered by the loss on validation windows, which come before the test windows in time: choose by "
        "validation, and report test.",
        "Dependent windows are of one group: those at the same time, or those of one synthetic series.",
    )

    def add_columns(self, frame: pd.DataFrame) -> list[Column]:
        """Return the loss on test windows, and add its standard error over seeds to the frame."""
        frame["test_error"] = self.comparison.runs.groupby("method")["loss_test"].sem()
        name = f"test_{self.comparison.unit}"
        return [Column("loss_test", "test ± seeds", error="test_error", file=name)]

    def draw(self) -> Iterator[Picture]:
        """Draw the forecasts' errors, if there are any, and the first windows of every method."""
        if self.comparison.of_kind is not None:
            styles = assign_styles(self.comparison)
            colours = {name: style.colour for name, style in styles.items()}
            yield draw_forecasts(self.comparison.of_kind, colours)
        yield from self._draw_windows()

    def sections(self, pictures: Collection[str]) -> list[Section]:
        """Return the section of forecasts, if there are any, and that of the windows drawn."""
        sections = []
        if self.comparison.of_kind is not None:
            sections.append(forecasts_section(self.comparison.of_kind))
        windows = [name for name in pictures if name.startswith("window-")]
        if windows:
            heading = "The same windows with the boundaries of every method"
            sections.append(Section("windows", heading, last=True, pictures=windows))
        return sections

    def _draw_windows(self) -> Iterator[Picture]:
        """Draw one picture a window, named ``window-1`` and so on, with one row a method, the best on top."""
        context = self.comparison.methods[0].runs[0].config.data.options.context
        by_window: list[dict[str, SeriesExcerpt]] = []
        for method in sort_methods(self.comparison):
            evaluation: Any = method.runs[0].evaluation
            for index, window in enumerate(evaluation.windows):
                if index == len(by_window):
                    by_window.append({})
                by_window[index][method.name] = window
        for number, windows in enumerate(by_window, 1):
            yield _draw_window(number, windows, context)


def _draw_window(number: int, windows: Mapping[str, SeriesExcerpt], context: int) -> Picture:
    rows = [replace(window, name=short(name)) for name, window in windows.items()]

    def draw(figure: Figure) -> None:
        entries = draw_windows(figure, rows, context)
        legend_below(figure, list(entries.values()), list(entries))

    origin = next(iter(windows.values())).name
    caption = (
        f"{escape_line(origin)}, as the first seed of each method cuts it: bands are patches, bars below them boundary "
        "probabilities."
    )
    return draw_both(f"window-{number}", caption, _REST + _ROW * len(rows), draw)


def forecasts_section(forecasts: ForecastComparison) -> Section:
    """Return the section of forecasts: who has the lowest error, every forecaster's scores, and all pairs."""
    by_score = {}
    for score, differences in forecasts.differences.items():
        by_score[score] = tabulate_differences(differences)
    table = forecasts_table(forecasts)
    names = forecasts.table.forecaster
    summarised = []
    for column in table.columns:
        if column.key not in ("mse", "mae"):
            column = replace(column, header="")
        summarised.append(column)
    return Section(
        name="forecasts",
        heading=table.title,
        conclusion=describe_forecasts(forecasts),
        table=table,
        note="Of values standardised by the training steps, lowest MSE first: MSE of the mean, MAE of the median, and "
        "CRPS, which is the MAE for a single value. Naive baselines and DLinear forecast the same windows; they have "
        "no likelihood and no seeds, and are shown here only. Skill: 1 − MSE / that forecaster’s MSE.",
        pictures=("forecasts",),
        matrix=difference_matrix(
            "MSE of the row minus that of the column, window by window and seed by seed",
            (list(names[forecasts.table.is_method]), list(names)),
            add_reversed_pairs(forecasts.differences["mse"]),
            "MSE",
        ),
        summary=Summary(
            replace(table, title="Forecasts of test windows", columns=summarised),
            "Of values standardised by the training steps, all forecasters of a protocol on the same windows; lowest "
            "mean MSE first. Intervals and differences are on each protocol's own page.",
        ),
        files={"forecast-pairs.csv": pd.concat(by_score, names=["score"]).reset_index()},
    )


def forecasts_table(forecasts: ForecastComparison) -> Table:
    """Return the table of every forecaster, lowest MSE first; baselines have no errors over seeds."""
    frame = forecasts.table.set_index("forecaster")

    def show_inside(row: Row) -> str:
        if row["is_method"]:
            return format_number(100 * row["inside"], ".1f") + "%"
        return "–"

    columns = [Column(key, file=key) for key in ("is_method", "seeds", "horizon", "windows")]
    headers = {"mse": "MSE ± seeds", "mae": "MAE ± seeds", "crps": "CRPS ± seeds"}
    for score, header in headers.items():
        columns.append(Column(score, header, error=f"{score}_seed_error", file=score))
        columns.append(Column(f"{score}_seed_error", file=f"{score}_seed_error"))
        window_error = f"{score}_window_error"
        shown = ""
        if score == "mse":
            shown = "error over windows"
        columns.append(Column(window_error, shown, file=window_error))
    columns.append(Column("inside", "80% interval holds", show_inside, file="inside"))
    for name in forecasts.baselines:
        key = f"skill against {name}"
        # needs wider pages
        columns.append(Column(key, f"skill: {name}", "+.3f", terminal=False, file=key))
    title = f"Forecasts of {forecasts.horizon} steps, {forecasts.windows:,} of {forecasts.total:,} test windows"
    return Table(title, "forecaster", frame, columns)


def describe_forecasts(forecasts: ForecastComparison) -> list[str]:
    """Return sentences which compare the best method with all other forecasters, by MSE."""
    best = next(row for row in forecasts.table.to_dict("records") if row["is_method"])
    pairs = add_reversed_pairs(forecasts.differences["mse"])
    name = best["forecaster"]
    known = [
        (escape_line(other), pairs[name, other])
        for other in forecasts.table.forecaster
        if (name, other) in pairs
    ]
    lowest = format_with_error(best["mse"], best["mse_seed_error"])
    sentences = [f"{escape_line(name)} has the methods' lowest MSE: {lowest}."]
    counted = sum(math.isfinite(pair.p_holm) for pair in forecasts.differences["mse"].values())
    if not counted:
        return [
            *sentences,
            "One seed is separable from nothing: how much another would change is unknown.",
        ]
    for verdict in ("better", "worse"):
        names = [other for other, pair in known if pair.verdict == verdict]
        if names:
            sentences.append(
                f"After Holm's correction for {counted} pairs it is {verdict} than {', '.join(names)}."
            )
    rest = [other for other, pair in known if pair.verdict == "not separable"]
    if rest:
        sentences.append(f"Not separable from it: {', '.join(rest)}.")
    return sentences


def draw_forecasts(forecasts: ForecastComparison, colours: Mapping[str, str]) -> Picture:
    """Draw the MSE of every forecaster, each seed as a ring.

    Args:
        forecasts: what to draw.
        colours: method to its colour; others are in the page's ink.
    """
    rows = forecasts.table.to_dict("records")
    largest = _FAR * max(row["mse"] for row in rows if row["is_method"])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        ink = mpl.rcParams["text.color"]
        for y, row in enumerate(rows):
            mse = row["mse"]
            error = row["mse_seed_error"]
            colour = colours.get(row["forecaster"], ink)
            if mse > largest:
                axes.annotate(
                    f"{format_number(mse, '.3f')} →", (0.99, y), xycoords=("axes fraction", "data"), ha="right",
                    va="center", color=colour, fontsize="small",
                )  # fmt: skip
                continue
            if math.isfinite(error):
                axes.plot(
                    (mse - error, mse + error),
                    (y, y),
                    color=colour,
                    lw=6,
                    alpha=0.35,
                    solid_capstyle="butt",
                )
            seeds = forecasts.seed_mse.get(row["forecaster"], [])
            axes.plot(seeds, [y + 0.24] * len(seeds), "o", color=colour, mfc="none", ms=3.5, mew=1)
            marker, size = ("D", 6) if row["is_method"] else ("|", 11)
            axes.plot(mse, y, marker, color=colour, ms=size)
        label_rows(axes, [row["forecaster"] for row in rows])
        axes.set_xlabel(f"MSE of {forecasts.horizon} steps, standardised (left is better)")

    caption = (
        "Mean squared error of forecasts of test windows: mean (diamonds), each seed (rings) and standard error over "
        "seeds of the methods; baselines as strokes, as they have no seeds. Arrows: beyond the axis."
    )
    return draw_both("forecasts", caption, 1.0 + 0.3 * len(rows), draw)
