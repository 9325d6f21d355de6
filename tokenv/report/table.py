"""The console and the table that closes a run."""

from collections.abc import Mapping
from typing import IO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokenv.report.characters import visible


def summary_table(rows: Mapping[str, str], title: str) -> Table:
    """Two columns: what was measured and its value.

    Args:
        rows: Name → value, both shown literally, in this order.
        title: Written above the table.

    Returns:
        A table to print on a rich console.
    """
    table = Table(title=Text(visible(title)), title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(visible(name)), Text(visible(value)))
    return table


def console(file: IO[str] | None = None, wide: int | None = None) -> Console:
    """A console that prints strings literally and colours only a terminal.

    Rich itself leaves colour out when the output is no terminal or ``NO_COLOR`` is set.

    Args:
        file: Where to write; standard output if None.
        wide: Columns where the output is no terminal; rich's 80 if None.

    Returns:
        A console without markup, emoji codes or automatic highlighting.
    """
    made = Console(file=file, markup=False, emoji=False, highlight=False)
    if wide is not None and not made.is_terminal:
        made.width = wide
    return made
