"""The tables of docs/results.md are those of the runs which are stored beside it."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_tables_are_those_of_the_runs() -> None:
    fill = runpy.run_path(str(DOCS / "results" / "tables.py"))["fill"]
    page = (DOCS / "results.md").read_text()
    assert fill(page) == page
    changed = page.replace(" ± 0.0015", " ± 0.0014")
    assert changed != page
    assert fill(changed) == page
