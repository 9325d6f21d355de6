"""A comparison of methods as CSV files and in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tokenv.compare.comparison import Comparison
from tokenv.compare.report import forecasts
from tokenv.compare.report.numbers import (
    agreement,
    conclusion,
    error_on_test,
    length_shares,
    number,
    over_seeds,
    ranked,
    references,
    with_error,
)
from tokenv.compare.report.rates import rate_rows, rates_table
from tokenv.compare.significance import sentence
from tokenv.report.characters import plain, visible
from tokenv.report.table import console, write_csv

_SCORES = ("precision", "recall", "f1")


def _figures(comparison: Comparison) -> dict[str, str]:
    """Column to attribute of ``ComparedRun``, beside the loss."""
    test = {f"test_{comparison.unit}": "loss_test"} if comparison.has_test else {}
    early = {f"{comparison.unit}_early": "loss_early"}
    raw = (
        {f"{comparison.unit}_raw": "loss_raw", "boundary_rate_raw": "boundary_rate_raw"}
        if comparison.calibrated
        else {}
    )
    return (
        test
        | early
        | {"area": "area", "boundary_rate": "boundary_rate"}
        | raw
        | {"flops": "flops", "seconds": "seconds"}
    )


def write_tables(comparison: Comparison, folder: Path) -> list[Path]:
    """Write every figure, in full precision; one that is missing is ``nan`` or empty.

    Args:
        comparison: what to write.
        folder: an existing folder.

    Returns:
        ``methods.csv``, best method first; ``runs.csv``; ``pairs.csv``; ``token-lengths.csv`` (of series
        ``patch-lengths.csv``), shares by method; ``rates.csv`` where methods were asked for rates, ``forecasts.csv``
        and ``forecast-pairs.csv`` where there are any. Losses are in columns of their unit's name.
    """
    held, figures, words = references(comparison), _figures(comparison), comparison.words
    scored = [f"{reference.replace(' ', '_')}_{score}" for reference in held for score in _SCORES]

    def scores(found: Iterable[Any]) -> list[Any]:
        return [getattr(one, score) if one else "" for one in found for score in _SCORES]

    methods = ranked(comparison)
    rows = [
        [
            method.name,
            len(method.runs),
            method.loss,
            method.seed_error,
            method.document_error,
            *(over_seeds(method, name) for name in figures.values()),
            *scores(agreement(method, reference) for reference in held),
        ]
        for method in methods
    ]
    errors = ("seed_error", "document_error")
    paths = [write_csv(folder / "methods.csv", ["method", "seeds", comparison.unit, *errors, *figures, *scored], rows)]

    rows = [
        [
            method.name,
            run.seed,
            run.folder,
            run.loss,
            *(getattr(run, name) for name in figures.values()),
            *scores(run.assessment.agreement.get(reference) for reference in held),
        ]
        for method in methods
        for run in method.runs
    ]
    paths.append(write_csv(folder / "runs.csv", ["method", "seed", "folder", comparison.unit, *figures, *scored], rows))

    header = ["first", "second", "difference", *errors, "low", "high", "p", "p_holm", "verdict", "sentence"]
    rows = [
        [
            *(*pair, d.mean, d.seed_error, d.document_error, d.low, d.high, d.p, d.p_holm, d.verdict),
            sentence(*pair, d, comparison.unit_in_words),
        ]
        for pair, d in comparison.differences.items()
    ]
    paths.append(write_csv(folder / "pairs.csv", header, rows))

    rows = [[m.name, i, share] for m in methods for i, share in enumerate(length_shares(m), 1)]
    paths.append(write_csv(folder / f"{words.token}-lengths.csv", ["method", f"{words.symbol}s", "share"], rows))
    if comparison.rates:
        paths.append(write_csv(folder / "rates.csv", *rate_rows(comparison)))
    return paths if comparison.forecasts is None else [*paths, *forecasts.write_tables(comparison.forecasts, folder)]


def comparison_table(comparison: Comparison) -> Table:
    """One line a method, best first, for a rich console."""
    table = Table(title=Text(visible(comparison.title)), title_justify="left")
    table.add_column("method", overflow="fold")
    test = ("test ± seeds",) if comparison.has_test else ()
    for name in (f"{comparison.unit_in_words} ± seeds", *test, "early exit", "rate", "FLOPs", "seconds"):
        table.add_column(name, justify="right")
    for method in ranked(comparison):
        table.add_row(
            Text(plain(method.name)),
            with_error(method.loss, method.seed_error),
            *(with_error(over_seeds(method, "loss_test"), error_on_test(method)) for _ in test),
            number(over_seeds(method, "loss_early")),
            number(over_seeds(method, "boundary_rate"), ".3f"),
            number(over_seeds(method, "flops"), ".2e"),
            number(over_seeds(method, "seconds"), ",.0f"),
        )
    return table


def print_comparison(comparison: Comparison) -> None:
    """Print the table, who is best, and the sentences on the best method's pairs."""
    shown = console(wide=120)
    shown.print(comparison_table(comparison))
    if comparison.rates:
        shown.print(rates_table(comparison))
    for said in conclusion(comparison):
        shown.print(said)
    best = ranked(comparison)[0].name
    for pair, difference in comparison.differences.items():
        if best in pair:
            shown.print(f"- {sentence(*pair, difference, comparison.unit_in_words)}")
    if comparison.forecasts is not None:
        shown.print(forecasts.table(comparison.forecasts))
        for said in forecasts.conclusion(comparison.forecasts):
            shown.print(said)
    for run, reason in comparison.failed.items():
        shown.print(f"did not finish: {plain(run)}: {reason}")
