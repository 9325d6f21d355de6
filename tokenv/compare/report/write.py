"""The report of a comparison of methods: a page, its pictures, and its numbers as CSV."""

from __future__ import annotations

from pathlib import Path

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.page import comparison_page
from tokenv.compare.report.pictures import draw_pictures
from tokenv.compare.report.tables import write_tables


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
    page.write_text(comparison_page(comparison, pictures), encoding="utf-8")
    drawn = []
    for name, picture in pictures.items():
        drawn.append(folder / f"{name}.png")
        drawn[-1].write_bytes(picture.light)
    return [page, *drawn, *write_tables(comparison, folder)]
