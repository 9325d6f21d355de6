"""The tables of the pages are those of the runs which are stored beside them."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["results.md", "released.md", "bench.md"])
def test_tables_are_those_of_the_runs(name: str) -> None:
    script = runpy.run_path(str(DOCS / "results" / "tables.py"))
    fill = script["fill"]
    made = script["make_tables"](script["read_budgets"](), script["read_ablations"]())[name]
    page = (DOCS / name).read_text()
    assert fill(page, made) == page
    text, comment, tables = page.partition("<!-- table:")
    changed = text + comment + tables.replace(" ± 0.0", " ± 0.1", 1)
    assert changed != page
    assert fill(changed, made) == page
