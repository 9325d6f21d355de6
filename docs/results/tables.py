"""Write the tables of docs/results.md from the runs beside this file: ``python docs/results/tables.py``.

Each table follows a comment with its name, such as ``<!-- table: books -->``.
"""

import re
from pathlib import Path

import pandas as pd
from scipy import stats

from tokenv.plotting.theme import with_error

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "results.md"
REFERENCE = "learned, whitespace first"
NO_TOKENS = 0.01  # boundaries per byte of a transformer, whose one token is the first byte


def row_name(method: str) -> str:
    """Return the name of a method's row, in bold for the reference."""
    if method == REFERENCE:
        return f"**{method}**"
    return method


def mean_and_error(value: pd.Series) -> str:
    """Return the mean over seeds and its standard error, which one seed has not."""
    return with_error(value.mean(), value.sem())


def paired_difference(method: pd.Series, reference: pd.Series) -> str:
    """Return the mean difference over shared seeds with its 95% interval and p of the paired t-test."""
    difference = (method - reference).dropna()
    if len(difference) < 2:
        return ""
    test = stats.ttest_1samp(difference, 0)
    low, high = test.confidence_interval()
    text = f"{difference.mean():.3f} ({low:.3f} to {high:.3f}), {test.pvalue:.2g}"
    return text.replace("-", "−")


def compare_methods(runs: pd.DataFrame) -> list[str]:
    """Return the lines of a table of methods with three seeds or more at one budget, the best first."""
    runs = runs.groupby("method").filter(lambda of_method: len(of_method) > 2)
    by_seed = runs.pivot(index="seed", columns="method", values="bits_per_byte")
    rates = runs.groupby("method")["boundary_rate"].mean()
    lines = ["| | seeds | bits per byte | rate | behind the reference (95%), p |"]
    lines.append("|---|---|---|---|---|")
    for method in by_seed.mean().sort_values().index:
        loss = by_seed[method].dropna()
        difference = paired_difference(loss, by_seed[REFERENCE])
        if method == REFERENCE:
            difference = "reference"
        rate = f"{rates[method]:.3f}"
        if rates[method] < NO_TOKENS:
            rate = "–"
        cells = [row_name(method), str(len(loss)), mean_and_error(loss), rate, difference]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def compare_budgets(runs: pd.DataFrame) -> list[str]:
    """Return the lines of a table of methods by budget, the best at the first budget first."""
    budgets = list(runs["budget"].unique())
    means = runs.pivot_table(index="method", columns="budget", values="bits_per_byte")
    lines = [f"| | {' | '.join(budgets)} |", f"|{'---|' * (len(budgets) + 1)}"]
    for method in means.sort_values(budgets).index:
        cells = [row_name(method)]
        for budget in budgets:
            loss = runs[(runs["method"] == method) & (runs["budget"] == budget)]["bits_per_byte"]
            cell = ""
            if len(loss):
                cell = f"{mean_and_error(loss)} ({len(loss)})"
            cells.append(cell)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def make_tables() -> dict[str, list[str]]:
    """Return the lines of all tables by name."""
    python = pd.read_csv(FOLDER / "python.csv")
    books = pd.read_csv(FOLDER / "books-runs.csv")
    at_2mb = python[python["budget"] == "2 MB"]
    exact = at_2mb[at_2mb["precision"] == "float32"]
    repeated = set(exact["method"]) - {REFERENCE}
    others = at_2mb[(at_2mb["precision"] == "bfloat16") & ~at_2mb["method"].isin(repeated)]
    return {
        "2 MB": compare_methods(exact),
        "2 MB, bfloat16": compare_methods(others),
        "6 and 20 MB": compare_budgets(python[python["budget"] != "2 MB"]),
        "books": compare_methods(books),
    }


def fill(page: str) -> str:
    """Return a page with the lines of each table after the comment with its name."""
    for name, lines in make_tables().items():
        comment = f"<!-- table: {name} -->\n"
        assert comment in page, f"{PAGE} has no {comment}"
        table = "\n".join(lines) + "\n"
        page = re.sub(f"{comment}(\\|.*\n)*", lambda _, new=comment + table: new, page)
    return page


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text()))
