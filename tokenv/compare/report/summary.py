"""Write the report of a comparison, and one page for several protocols."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report import forecast_tables
from tokenv.compare.report.aggregate import agreement, conclusion, mean, number, oriented, over_seeds, ranks, with_error
from tokenv.compare.report.forecast_tables import write_protocols
from tokenv.compare.report.method_tables import write_tables
from tokenv.compare.report.page import comparison_page, embedded
from tokenv.compare.report.pictures import draw_pictures, draw_ranks
from tokenv.compare.significance import Difference, sentence
from tokenv.plotting.characters import escape, escape_line
from tokenv.plotting.console import write_csv
from tokenv.plotting.html import render
from tokenv.storage.atomic import write_atomically

FIGURES = ("area", "boundary_rate", "loss_raw", "boundary_rate_raw", "flops", "seconds")
TRUTHS = ("true tokens", "change points")


class _Placed(NamedTuple):
    """A method's part in one protocol."""

    method: ComparedMethod
    rank: float
    difference: Difference | None  # from the method that all are tested against

    @property
    def verdict(self) -> str:
        """After Holm's correction; empty where nothing was tested."""
        if self.difference is None or math.isnan(self.difference.p_holm):
            return ""
        return self.difference.verdict


def _placed(comparison: Comparison, against: str) -> dict[str, _Placed]:
    found, pairs = ranks(comparison), oriented(comparison)
    return {
        method.name: _Placed(method, mean(found.get(method.name, ())), pairs.get((method.name, against)))
        for method in comparison.methods
    }


def _order(placed: Mapping[str, Mapping[str, _Placed]]) -> list[str]:
    """Methods by their mean rank, as a share of the methods beside them; those of more protocols first."""
    names = dict.fromkeys(name for of in placed.values() for name in of)

    def key(name: str) -> tuple[int, float]:
        shares = [of[name].rank / len(of) for of in placed.values() if name in of]
        return -len(shares), mean(shares)

    return sorted(names, key=key)


def summary_page(comparisons: Mapping[str, Comparison], pages: Mapping[str, str], against: str) -> str:
    """One table of all, and each protocol's ranks.

    Args:
        comparisons: protocol to comparison.
        pages: protocol to the file of its own page.
        against: the method that the others are tested against; empty for none in particular.

    Returns:
        One HTML document, to be written as UTF-8.
    """
    placed = {name: _placed(comparison, against) for name, comparison in comparisons.items()}
    pictures = {name: draw_ranks(comparison) for name, comparison in comparisons.items()}
    return render(
        "compare/report/summary.html.jinja",
        title=f"{len(comparisons)} protocols",
        against=escape_line(against),
        protocols=[
            {
                "name": escape_line(name),
                "page": pages[name],
                "unit": escape(comparison.unit_in_words),
                "facts": [(escape(key), escape(value)) for key, value in comparison.facts.items()],
                "conclusion": [escape(said) for said in conclusion(comparison)],
                "failed": [(escape(run), escape(why)) for run, why in comparison.failed.items()],
                "truth": next((name for name in TRUTHS if _knows(comparison, name)), None),
                "pictures": [embedded(picture) for picture in (pictures[name],) if picture],
            }
            for name, comparison in comparisons.items()
        ],
        rows=[
            (
                escape_line(method),
                [_cells(placed[name].get(method), comparisons[name], against) for name in comparisons],
            )
            for method in _order(placed)
        ],
        forecasts=forecast_tables.by_protocol(comparisons),
    )


def _knows(comparison: Comparison, reference: str) -> bool:
    return any(agreement(method, reference) for method in comparison.methods)


def _cells(placed: _Placed | None, comparison: Comparison, against: str) -> dict[str, Any] | None:
    if placed is None:
        return None
    method, difference = placed.method, placed.difference
    truth = next((found for name in TRUTHS if (found := agreement(method, name))), None)
    tip = "" if difference is None else escape(sentence(method.name, against, difference, comparison.unit_in_words))
    return {
        "loss": with_error(method.loss, method.seed_error),
        "rank": number(placed.rank, ".1f"),
        "truth": number(truth.f1, ".2f") if truth else "",
        "flops": number(over_seeds(method, "flops"), ".2e"),
        "seconds": number(over_seeds(method, "seconds"), ",.0f"),
        "verdict": placed.verdict.replace(" ", "-"),
        "settings": ", ".join(f"{escape_line(key)} = {escape_line(value)}" for key, value in method.settings.items()),
        "tip": tip,
    }


def write_summary(comparisons: Mapping[str, Comparison], path: Path, against: str) -> Path:
    """Every method in every protocol as one CSV file, in full precision; what is missing is ``nan`` or empty.

    Args:
        comparisons: protocol to comparison.
        path: of the file.
        against: see ``summary_page``.
    """
    header = ["protocol", "method", "seeds", "loss", "seed_error", "rank", *FIGURES, "f1"]
    header += ["difference", "low", "high", "p", "p_holm", "verdict"]
    rows: list[list[Any]] = []
    for name, comparison in comparisons.items():
        for placed in _placed(comparison, against).values():
            method, d = placed.method, placed.difference
            truth = next((found for known in TRUTHS if (found := agreement(method, known))), None)
            row = [name, method.name, len(method.runs), method.loss, method.seed_error, placed.rank]
            row += [*(over_seeds(method, figure) for figure in FIGURES), truth.f1 if truth else ""]
            rows.append(row + ([d.mean, d.low, d.high, d.p, d.p_holm, placed.verdict] if d else [""] * 6))
    return write_csv(path, header, rows)


def write_reports(comparisons: Mapping[str, Comparison], folder: Path, against: str = "") -> list[Path]:
    """Write the report of a comparison, or those of several with a summary of all.

    Args:
        comparisons: protocol to comparison; one alone may have an empty name.
        folder: where to; made if it is missing, files of an earlier report are replaced.
        against: the method that the others are tested against; empty for none in particular.

    Returns:
        What was written: see ``write_report``. Of several, ``report.html``, ``summary.csv`` and, where there are any,
        ``forecasts.csv`` are of all, and every protocol's own files begin with its name.
    """
    if len(comparisons) == 1:
        return write_report(next(iter(comparisons.values())), folder)
    folder.mkdir(parents=True, exist_ok=True)
    written, pages = [], {}
    for place, (name, comparison) in enumerate(comparisons.items(), 1):
        begins = f"{place}-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}"
        for path in write_report(comparison, folder / begins):
            written.append(path.replace(folder / f"{begins}-{path.name}"))
        (folder / begins).rmdir()
        pages[name] = f"{begins}-report.html"
    page = folder / "report.html"
    write_atomically(page, summary_page(comparisons, pages, against))
    tables = [write_summary(comparisons, folder / "summary.csv", against)]
    return [page, *tables, *write_protocols(comparisons, folder / "forecasts.csv"), *written]


def write_report(comparison: Comparison, folder: Path) -> list[Path]:
    """Write everything there is to say about a comparison.

    Args:
        comparison: what to report.
        folder: where to; made if it is missing, files of an earlier report are replaced.

    Returns:
        What was written: ``report.html``, which needs no other file, the pictures, and the CSV files.
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
