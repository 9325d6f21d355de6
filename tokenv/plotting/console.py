"""Print coloured text and tables to the console, and write tables to CSV files."""

import csv
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from tokenv.core.atomic import replacing_file, write_atomically
from tokenv.plotting.characters import Character, escape, escape_line
from tokenv.plotting.theme import PALETTE, ink, level

FORMULA = (
    "=",
    "+",
    "-",
    "@",
    "\t",
    "\r",
    "\n",
    "＝",
    "＋",
    "－",
    "＠",
)  # the last four are full-width


def summary_table(rows: Mapping[str, str], title: str) -> Table:
    """Build a table of two columns: name and value.

    Args:
        rows: Name → value, both printed literally, in this order.
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


@contextmanager
def csv_rows(path: Path, header: Sequence[str]) -> Iterator[Callable[[Sequence[Any]], None]]:
    """Open a CSV file whose texts are escaped, and yield the function which writes a row.

    A text which begins with one of ``FORMULA`` gets an apostrophe in front, so that no spreadsheet takes it for a
    formula (OWASP, CSV injection); numbers are not changed.

    Args:
        path: file in an existing folder; it is replaced when all rows are written.
        header: names of the columns.
    """
    # Names of folders may be invalid Unicode.
    with (
        replacing_file(path) as scratch,
        scratch.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        writer = csv.writer(file)

        def write(row: Sequence[Any]) -> None:
            writer.writerow(map(_cell, row))

        write(header)
        yield write


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    """Write a CSV file; see ``csv_rows``."""
    with csv_rows(path, header) as write:
        for row in rows:  # one at a time: there may be millions
            write(row)
    return path


def _cell(value: Any) -> Any:
    """Return what a CSV file stores for a value."""
    if not isinstance(value, str):
        return value
    if value.startswith(FORMULA) and not _is_number(value):
        return f"'{escape(value)}"
    return escape(value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Console(Console):
    """A console which escapes control characters, and continues when its reader has ended."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(escape(text), **options)

    def on_broken_pipe(self) -> None:
        discard_output()


def discard_output() -> None:
    """Discard standard output from now on, because its reader, such as ``head``, has ended."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def console(file: IO[str] | None = None, wide: int | None = None) -> Console:
    """Return a console which prints strings literally and colours only a terminal.

    Rich itself omits colour when the output is not a terminal or ``NO_COLOR`` is set.

    Args:
        file: Where to write; standard output if None.
        wide: Number of columns where the output is not a terminal; 80 if None.

    Returns:
        A console without markup, emoji codes or automatic highlighting, which escapes control characters and
        continues when its reader has ended.
    """
    result = _Console(file=file, markup=False, emoji=False, highlight=False)
    if wide is not None and not result.is_terminal:
        result.width = wide
    return result


def warn(message: str) -> None:
    """Print a warning on stderr, in one line."""
    print(escape_line(f"tokenv: warning: {message}"), file=sys.stderr)


_STYLES = tuple(Style(color=ink(colour), bgcolor=colour) for colour in PALETTE)


def coloured_text(chars: Iterable[Character], *, scale: tuple[float, float] = (0.0, 1.0)) -> Text:
    """Colour text by boundary probability, from blue (low) to yellow (high).

    Args:
        chars: Characters of `tokenv.plotting.characters.characters`.
        scale: Probabilities of the first and the last colour; values outside are clipped.

    Returns:
        Text for a rich console, without markup and with escaped control characters; ``↵`` stands before each line
        break, and ``│`` after each character with a boundary, so that boundaries are visible without colour, too.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    result = Text(overflow="fold", tab_size=4)
    for char in chars:
        style = _STYLES[level(char.probability, scale)]
        newline = char.text == "\n"
        shown = "↵" if newline else escape(char.text)
        result.append(shown, style)
        if char.boundary:
            result.append("│")
        if newline:
            result.append("\n")
    return result


def write_json_output(path: str | None, values: Any) -> None:
    """Write dictionaries, lists, arrays, numbers and texts as JSON, NaN and infinite numbers as null.

    Args:
        path: file to write; None for none.
        values: what is written.
    """
    if path is not None:
        write_atomically(Path(path), json.dumps(_to_json(values), allow_nan=False))
        console().print(f"json: {path}")


def _to_json(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(key): _to_json(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_to_json(value) for value in values]
    if hasattr(values, "tolist"):  # of numpy
        return _to_json(values.tolist())
    return None if isinstance(values, float) and not math.isfinite(values) else values
