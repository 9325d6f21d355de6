"""A table of a report: one list of columns, from which page, terminal and CSV file are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
import rich.table
from rich.text import Text

from tokenv.compare.report.aggregate import format_number, format_with_error
from tokenv.plotting.characters import escape, escape_line

Row = Mapping[str, Any]


class Cell(NamedTuple):
    """Cell of a page's table: its text, smaller text below it, its style class, and its tooltip."""

    text: str
    small: str = ""
    style: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: column of the table's frame.
        header: heading on the page and in the terminal; empty for a column which only the file has.
        form: how a value is shown: the format of a number, or a function from a row of the frame to text.
        error: column of the frame with the standard error, shown behind ±; empty for none.
        terminal: whether it is narrow and important enough for a terminal.
        file: name in the CSV file, where values have full precision; empty for a column which is only shown.
    """

    key: str
    header: str = ""
    form: str | Callable[[Row], str] = ".4f"
    error: str = ""
    terminal: bool = True
    file: str = ""

    def show(self, row: Row) -> str:
        """Return a cell for people; text as it is, a dash for what is unknown."""
        if callable(self.form):
            return self.form(row)
        value = row[self.key]
        if isinstance(value, str):
            return value
        if self.error and not isinstance(row[self.error], str):  # text says that there is none
            return format_with_error(value, row[self.error])
        return format_number(value, self.form)


@dataclass(frozen=True)
class Table:
    """A table with one row a name.

    Attributes:
        title: title in the terminal.
        first: heading of the names.
        frame: values in full precision, one row a name (its index), in the order of the table.
        columns: columns in their order.
    """

    title: str
    first: str
    frame: pd.DataFrame
    columns: Sequence[Column]

    def shown(self, *, terminal: bool = False) -> list[Column]:
        """Return the columns of the page, or of the terminal."""
        return [
            column for column in self.columns if column.header and (column.terminal or not terminal)
        ]

    def headers(self) -> list[str]:
        """Return the headings of the page, escaped."""
        return [escape_line(column.header) for column in self.shown()]

    def cells(self) -> list[tuple[str, dict[str, str]]]:
        """Return the rows of the page: name, and escaped heading to text of the other cells."""
        rows = []
        for name, row in self.rows():
            rows.append(
                (
                    name,
                    {escape_line(column.header): column.show(row) for column in self.shown()},
                )
            )
        return rows

    def for_terminal(self) -> rich.table.Table:
        """Return the table for a rich console."""
        columns = self.shown(terminal=True)
        table = rich.table.Table(title=Text(escape(self.title)), title_justify="left")
        table.add_column(self.first, overflow="fold")
        for column in columns:
            table.add_column(Text(escape_line(column.header)), justify="right")
        for name, row in self.rows():
            table.add_row(
                Text(escape_line(name)), *[Text(escape(column.show(row))) for column in columns]
            )
        return table

    def for_file(self) -> pd.DataFrame:
        """Return the names and all columns which the CSV file has, in full precision."""
        names = {column.key: column.file for column in self.columns if column.file}
        written = self.frame[list(names)].rename(columns=names)
        written.insert(0, self.first, list(self.frame.index))
        return written.reset_index(drop=True)

    def rows(self) -> list[tuple[str, Row]]:
        """Return the names and their values."""
        return list(self.frame.to_dict("index").items())
