"""Write a comparison of methods as tables: what policies learned, CSV files, the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report import forecast_tables
from tokenv.compare.report.aggregate import (
    agreement,
    conclusion,
    error_on_test,
    length_shares,
    mean,
    number,
    over_seeds,
    ranked,
    references,
    with_error,
)
from tokenv.compare.report.rate_tables import rate_rows, rates_table
from tokenv.compare.significance import sentence
from tokenv.evaluation.boundary_stats import CLASSES
from tokenv.evaluation.text_report import show_whitespace
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.console import console, write_csv

_TOKENS = 12  # of the most frequent ones


def columns(comparison: Comparison) -> list[str]:
    """What is told of a method; nothing where nobody has measured it, as of series.

    Boundaries by class have a column for each class of byte that the text holds, with its share in it.
    """
    if not _classes(comparison):
        return []
    shares = [f"{name} ({number(100 * _mean(comparison.methods, name, 0), '.0f')}%)" for name in _classes(comparison)]
    return ["bytes per token", "F1 with whitespace", *shares, "most frequent tokens"]


def cells(comparison: Comparison) -> Callable[[ComparedMethod], list[str]]:
    """Method to one text for each of ``columns``; a dash where nothing was measured."""
    classes = _classes(comparison)

    def told(method: ComparedMethod) -> list[str]:
        spaces, rate = agreement(method, "whitespace"), over_seeds(method, "boundary_rate")
        return [
            number(1 / rate, ".2f") if rate > 0 else "–",
            number(spaces.f1, ".3f") if spaces else "–",
            *(number(_mean([method], name, 1), ".3f") for name in classes),
            _tokens(method),
        ]

    return told


def _classes(comparison: Comparison) -> list[str]:
    known = {
        name for m in comparison.methods for run in m.runs if (of := run.assessment.learned) for name in of.classes
    }
    return [name for name in CLASSES if name in known]


def _mean(methods: Sequence[ComparedMethod], name: str, which: int) -> float:
    """Share (0) or boundaries per byte (1) of a class, mean over all runs that know it."""
    every = [run.assessment.learned for method in methods for run in method.runs]
    return mean(learned.classes[name][which] for learned in every if learned and name in learned.classes)


def _tokens(method: ComparedMethod) -> str:
    """Those of the first seed, as its passages are."""
    learned = method.runs[0].assessment.learned
    if learned is None or not learned.tokens:
        return "–"
    return "  ".join(escape(show_whitespace(token.encode("latin-1"))) for token, _ in learned.tokens[:_TOKENS])


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
        ``patch-lengths.csv``), shares by method; ``rates.csv`` where methods were asked for rates,
        ``forecast_tables.csv``
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
    return (
        paths if comparison.forecasts is None else [*paths, *forecast_tables.write_tables(comparison.forecasts, folder)]
    )


def comparison_table(comparison: Comparison) -> Table:
    """One line a method, best first, for a rich console."""
    table = Table(title=Text(escape(comparison.title)), title_justify="left")
    table.add_column("method", overflow="fold")
    test = ("test ± seeds",) if comparison.has_test else ()
    for name in (f"{comparison.unit_in_words} ± seeds", *test, "early exit", "rate", "FLOPs", "seconds"):
        table.add_column(name, justify="right")
    for method in ranked(comparison):
        table.add_row(
            Text(escape_line(method.name)),
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
        shown.print(forecast_tables.table(comparison.forecasts))
        for said in forecast_tables.conclusion(comparison.forecasts):
            shown.print(said)
    for run, reason in comparison.failed.items():
        shown.print(f"did not finish: {escape_line(run)}: {reason}")
