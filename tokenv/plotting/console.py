"""Print coloured text and tables to the console, and write tables to CSV files."""

import csv
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tokenv.plotting.characters import Character, escape
from tokenv.plotting.theme import PALETTE, ink, level
from tokenv.storage.atomic import replacing_file

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # the last four are full-width


def summary_table(rows: Mapping[str, str], title: str) -> Table:
    """Two columns: what was measured and its value.

    Args:
        rows: Name → value, both shown literally, in this order.
        title: Written above the table.

    Returns:
        A table to print on a rich console.
    """
    table = Table(title=Text(escape(title)), title_justify="left", show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(escape(name)), Text(escape(value)))
    return table


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a CSV file; what cannot be seen in a text is written in a visible form.

    A text that a spreadsheet would take for a formula, because it begins with one of ``FORMULA``, has an apostrophe in
    front (OWASP, CSV injection); numbers stay as they are.

    Args:
        path: in an existing folder; it is replaced when all rows are written.
        header: names of the columns.
        rows: as many cells each.
    """
    # Folders may have names that are no valid Unicode.
    with (
        replacing_file(path) as scratch,
        scratch.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file)
        for row in chain((header,), rows):  # one at a time: there may be millions
            writer.writerow([_cell(cell) if isinstance(cell, str) else cell for cell in row])
    return path


def _cell(text: str) -> str:
    return f"'{escape(text)}" if text.startswith(FORMULA) and not _is_number(text) else escape(text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Console(Console):
    """Shows control characters, and outlives whoever reads."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape(text), **options)

    def on_broken_pipe(self) -> None:
        discard_output()


def discard_output() -> None:
    """Go on without whoever read standard output and has had enough, such as ``head``."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def console(file: IO[str] | None = None, wide: int | None = None) -> Console:
    """A console that prints strings literally and colours only a terminal.

    Rich itself leaves colour out when the output is no terminal or ``NO_COLOR`` is set.

    Args:
        file: Where to write; standard output if None.
        wide: Columns where the output is no terminal; rich's 80 if None.

    Returns:
        A console without markup, emoji codes or automatic highlighting, that shows control characters and goes on
        when nobody reads any more.
    """
    made = _Console(file=file, markup=False, emoji=False, highlight=False)
    if wide is not None and not made.is_terminal:
        made.width = wide
    return made


_STYLES = tuple(Style(color=ink(colour), bgcolor=colour) for colour in PALETTE)


def coloured_text(chars: Iterable[Character], *, scale: tuple[float, float] = (0.0, 1.0), mark: str = "│") -> Text:
    """Colour text by boundary probability, from blue (low) to yellow (high).

    Args:
        chars: What `tokenv.plotting.characters.characters` returned.
        scale: The probabilities that get the first and the last colour; those beyond are clipped.
        mark: Written after each character with a boundary, so that boundaries show without colour too.

    Returns:
        Text for a rich console. Nothing in it is taken for markup, and control characters are replaced by
        visible forms; a newline shows as ``↵`` before it breaks the line.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    result = Text(overflow="fold", tab_size=4)
    for char in chars:
        style = _STYLES[level(char.probability, scale)]
        newline = char.text == "\n"
        result.append("↵" if newline else escape(char.text), style)
        if char.boundary:
            result.append(mark)
        if newline:
            result.append("\n")
    return result
