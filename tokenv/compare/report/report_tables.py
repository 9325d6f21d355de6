"""Write a comparison of methods as tables: cells of pages, the terminal and CSV files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.table import Column, Table
from rich.text import Text

from tokenv.compare.comparison import AGREEMENT, ComparedMethod, Comparison, JointLoss, finite_mean
from tokenv.compare.report.aggregate import (
    compute_length_shares,
    compute_test_error,
    describe_result,
    find_look_ahead,
    find_losses_at_equal_flops,
    find_reference,
    format_interval,
    format_number,
    format_with_error,
    sort_methods,
)
from tokenv.compare.score_statistics import Difference, add_reversed_pairs, describe_difference, tabulate_differences
from tokenv.compare.score_tables import DIFFERENCE, ForecastComparison
from tokenv.evaluation.boundary_stats import CLASSES
from tokenv.evaluation.calibration import NATIVE
from tokenv.evaluation.text_report import show_whitespace
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.console import console, write_csv

_TOKENS = 12  # most frequent tokens shown
OWN_RATE = "its own"
Row = tuple[str, Mapping[str, str]]  # name, and header to text of the other cells


class Cell(NamedTuple):
    """Cell of a table: its text, smaller text below it, its style class, and its tooltip."""

    text: str
    small: str = ""
    style: str = ""
    tip: str = ""


def difference_cell(first: str, second: str, difference: Difference, unit: str) -> Cell:
    """Return the cell for the difference of two methods or forecasters, coloured by its verdict."""
    tip = escape(describe_difference(first, second, difference, unit))
    return Cell(format_number(difference.mean, "+.4f"), "", difference.verdict.replace(" ", "-"), tip)


def format_joint(joint: JointLoss) -> str:
    """Return a joint loss for people, with the method which predicts the boundaries from the past."""
    value = format_number(joint.loss)
    return f"{value} (by {escape_line(joint.imitator)})" if joint.imitator else value


def method_cells(comparison: Comparison, method: ComparedMethod) -> dict[str, str]:
    """Return header and text of the cells on a method's losses, rate and cost."""

    def mean(column: str, form: str = ".4f") -> str:
        return format_number(comparison.mean(method.name, column), form)

    cells = {
        f"{escape(comparison.unit_in_words)} ± seeds": format_with_error(method.loss, method.seed_error),
        f"error over {comparison.words.document}s": format_number(method.document_error),
        **({"joint bits": format_joint(comparison.joint_loss(method))} if find_look_ahead(comparison) else {}),
        "each seed": " ".join(format_number(run.loss) for run in method.runs),
    }
    if comparison.has_test:
        error = compute_test_error(comparison, method.name)
        cells["test ± seeds"] = format_with_error(comparison.mean(method.name, "loss_test"), error)
    cells |= {"mean over training": mean("area"), "early exit": mean("loss_early")}
    cells[f"boundaries / {comparison.words.symbol}"] = mean("boundary_rate", ".3f")
    if comparison.calibrated:
        cells |= {"before calibration": mean("loss_raw"), "its rate": mean("boundary_rate_raw", ".3f")}
    cells["FLOPs"] = mean("flops", ".2e")
    if (at_equal := find_losses_at_equal_flops(comparison)) is not None:
        cells[f"at {format_number(at_equal.flops, '.2e')} FLOPs"] = format_number(at_equal.losses[method.name])
    return cells | {"seconds": mean("seconds", ",.0f")}


def robust_cells(comparison: Comparison, method: ComparedMethod) -> dict[str, str]:
    """Return header and text of the cells on a method's robust statistics, with 95% intervals."""
    robust, base = comparison.robust, find_reference(comparison) or sort_methods(comparison)[0].name
    header, pair = f"P(better than {escape_line(base)})", (method.name, base)
    better = format_interval(robust.improvement[pair], ".2f") if pair in robust.improvement else ""
    return {"interquartile mean (95% interval)": format_interval(robust.iqm[method.name]), header: better}


def boundary_cells(comparison: Comparison, method: ComparedMethod) -> dict[str, str]:
    """Return header and text of the cells on a method's boundaries; a dash where nothing was measured.

    Boundaries by class have a column for each class of byte in the text, with its share. There are no cells if nothing
    was measured of any method, as of series.
    """
    classes = [name for name in CLASSES if f"share of {name}" in comparison.runs]
    if not classes:
        return {}
    rate, learned = comparison.mean(method.name, "boundary_rate"), method.runs[0].evaluation.learned
    tokens = [
        escape(show_whitespace(token.encode("latin-1"))) for token, _ in (learned.tokens if learned else [])[:_TOKENS]
    ]
    cells = {
        "bytes per token": format_number(1 / rate, ".2f") if rate > 0 else "–",
        "F1 with whitespace": format_number(comparison.mean(method.name, "whitespace f1"), ".3f"),
    }
    for name in classes:
        share = format_number(100 * finite_mean(comparison.runs[f"share of {name}"]), ".0f")
        cells[f"{name} ({share}%)"] = format_number(comparison.mean(method.name, f"boundaries after {name}"), ".3f")
    return cells | {"most frequent tokens": "  ".join(tokens) or "–"}


def rate_columns(comparison: Comparison) -> list[str]:
    """Return the requested rates, ascending, and last that of methods which take no request."""
    rates = comparison.rates
    if not len(rates):
        return []
    own = [OWN_RATE] if (rates.way == NATIVE).any() else []
    return [f"{rate:g}" for rate in sorted(set(rates.asked[rates.way != NATIVE]))] + own


def rate_losses(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Return method, way, and its loss at each of ``rate_columns``: mean ± standard error over seeds."""

    def show(row: Any) -> Cell:
        return Cell(format_with_error(row.loss, row.seed_error), f"drawn {format_number(row.drawn, '.4f')}")

    return _arrange_by_rate(comparison, comparison.rates, show)


def rate_differences(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Return method, way, and its loss minus the reference's at each requested rate, but for the reference."""

    def show(row: Any) -> Cell:
        if not row.verdict:
            return Cell("–")
        errors = (row.difference_document_error, row.difference_seed_error)
        difference = Difference(row.difference, *errors, row.low, row.high, row.p, row.p_holm)
        cell = difference_cell(row.method, comparison.rates_reference, difference, comparison.unit_in_words)
        return cell._replace(small=f"p {format_number(row.p_holm, '.2g')}", tip=f"At {row.asked:g}: {cell.tip}")

    rates = comparison.rates
    if not len(rates):
        return []
    tested = set(rates.method[rates.verdict != ""])
    rows = _arrange_by_rate(comparison, rates[rates.compared & rates.method.isin(tested)], show)
    requested = len(set(rate_columns(comparison)) - {OWN_RATE})
    return [(method, way, cells[:requested]) for method, way, cells in rows]


def _arrange_by_rate(
    comparison: Comparison, rates: pd.DataFrame, show: Callable[[Any], Cell]
) -> list[tuple[str, str, list[Cell]]]:
    """Return a row for every method and way: a cell for each of ``rate_columns``."""
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in rates.itertuples(index=False):
        column = OWN_RATE if row.way == NATIVE else f"{row.asked:g}"
        cells.setdefault((row.method, row.way), {})[column] = show(row)
    columns = rate_columns(comparison)
    return [(*key, [own.get(column, Cell("–")) for column in columns]) for key, own in cells.items()]


def forecast_title(forecasts: ForecastComparison) -> str:
    """Return the title of the table."""
    return f"Forecasts of {forecasts.horizon} steps, {forecasts.windows:,} of {forecasts.total:,} test windows"


def forecast_rows(forecasts: ForecastComparison) -> list[Row]:
    """Return every forecaster, lowest MSE first, with header and text of the other cells."""
    rows: list[Row] = []
    for row in forecasts.table.to_dict("records"):
        cells = {
            "MSE ± seeds": format_score(row, "mse"),
            "error over windows": format_number(row["mse_window_error"]),
            "MAE ± seeds": format_score(row, "mae"),
            "CRPS ± seeds": format_score(row, "crps"),
            "80% interval holds": format_number(100 * row["inside"], ".1f") + "%" if row["is_method"] else "–",
        }
        for name in forecasts.baselines:
            own = name == row["forecaster"]
            cells[f"skill: {escape_line(name)}"] = "" if own else format_number(row[f"skill against {name}"], "+.3f")
        rows.append((row["forecaster"], cells))
    return rows


def format_score(row: Mapping[str, Any], score: str) -> str:
    """Return a forecaster's score for people, of methods with its standard error over seeds."""
    mean, error = row[score], row[f"{score}_seed_error"]
    return format_with_error(mean, error) if row["is_method"] else format_number(mean)


def describe_forecasts(forecasts: ForecastComparison) -> list[str]:
    """Return sentences which compare the best method with all other forecasters, by MSE."""
    best = next(row for row in forecasts.table.to_dict("records") if row["is_method"])
    pairs, name = add_reversed_pairs(forecasts.differences["mse"]), best["forecaster"]
    known = [(escape_line(other), pairs[name, other]) for other in forecasts.table.forecaster if (name, other) in pairs]
    sentences = [f"{escape_line(name)} has the methods' lowest MSE: {format_score(best, 'mse')}."]
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


def _make_table(title: str, first: str, rows: Sequence[Row]) -> Table:
    """Return a table for a rich console whose first column, of names, is headed ``first``."""
    table = Table(title=Text(escape(title)), title_justify="left")
    table.add_column(first, overflow="fold")
    for header in rows[0][1]:
        table.add_column(Text(header), justify="right")
    for name, cells in rows:
        table.add_row(Text(escape_line(name)), *cells.values())
    return table


def _method_rows(comparison: Comparison) -> list[Row]:
    """Return every method with those of its cells which fit a terminal."""
    left_out = ("error over", "each seed", "mean over", "before", "its rate")
    rows: list[Row] = []
    for method in sort_methods(comparison):
        cells = {
            "rate" if header.startswith("boundaries") else header: text
            for header, text in method_cells(comparison, method).items()
            if not header.startswith(left_out)
        }
        rows.append((method.name + (" (reads ahead)" if method.reads_ahead else ""), cells))
    return rows


def option_keys(comparison: Comparison) -> list[str]:
    """Return the dotted keys of the options in which methods differ."""
    keys: dict[str, None] = {}
    for own in comparison.options.values():
        keys |= dict.fromkeys(own)
    return list(keys)


def option_cells(comparison: Comparison, method: ComparedMethod) -> dict[str, str]:
    """Return key and value of the options in which methods differ; a dash for one which the method does not have."""
    own = comparison.options[method.name]
    return {escape_line(key): escape_line(own.get(key, "–")) for key in option_keys(comparison)}


def options_table(comparison: Comparison) -> Table:
    """Return a table for a rich console, one line an option: its values, each with the methods which have it."""
    table = Table("option", "values", title=Text("Options in which the methods differ"), title_justify="left")
    for key in option_keys(comparison):
        methods_of: dict[str, list[str]] = {}
        for name, own in comparison.options.items():
            methods_of.setdefault(own.get(key, "–"), []).append(escape_line(name))
        values = [f"{escape_line(value)}: {', '.join(names)}" for value, names in methods_of.items()]
        table.add_row(Text(escape_line(key)), Text("\n".join(values)))
    return table


def rates_table(comparison: Comparison) -> Table:
    """Return a table for a rich console, one line a method and way."""
    names = [Column(f"at {column}", justify="right") for column in rate_columns(comparison)]
    title = f"{comparison.unit_in_words} ± seeds"
    table = Table("method", "way", *names, title=Text(title), title_justify="left")
    for method, way, cells in rate_losses(comparison):
        table.add_row(Text(escape_line(method)), way, *(cell.text for cell in cells))
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print the tables, which method is best, and the sentences on the best method's pairs."""
    terminal, methods = console(wide=120), sort_methods(comparison)
    terminal.print(_make_table(comparison.title, "method", _method_rows(comparison)))
    robust = [(method.name, robust_cells(comparison, method)) for method in methods]
    terminal.print(_make_table("Robust to exceptional seeds", "method", robust))
    if option_keys(comparison):
        terminal.print(options_table(comparison))
    if len(comparison.rates):
        terminal.print(rates_table(comparison))
    for line in describe_result(comparison):
        terminal.print(line)
    for pair, difference in comparison.differences.items():
        if methods[0].name in pair:
            terminal.print(f"- {describe_difference(*pair, difference, comparison.unit_in_words)}")
    if (forecasts := comparison.forecasts) is not None:
        rows = [
            (name, {header: text for header, text in cells.items() if not header.startswith("skill")})
            for name, cells in forecast_rows(forecasts)  # skills need wider pages
        ]
        terminal.print(_make_table(forecast_title(forecasts), "forecaster", rows))
        for line in describe_forecasts(forecasts):
            terminal.print(line)
    for run, reason in comparison.failed.items():
        terminal.print(f"did not finish: {escape_line(run)}: {reason}")


def _csv_columns(comparison: Comparison) -> dict[str, str]:
    """Return the columns of ``Comparison.runs`` which are written beside the loss, and their names in the files."""
    unit = comparison.unit
    names = {"loss_test": f"test_{unit}"} if comparison.has_test else {}
    names |= {"loss_early": f"{unit}_early", "area": "area", "boundary_rate": "boundary_rate"}
    if comparison.calibrated:
        names |= {"loss_raw": f"{unit}_raw", "boundary_rate_raw": "boundary_rate_raw"}
    names |= {"flops": "flops", "seconds": "seconds"}
    every = [(reference, score) for reference in comparison.references for score in AGREEMENT]
    return names | {f"{name} {score}": f"{name.replace(' ', '_')}_{score}" for name, score in every}


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Write every figure in full precision; a missing one is ``nan`` or empty.

    Args:
        comparison: what to write.
        folder: an existing folder.

    Returns:
        ``methods.csv``, best method first; ``runs.csv``; ``pairs.csv``; ``token-lengths.csv`` (of series
        ``patch-lengths.csv``), shares by method; ``options.csv``, the options in which methods differ;
        ``rates.csv`` if methods were measured at requested rates,
        ``forecasts.csv`` and ``forecast-pairs.csv`` if there are forecasts. Losses are in columns of their unit's name.
    """
    unit, words, names = comparison.unit, comparison.words, _csv_columns(comparison)
    methods = sort_methods(comparison)
    order = [method.name for method in methods]
    compared = [f"{reference} {score}" for reference in comparison.references for score in AGREEMENT]
    own = {
        "method": order,
        "seeds": [len(method.runs) for method in methods],
        unit: [method.loss for method in methods],
        "seed_error": [method.seed_error for method in methods],
        "document_error": [method.document_error for method in methods],
        **comparison.robust.methods.loc[order].to_dict("list"),
    }
    if find_look_ahead(comparison):
        own["reads_ahead"] = [method.reads_ahead for method in methods]
        joint = [comparison.joint_loss(method) for method in methods]
        own[f"joint_{unit}"] = [each.loss for each in joint]
        own["imitator"] = [each.imitator for each in joint]
    if (at_equal := find_losses_at_equal_flops(comparison)) is not None:
        own["equal_flops"] = [at_equal.flops] * len(order)
        own[f"{at_equal.metric.replace('/', '_')}_at_equal_flops"] = [at_equal.losses[name] for name in order]
    means = _blank_missing(comparison.means.loc[order, list(names)], compared).rename(columns=names)
    runs = _blank_missing(comparison.runs.set_index("method").loc[order].reset_index(), compared)
    pairs = tabulate_differences(comparison.differences).join(comparison.robust.pairs).reset_index()
    spent = comparison.means.flops
    pairs["flops_ratio"] = [spent[first] / spent[second] for first, second in comparison.differences]
    pairs["sentence"] = [
        describe_difference(*pair, each, comparison.unit_in_words) for pair, each in comparison.differences.items()
    ]
    lengths = [(name, i, share) for name in order for i, share in enumerate(compute_length_shares(comparison, name), 1)]
    frames = {
        "methods.csv": pd.concat([pd.DataFrame(own), means.reset_index(drop=True)], axis=1),
        "runs.csv": runs[["method", "seed", "folder", "loss", *names]].rename(columns={"loss": unit, **names}),
        "pairs.csv": pairs,
        f"{words.token}-lengths.csv": pd.DataFrame(lengths, columns=["method", f"{words.symbol}s", "share"]),
    }
    if option_keys(comparison):
        rows = [{"method": name} | dict(comparison.options[name]) for name in order]
        frames["options.csv"] = pd.DataFrame(rows, columns=["method", *option_keys(comparison)]).fillna("")
    if len(comparison.rates):
        columns = ["method", "way", "asked", "drawn", "flops", "seeds", "loss", "seed_error", "document_error"]
        frames["rates.csv"] = comparison.rates[columns + DIFFERENCE].rename(columns={"loss": unit})
    if (forecasts := comparison.forecasts) is not None:
        differences = {score: tabulate_differences(pairs) for score, pairs in forecasts.differences.items()}
        frames["forecasts.csv"] = forecasts.table
        frames["forecast-pairs.csv"] = pd.concat(differences, names=["score"]).reset_index()
    return [write_frame(folder / name, frame) for name, frame in frames.items()]


def write_frame(path: Path, frame: pd.DataFrame) -> Path:
    """Write a data frame without its index as a CSV file (see ``tokenv.plotting.console.write_csv``)."""
    return write_csv(path, list(frame.columns), frame.itertuples(index=False, name=None))


def _blank_missing(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Return the frame with empty cells for missing values of some columns."""
    return frame.assign(**{name: frame[name].astype(object).where(frame[name].notna(), "") for name in columns})
