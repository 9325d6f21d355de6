"""Write a comparison of methods as tables: CSV files, the terminal, and statistics of learned boundaries."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.table import Table
from rich.text import Text

from tokenv.compare.comparison import AGREEMENT, ComparedMethod, Comparison, finite_mean
from tokenv.compare.rate_curves import DIFFERENCE
from tokenv.compare.report import forecast_tables
from tokenv.compare.report.aggregate import (
    compute_length_shares,
    compute_test_error,
    describe_result,
    find_look_ahead,
    find_reference,
    format_interval,
    format_number,
    format_with_error,
    sort_methods,
    write_frame,
)
from tokenv.compare.report.rate_tables import rates_table
from tokenv.compare.score_statistics import describe_difference, tabulate_differences
from tokenv.evaluation.boundary_stats import CLASSES
from tokenv.evaluation.text_report import show_whitespace
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.console import console

_TOKENS = 12  # most frequent tokens shown


def method_cells(comparison: Comparison, method: ComparedMethod) -> dict[str, str]:
    """Return header and text of the cells on a method's losses, rate and cost."""

    def mean(column: str, form: str = ".4f") -> str:
        return format_number(comparison.mean(method.name, column), form)

    cells = {
        f"{escape(comparison.unit_in_words)} ± seeds": format_with_error(method.loss, method.seed_error),
        f"error over {comparison.words.document}s": format_number(method.document_error),
        **({"joint bits": format_number(comparison.joint_loss(method))} if find_look_ahead(comparison) else {}),
        "each seed": " ".join(format_number(run.loss) for run in method.runs),
    }
    if comparison.has_test:
        error = compute_test_error(comparison, method.name)
        cells["test ± seeds"] = format_with_error(comparison.mean(method.name, "loss_test"), error)
    cells |= {"mean over training": mean("area"), "early exit": mean("loss_early")}
    cells[f"boundaries / {comparison.words.symbol}"] = mean("boundary_rate", ".3f")
    if comparison.calibrated:
        cells |= {"before calibration": mean("loss_raw"), "its rate": mean("boundary_rate_raw", ".3f")}
    return cells | {"FLOPs": mean("flops", ".2e"), "seconds": mean("seconds", ",.0f")}


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
        ``patch-lengths.csv``), shares by method; ``rates.csv`` if methods were measured at requested rates,
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
        own[f"joint_{unit}"] = [comparison.joint_loss(method) for method in methods]
    means = _blank_missing(comparison.means.loc[order, list(names)], compared).rename(columns=names)
    runs = _blank_missing(comparison.runs.set_index("method").loc[order].reset_index(), compared)
    pairs = tabulate_differences(comparison.differences).join(comparison.robust.pairs).reset_index()
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
    if len(comparison.rates):
        columns = ["method", "way", "asked", "drawn", "flops", "seeds", "loss", "seed_error", "document_error"]
        frames["rates.csv"] = comparison.rates[columns + DIFFERENCE].rename(columns={"loss": unit})
    if comparison.forecasts is not None:
        frames["forecasts.csv"] = comparison.forecasts.table
        frames["forecast-pairs.csv"] = forecast_tables.tabulate_pairs(comparison.forecasts)
    return [write_frame(folder / name, frame) for name, frame in frames.items()]


def _blank_missing(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Return the frame with empty cells for missing values of some columns."""
    return frame.assign(**{name: frame[name].astype(object).where(frame[name].notna(), "") for name in columns})


def comparison_table(comparison: Comparison) -> Table:
    """Return a table for a rich console, one line a method, best first."""
    methods = sort_methods(comparison)
    rows = [method_cells(comparison, method) for method in methods]
    wanted = (
        f"{escape(comparison.unit_in_words)} ± seeds",
        "joint bits",
        "test ± seeds",
        "early exit",
        "boundaries /",
        "FLOPs",
        "seconds",
    )
    names = [name for name in rows[0] if name.startswith(wanted)]
    table = Table(title=Text(escape(comparison.title)), title_justify="left")
    table.add_column("method", overflow="fold")
    for name in names:
        table.add_column("rate" if name.startswith("boundaries") else name, justify="right")
    for method, row in zip(methods, rows, strict=True):
        mark = " (reads ahead)" if method.reads_ahead else ""
        table.add_row(Text(escape_line(method.name) + mark), *(row[name] for name in names))
    return table


def robust_table(comparison: Comparison) -> Table:
    """Return a table of robust statistics for a rich console, one line a method, best first."""
    rows = [(method.name, robust_cells(comparison, method)) for method in sort_methods(comparison)]
    table = Table(title=Text("Robust to exceptional seeds"), title_justify="left")
    table.add_column("method", overflow="fold")
    for header in rows[0][1]:
        table.add_column(Text(header), justify="right")
    for name, row in rows:
        table.add_row(Text(escape_line(name)), *row.values())
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print the tables, which method is best, and the sentences on the best method's pairs."""
    terminal = console(wide=120)
    terminal.print(comparison_table(comparison))
    terminal.print(robust_table(comparison))
    if len(comparison.rates):
        terminal.print(rates_table(comparison))
    for line in describe_result(comparison):
        terminal.print(line)
    best = sort_methods(comparison)[0].name
    for pair, difference in comparison.differences.items():
        if best in pair:
            terminal.print(f"- {describe_difference(*pair, difference, comparison.unit_in_words)}")
    if comparison.forecasts is not None:
        terminal.print(forecast_tables.forecast_table(comparison.forecasts))
        for line in forecast_tables.describe_forecasts(comparison.forecasts):
            terminal.print(line)
    for run, reason in comparison.failed.items():
        terminal.print(f"did not finish: {escape_line(run)}: {reason}")
