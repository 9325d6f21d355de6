"""Write a comparison of methods as tables: cells of pages, the terminal and CSV files."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import rich.table
from rich.text import Text

from tokenv.compare.comparison import AGREEMENT, ComparedMethod, Comparison, finite_mean
from tokenv.compare.report.aggregate import (
    compute_length_shares,
    describe_result,
    find_look_ahead,
    find_losses_at_equal_flops,
    find_reference,
    format_interval,
    format_number,
    format_with_error,
    sort_methods,
)
from tokenv.compare.report.kind_report import Matrix, kind_report
from tokenv.compare.report.table import Cell, Column, Row, Table
from tokenv.compare.robust_statistics import Interval
from tokenv.compare.score_statistics import (
    Difference,
    Pair,
    describe_difference,
    tabulate_differences,
)
from tokenv.compare.score_tables import DIFFERENCE
from tokenv.evaluation.boundary_stats import CLASSES
from tokenv.evaluation.calibration import NATIVE
from tokenv.evaluation.text_report import show_whitespace
from tokenv.plotting.characters import escape_line
from tokenv.plotting.console import console, write_csv

_TOKENS = 12  # most frequent tokens shown
OWN_RATE = "its own"


def difference_cell(first: str, second: str, difference: Difference, unit: str) -> Cell:
    """Return the cell for the difference of two methods or forecasters, coloured by its verdict."""
    return Cell(
        format_number(difference.mean, "+.4f"),
        style=difference.verdict.replace(" ", "-"),
        tip=describe_difference(first, second, difference, unit),
    )


def difference_matrix(
    title: str,
    names: tuple[Sequence[str], Sequence[str]],
    pairs: Mapping[Pair, Difference],
    unit: str,
    *,
    explain: bool = False,
) -> Matrix:
    """Return the differences of the rows' methods or forecasters from those of the columns; none from itself.

    Args:
        title: what a cell is.
        names: names of the rows, and of the columns.
        pairs: differences.
        unit: their unit in words.
        explain: whether tooltips say which is subtracted from which.
    """
    rows = []
    for row in names[0]:
        cells: list[Cell | None] = []
        for column in names[1]:
            cell: Cell | None = Cell("–", style="unknown", tip="not compared")
            if row == column:
                cell = None
            elif (row, column) in pairs:
                cell = difference_cell(row, column, pairs[row, column], unit)
                if explain:
                    tip = f"{cell.tip} The cell is {escape_line(row)} − {escape_line(column)}."
                    cell = cell._replace(tip=tip)
            cells.append(cell)
        rows.append((row, cells))
    return Matrix(title, names[1], rows)


def methods_table(comparison: Comparison) -> Table:
    """Return the table of losses, rates and costs, best method first."""
    methods = sort_methods(comparison)
    words = comparison.words
    unit = comparison.unit
    frame = _means(comparison).assign(
        seeds=[len(method.runs) for method in methods],
        each_seed=[_show_losses(method) for method in methods],
    )
    for key in ("loss", "seed_error", "document_error", "reads_ahead"):
        frame[key] = [getattr(method, key) for method in methods]
    columns = [
        Column("seeds", file="seeds"),
        Column("loss", f"{comparison.unit_in_words} ± seeds", error="seed_error", file=unit),
        Column("seed_error", file="seed_error"),
        Column(
            "document_error", f"error over {words.document}s", terminal=False, file="document_error"
        ),
    ]
    if find_look_ahead(comparison):
        joint = [comparison.joint_loss(method) for method in methods]
        frame["joint"] = [each.loss for each in joint]
        frame["imitator"] = [each.imitator for each in joint]
        columns += [
            Column("reads_ahead", "reads ahead", _show_reads_ahead, file="reads_ahead"),
            Column("joint", "joint bits", _show_joint, file=f"joint_{unit}"),
            Column("imitator", file="imitator"),
        ]
    columns.append(Column("each_seed", "each seed", terminal=False))
    columns += kind_report(comparison).add_columns(frame)
    columns += [
        Column("area", "mean over training", terminal=False, file="area"),
        Column("loss_early", "early exit", file=f"{unit}_early"),
        Column("boundary_rate", f"boundaries / {words.symbol}", ".3f", file="boundary_rate"),
    ]
    if frame.in_context_score.notna().any():
        columns.append(
            Column("in_context_score", "in-context score", ".3f", file="in_context_score")
        )
    if frame.boundary_rate_raw.notna().any():
        columns += [
            Column("loss_raw", "before calibration", terminal=False, file=f"{unit}_raw"),
            Column(
                "boundary_rate_raw", "its rate", ".3f", terminal=False, file="boundary_rate_raw"
            ),
        ]
    columns.append(Column("flops", "FLOPs", ".2e", file="flops"))
    at_equal = find_losses_at_equal_flops(comparison)
    if at_equal is not None:
        frame["at_equal_flops"] = [at_equal.losses[method.name] for method in methods]
        frame["equal_flops"] = at_equal.flops
        name = f"{at_equal.metric.replace('/', '_')}_at_equal_flops"
        columns += [
            Column("at_equal_flops", f"at {format_number(at_equal.flops, '.2e')} FLOPs", file=name),
            Column("equal_flops", file="equal_flops"),
        ]
    columns.append(Column("seconds", "seconds", ",.0f", file="seconds"))
    return Table(comparison.title, "method", frame, columns)


def _means(comparison: Comparison) -> pd.DataFrame:
    """Return a frame of the methods' mean figures, best method first."""
    return comparison.means.loc[[method.name for method in sort_methods(comparison)]].copy()


def _show_losses(method: ComparedMethod) -> str:
    return " ".join(format_number(run.loss) for run in method.runs)


def _show_reads_ahead(row: Row) -> str:
    return "yes" if row["reads_ahead"] else ""


def _show_joint(row: Row) -> str:
    """Return a joint loss with the method which predicts the boundaries from the past."""
    value = format_number(row["joint"])
    if row["imitator"]:
        return f"{value} (by {escape_line(row['imitator'])})"
    return value


def robust_table(comparison: Comparison) -> Table:
    """Return the table of robust statistics with 95% intervals, best method first."""
    robust = comparison.robust
    frame = robust.methods.loc[[method.name for method in sort_methods(comparison)]].copy()
    base = find_reference(comparison) or frame.index[0]
    unknown = Interval(math.nan)
    frame["better"] = [robust.improvement.get((name, base), unknown) for name in frame.index]

    def show_mean(row: Row) -> str:
        return format_interval(Interval(row["iqm"], row["iqm_low"], row["iqm_high"]))

    def show_better(row: Row) -> str:
        if math.isnan(row["better"].value):
            return ""
        return format_interval(row["better"], ".2f")

    columns = [
        Column("iqm", "interquartile mean (95% interval)", show_mean, file="iqm"),
        Column("iqm_low", file="iqm_low"),
        Column("iqm_high", file="iqm_high"),
        Column("better", f"P(better than {base})", show_better),
    ]
    return Table("Robust to exceptional seeds", "method", frame, columns)


def boundaries_table(comparison: Comparison) -> Table:
    """Return the table of boundaries by class of byte, each with its share; without columns if none was measured."""
    frame = _means(comparison)
    columns = []
    classes = [name for name in CLASSES if f"share of {name}" in comparison.runs]
    if classes:
        frame["bytes_per_token"] = 1 / frame.boundary_rate.where(frame.boundary_rate > 0)
        frame["tokens"] = [_frequent_tokens(method) for method in sort_methods(comparison)]
        frame["whitespace f1"] = [comparison.mean(name, "whitespace f1") for name in frame.index]
        columns = [
            Column("bytes_per_token", "bytes per token", ".2f"),
            Column("whitespace f1", "F1 with whitespace", ".3f"),
        ]
        for name in classes:
            share = format_number(100 * finite_mean(comparison.runs[f"share of {name}"]), ".0f")
            columns.append(Column(f"boundaries after {name}", f"{name} ({share}%)", ".3f"))
        columns.append(Column("tokens", "most frequent tokens"))
    return Table("Boundaries", "method", frame, columns)


def _frequent_tokens(method: ComparedMethod) -> str:
    learned = method.runs[0].evaluation.learned
    if learned is None or not learned.tokens:
        return "–"
    return "  ".join(
        show_whitespace(token.encode("latin-1")) for token, _ in learned.tokens[:_TOKENS]
    )


def agreements_table(comparison: Comparison) -> Table:
    """Return the table of agreement with reference boundaries: precision, recall and F1 of each reference."""
    columns = []
    for reference in comparison.references:
        for score in AGREEMENT:
            key = f"{reference} {score}"
            columns.append(Column(key, key, ".3f", file=key.replace(" ", "_")))
    return Table("Agreement", "method", _means(comparison), columns)


def options_table(comparison: Comparison) -> Table:
    """Return the table of the options in which methods differ: a dash for one which a method does not have."""
    options = [comparison.options[method.name] for method in sort_methods(comparison)]
    frame = pd.DataFrame(
        options, index=[method.name for method in sort_methods(comparison)]
    ).fillna("")
    columns = []
    for key in frame:

        def show(row: Row, key: str = key) -> str:
            return row[key] or "–"

        columns.append(Column(key, key, show, file=key))
    return Table("Options in which the methods differ", "method", frame, columns)


def values_table(options: Table) -> Table:
    """Return the same for a terminal, one line an option: each value with the methods which have it."""
    values = []
    for key in options.frame:
        groups = options.frame.groupby(key, sort=False).groups
        lines = [
            f"{value or '–'}: {', '.join(map(escape_line, names))}"
            for value, names in groups.items()
        ]
        values.append("\n".join(lines))
    frame = pd.DataFrame({"values": values}, index=list(options.frame))
    return Table(options.title, "option", frame, [Column("values", "values")])


def rate_columns(comparison: Comparison) -> list[str]:
    """Return the requested rates, ascending, and last that of methods which take no request."""
    rates = comparison.rates
    if not len(rates):
        return []
    columns = [f"{rate:g}" for rate in sorted(set(rates.target_rate[rates.way != NATIVE]))]
    if (rates.way == NATIVE).any():
        columns.append(OWN_RATE)
    return columns


def rate_losses(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Return method, way, and its loss at each of ``rate_columns``: mean ± standard error over seeds."""

    def show(row: Any) -> Cell:
        return Cell(
            format_with_error(row.loss, row.seed_error),
            f"drawn {format_number(row.boundary_rate, '.4f')}",
        )

    return _arrange_by_rate(comparison, comparison.rates, show)


def rate_differences(comparison: Comparison) -> list[tuple[str, str, list[Cell]]]:
    """Return method, way, and its loss minus the reference's at each requested rate, but for the reference."""

    def show(row: Any) -> Cell:
        if not row.verdict:
            return Cell("–")
        errors = (row.difference_document_error, row.difference_seed_error)
        difference = Difference(row.difference, *errors, row.low, row.high, row.p, row.p_holm)
        cell = difference_cell(
            row.method, comparison.rates_reference, difference, comparison.unit_in_words
        )
        return cell._replace(
            small=f"p {format_number(row.p_holm, '.2g')}", tip=f"At {row.target_rate:g}: {cell.tip}"
        )

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
        if row.way == NATIVE:
            column = OWN_RATE
        else:
            column = f"{row.target_rate:g}"
        cells.setdefault((row.method, row.way), {})[column] = show(row)
    columns = rate_columns(comparison)
    rows = []
    for key, own in cells.items():
        rows.append((*key, [own.get(column, Cell("–")) for column in columns]))
    return rows


def rates_table(comparison: Comparison) -> rich.table.Table:
    """Return a table for a rich console, one line a method and way."""
    table = rich.table.Table(
        "method", "way", title=Text(f"{comparison.unit_in_words} ± seeds"), title_justify="left"
    )
    for column in rate_columns(comparison):
        table.add_column(f"at {column}", justify="right")
    for method, way, cells in rate_losses(comparison):
        table.add_row(Text(escape_line(method)), way, *(cell.text for cell in cells))
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print the tables, which method is best, and the sentences on the best method's pairs."""
    terminal = console(wide=120)
    best = sort_methods(comparison)[0]
    tables = [methods_table(comparison), robust_table(comparison)]
    options = options_table(comparison)
    if options.columns:
        tables.append(values_table(options))
    for table in tables:
        terminal.print(table.for_terminal())
    if len(comparison.rates):
        terminal.print(rates_table(comparison))
    for line in describe_result(comparison):
        terminal.print(line)
    for pair, difference in comparison.differences.items():
        if best.name in pair:
            terminal.print(f"- {describe_difference(*pair, difference, comparison.unit_in_words)}")
    for section in kind_report(comparison).sections(()):
        if section.table is not None:
            terminal.print(section.table.for_terminal())
        for line in section.conclusion:
            terminal.print(line)
    for run, reason in comparison.failed.items():
        terminal.print(f"did not finish: {escape_line(run)}: {reason}")


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Write every figure in full precision; a missing one is ``nan`` or empty.

    Args:
        comparison: what to write.
        folder: an existing folder.

    Returns:
        ``methods.csv``, best method first; ``runs.csv``; ``pairs.csv``; ``token-lengths.csv`` (of series
        ``patch-lengths.csv``), shares by method; ``options.csv``, the options in which methods differ, if there are
        any; ``rates.csv`` if methods were measured at requested rates; and those of the kind of data. Losses are in
        columns of their unit's name.
    """
    words = comparison.words
    of_methods = [methods_table(comparison), robust_table(comparison), agreements_table(comparison)]
    options = options_table(comparison)
    frames = {
        "methods.csv": pd.concat(
            [table.for_file().set_index("method") for table in of_methods], axis=1
        ).reset_index(),
        "runs.csv": _tabulate_runs(comparison, of_methods),
        "pairs.csv": _tabulate_pairs(comparison),
        f"{words.token}-lengths.csv": _tabulate_lengths(comparison),
    }
    if options.columns:
        frames["options.csv"] = options.for_file()
    if len(comparison.rates):
        columns = [
            "method",
            "way",
            "target_rate",
            "boundary_rate",
            "flops",
            "seeds",
            "loss",
            "seed_error",
            "document_error",
        ]
        frames["rates.csv"] = comparison.rates[columns + DIFFERENCE].rename(
            columns={"loss": comparison.unit}
        )
    for section in kind_report(comparison).sections(()):
        if section.table is not None:
            frames[f"{section.name}.csv"] = section.table.for_file()
        frames |= section.files
    return [write_frame(folder / name, frame) for name, frame in frames.items()]


def _tabulate_runs(comparison: Comparison, tables: Sequence[Table]) -> pd.DataFrame:
    """Return the figures of every run which the tables show as means, best method first."""
    names = {}
    for table in tables:
        for column in table.columns:
            if column.file and column.key in comparison.runs:
                names[column.key] = column.file
    runs = comparison.runs.set_index("method").loc[list(_means(comparison).index)].reset_index()
    return runs[["method", "seed", "folder", *names]].rename(columns=names)


def _tabulate_pairs(comparison: Comparison) -> pd.DataFrame:
    """Return the difference of every pair, in figures and in a sentence, and the ratio of its FLOPs."""
    pairs = tabulate_differences(comparison.differences).join(comparison.robust.pairs).reset_index()
    spent = comparison.means.flops
    pairs["flops_ratio"] = [
        spent[first] / spent[second] for first, second in comparison.differences
    ]
    pairs["sentence"] = [
        describe_difference(*pair, difference, comparison.unit_in_words)
        for pair, difference in comparison.differences.items()
    ]
    return pairs


def _tabulate_lengths(comparison: Comparison) -> pd.DataFrame:
    """Return the share of tokens by length of every method, best method first."""
    rows = []
    for method in sort_methods(comparison):
        for length, share in enumerate(compute_length_shares(comparison, method.name), 1):
            rows.append((method.name, length, share))
    return pd.DataFrame(rows, columns=["method", f"{comparison.words.symbol}s", "share"])


def write_frame(path: Path, frame: pd.DataFrame) -> Path:
    """Write a data frame without its index as a CSV file (see ``tokenv.plotting.console.write_csv``)."""
    return write_csv(path, list(frame.columns), frame.itertuples(index=False, name=None))
