"""The report of a comparison of methods: a page, its pictures, and its numbers as CSV."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.forecasts import write_protocols
from tokenv.compare.report.page import comparison_page
from tokenv.compare.report.pictures import draw_pictures
from tokenv.compare.report.summary import summary_page, write_summary
from tokenv.compare.report.tables import write_tables
from tokenv.storage.atomic import write_atomically


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
