"""Write the report of a comparison, and one page for several protocols."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from tokenv.compare.comparison import Comparison, finite_mean
from tokenv.compare.report.aggregate import (
    describe_result,
    format_number,
    format_with_error,
    rank_by_seed,
    write_frame,
)
from tokenv.compare.report.forecast_tables import forecasts_by_protocol, write_protocols
from tokenv.compare.report.method_tables import write_tables
from tokenv.compare.report.page import comparison_page, describe_settings, embed
from tokenv.compare.report.pictures import draw_pictures, draw_ranks
from tokenv.compare.score_statistics import describe_difference
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.html import render
from tokenv.storage.atomic import write_atomically

METRICS = ("area", "boundary_rate", "loss_raw", "boundary_rate_raw", "flops", "seconds")
TRUE_BOUNDARIES = ("true tokens", "change points")


def tabulate_summary(comparisons: Mapping[str, Comparison], reference: str) -> pd.DataFrame:
    """Return one row for every method in every protocol.

    Columns: ``protocol``, ``method``, ``seeds``, ``loss``, ``seed_error``, ``rank`` (mean over seeds of its rank among
    the methods), ``METRICS``, ``f1`` with the true boundaries, and the difference from the reference: ``difference``,
    ``low``, ``high``, ``p``, ``p_holm``, ``verdict``. Unknown values are NaN or empty.
    """
    rows = []
    for protocol, comparison in comparisons.items():
        ranks, pairs, truth = rank_by_seed(comparison), comparison.both_ways, find_true_boundaries(comparison)
        for method in comparison.methods:
            f1 = comparison.mean(method.name, f"{truth} f1")
            row: dict[str, Any] = {"protocol": protocol, "method": method.name, "seeds": len(method.runs)}
            row |= {"loss": method.loss, "seed_error": method.seed_error, "rank": finite_mean(ranks.loc[method.name])}
            row |= {name: comparison.mean(method.name, name) for name in METRICS}
            row |= {"f1": "" if math.isnan(f1) else f1}
            row |= dict.fromkeys(("difference", "low", "high", "p", "p_holm", "verdict"), "")
            if each := pairs.get((method.name, reference)):
                row |= {"difference": each.mean, "low": each.low, "high": each.high, "p": each.p, "p_holm": each.p_holm}
                row |= {"verdict": "" if math.isnan(each.p_holm) else each.verdict}
            rows.append(row)
    return pd.DataFrame(rows)


def find_true_boundaries(comparison: Comparison) -> str | None:
    """Return the name of the true boundaries with which drawn ones were compared; None if there are none."""
    return next((name for name in TRUE_BOUNDARIES if name in comparison.references), None)


def _order_methods(table: pd.DataFrame) -> list[str]:
    """Return the methods by their mean rank, as a share of the methods of a protocol; those of more protocols first."""
    share = table["rank"] / table.groupby("protocol")["rank"].transform("size")
    shares = {name: list(share[table.method == name]) for name in dict.fromkeys(table.method)}
    return sorted(shares, key=lambda name: (-len(shares[name]), finite_mean(shares[name])))


def summary_page(comparisons: Mapping[str, Comparison], pages: Mapping[str, str], reference: str) -> str:
    """Return a page with one table of all protocols, and each protocol's ranks.

    Args:
        comparisons: protocol to comparison.
        pages: protocol to the file of its own page.
        reference: method against which the others are tested; empty for none in particular.

    Returns:
        One HTML document, to be written as UTF-8.
    """
    pictures = {name: draw_ranks(comparison) for name, comparison in comparisons.items()}
    table = tabulate_summary(comparisons, reference)
    known = {(row["protocol"], row["method"]): row for row in table.to_dict("records")}
    return render(
        "compare/report/summary.html.jinja",
        title=f"{len(comparisons)} protocols",
        reference=escape_line(reference),
        protocols=[
            {
                "name": escape_line(name),
                "page": pages[name],
                "unit": escape(comparison.unit_in_words),
                "facts": [(escape(key), escape(value)) for key, value in comparison.facts.items()],
                "conclusion": [escape(line) for line in describe_result(comparison)],
                "failed": [(escape(run), escape(why)) for run, why in comparison.failed.items()],
                "truth": find_true_boundaries(comparison),
                "pictures": [embed(picture) for picture in (pictures[name],) if picture],
            }
            for name, comparison in comparisons.items()
        ],
        rows=[
            (
                escape_line(method),
                [_cells(known.get((name, method)), each, reference) for name, each in comparisons.items()],
            )
            for method in _order_methods(table)
        ],
        forecasts=forecasts_by_protocol(comparisons),
    )


def _cells(row: Mapping[str, Any] | None, comparison: Comparison, reference: str) -> dict[str, Any] | None:
    if row is None:
        return None
    name = row["method"]
    difference = comparison.both_ways.get((name, reference))
    return {
        "loss": format_with_error(row["loss"], row["seed_error"]),
        "rank": format_number(row["rank"], ".1f"),
        "truth": "" if row["f1"] == "" else format_number(row["f1"], ".2f"),
        "flops": format_number(row["flops"], ".2e"),
        "seconds": format_number(row["seconds"], ",.0f"),
        "verdict": row["verdict"].replace(" ", "-"),
        "settings": next(describe_settings(method) for method in comparison.methods if method.name == name),
        "tip": escape(describe_difference(name, reference, difference, comparison.unit_in_words)) if difference else "",
    }


def write_reports(comparisons: Mapping[str, Comparison], folder: Path, reference: str = "") -> list[Path]:
    """Write the report of a comparison, or those of several with a summary of all.

    Args:
        comparisons: protocol to comparison; a single one may have an empty name.
        folder: folder to write to; created if it is missing, files of an earlier report are replaced.
        reference: method against which the others are tested; empty for none in particular.

    Returns:
        Written files: see ``write_report``. Of several comparisons, ``report.html``, ``summary.csv`` and, if there are
        forecasts, ``forecasts.csv`` are of all, and the names of every protocol's own files begin with its name.
    """
    if len(comparisons) == 1:
        return write_report(next(iter(comparisons.values())), folder)
    folder.mkdir(parents=True, exist_ok=True)
    written, pages = [], {}
    for number, (name, comparison) in enumerate(comparisons.items(), 1):
        prefix = f"{number}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
        for path in write_report(comparison, folder / prefix):
            written.append(path.replace(folder / f"{prefix}-{path.name}"))
        (folder / prefix).rmdir()
        pages[name] = f"{prefix}-report.html"
    page = folder / "report.html"
    write_atomically(page, summary_page(comparisons, pages, reference))
    summary = write_frame(folder / "summary.csv", tabulate_summary(comparisons, reference))
    return [page, summary, *write_protocols(comparisons, folder / "forecasts.csv"), *written]


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write the page, the pictures and the tables of a comparison.

    Args:
        comparison: what to report.
        folder: folder to write to; created if it is missing, files of an earlier report are replaced.

    Returns:
        Written files: ``report.html``, which needs no other file, the pictures, and the CSV files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pictures = draw_pictures(comparison)
    page = folder / "report.html"
    write_atomically(page, comparison_page(comparison, pictures))
    drawn = []
    for name, picture in pictures.items():
        drawn.append(folder / f"{name}.png")
        write_atomically(drawn[-1], picture.light)
    return [page, *drawn, *write_tables(comparison, folder)]
