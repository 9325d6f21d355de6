"""Reading series from CSV and parquet files, from data frames and from the Hugging Face hub.

A table has a row for every step, and is wide or long: a wide one has a column for every series (or channel), a long one
the columns ``unique_id``, ``ds`` and ``y``, as Nixtla's libraries name them: which series a row is of, its date and its
value.
"""

from __future__ import annotations

import csv
import difflib
import glob
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets.io.parquet import ParquetDatasetReader

from tokenv.core.errors import MissingFileError, UserError
from tokenv.data import rows
from tokenv.data.rows import HUB_ADVICE, iterate_rows
from tokenv.data.series.config import SeriesConfig
from tokenv.data.series.dates import read_dates

LARGEST = 1e100
DELIMITERS = ",;\t"
DECIMAL_COMMA = re.compile(r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$")
MISSING = {"", "nan", "na", "n/a", "null", "none"}
IDENTIFIER, DATE, TARGET = LONG = ("unique_id", "ds", "y")


@dataclass(frozen=True)
class Recording:
    """Series recorded together.

    Attributes:
        name: Where it comes from, for people; of a long table, the series' own.
        columns: The C channels' names; an empty one where the name says all.
        value_LC: float64 [L, C], NaN where missing.
        date_L: The rows' dates, see `read_dates`; None if there are none.
        gold_L: bool [L], True at the last step before a change; None if unknown.
    """

    name: str
    columns: list[str]
    value_LC: np.ndarray[Any, Any]
    date_L: list[Any] | None = None
    gold_L: np.ndarray[Any, Any] | None = None


def read_table(path: Path, config: SeriesConfig) -> list[Recording]:
    """Read a parquet file where its name says so, else CSV: a recording, or, of a long table, one for every series."""
    return read_parquet(path, config) if path.suffix == ".parquet" else read_csv(path, config)


def read_csv(path: Path, config: SeriesConfig) -> list[Recording]:
    """Read a CSV file with a header, one row a step, wide or long.

    Columns are separated by commas, semicolons or tabs, whichever the header has most of; between semicolons numbers
    may have a decimal comma. Empty cells and those that say NaN, NA, null or none are missing values.

    Args:
        path: The file.
        config: Names the columns.

    Raises:
        MissingFileError: If there is no such file.
        UserError: If a column is unknown, a value is no finite number, or dates are unsorted, repeated or irregular.
    """
    if not path.is_file():
        raise MissingFileError(f"data source {str(path)!r} does not exist; expected a CSV file: give its path")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            delimiter = max(DELIMITERS, key=first.count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            header = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {error}: convert it") from error
    for line, row in rows:
        if len(row) != len(header):
            raise UserError(f"{path} line {line} has {len(row)} cells; expected {len(header)} as in the header")
    if delimiter == ";":
        rows = [(line, [DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in row]) for line, row in rows]
    cells = ((f"{path} line {line}", dict(zip(header, row, strict=True))) for line, row in rows)
    return _steps(path.name, str(path), header, cells, config)


def read_frame(frame: pd.DataFrame, config: SeriesConfig) -> list[Recording]:
    """Read a data frame, wide or long; a `DatetimeIndex` is its dates.

    Raises:
        UserError: As for `read_csv`.
    """
    if isinstance(frame.index, pd.DatetimeIndex):
        frame = frame.rename_axis(DATE if IDENTIFIER in frame.columns else config.date or DATE).reset_index()
    header = [str(column) for column in frame.columns]
    known = frame.astype(object).where(frame.notna(), None)
    rows = (dict(zip(header, row, strict=True)) for row in known.itertuples(index=False, name=None))
    cells = ((f"frame row {number}", row) for number, row in enumerate(rows))
    return _steps("frame", "frame", header, cells, config)


def read_parquet(path: Path, config: SeriesConfig) -> list[Recording]:
    """Read a parquet file: one row a step, wide or long, or, where the columns hold lists, one row a series.

    Raises:
        MissingFileError: If there is no such file.
        UserError: As for `read_csv`, or if the file is broken.
    """
    if not path.is_file():
        raise MissingFileError(f"data source {str(path)!r} does not exist; expected a parquet file: give its path")
    reader = partial(ParquetDatasetReader, glob.escape(str(path)), split="train", streaming=True)
    rows = list(iterate_rows(lambda: reader().read(), f"{path} cannot be read as parquet", "repair it"))
    return _from_rows(path.name, str(path), rows, config)


def read_hub(name: str, hub_config: str | None, split: str, config: SeriesConfig) -> list[Recording]:
    """Read a data set of the hub as a whole: one row a step, or, where the columns hold lists, one row a series.

    Raises:
        UserError: As for `read_csv`, or if the hub or the data set cannot be read.
    """
    where = f"hub data set {name!r}"
    recorded = list(iterate_rows(lambda: rows.open_hub(name, hub_config, split), f"{where} cannot be read", HUB_ADVICE))
    return _from_rows(name, where, recorded, config)


def _from_rows(name: str, where: str, rows: list[Mapping[str, Any]], config: SeriesConfig) -> list[Recording]:
    header = list(rows[0]) if rows else []
    columns = [] if _is_long(header) else _value_columns(where, header, config, dated=False)
    if not rows or not columns or not all(isinstance(rows[0][column], list | tuple) for column in columns):
        cells = ((f"{where} row {number}", row) for number, row in enumerate(rows))
        return _steps(name, where, header, cells, config)
    found = []
    for number, row in enumerate(rows):
        place = f"{where} row {number}"
        for column in columns:
            if not isinstance(row[column], list | tuple):
                raise UserError(f"{place}, column {column!r}: {row[column]!r} is no list, as row 0 has: mend it")
        lengths = {len(row[column]) for column in columns}
        if len(lengths) > 1:
            raise UserError(f"{place} holds lists of lengths {sorted(lengths)}; expected equal ones: choose others")
        each = [[_number(x, f"{place}, step {i}", column) for i, x in enumerate(row[column])] for column in columns]
        found.append(Recording(f"{name} row {number}", columns, np.array(each, dtype=np.float64).T))
    return found


def _value_columns(where: str, header: list[str], config: SeriesConfig, *, dated: bool = True) -> list[str]:
    if len(set(header)) < len(header):
        raise UserError(f"{where} has a column twice: {', '.join(header)}: rename one")
    if dated and config.date is not None and config.date not in header:
        raise UserError(
            f"{where} has no date column {config.date!r} but {', '.join(header) or 'none at all'}: set data.series.date"
            " to one, or to null if there is none and rows are in order"
        )
    for column in config.columns:
        if column not in header:
            near = difflib.get_close_matches(column, header, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(header) or 'none'}"
            raise UserError(f"{where} has no column {column!r}, which data.series.columns names: {hint}")
    columns = list(config.columns) or [column for column in header if column != config.date]
    if any(not column.strip() or column.startswith("Unnamed: ") for column in columns):
        raise UserError(
            f"{where} has a column without a name, as where an index was written with the table: drop it "
            "(pandas: to_csv(index=False)), give it a name, or name the value columns in data.series.columns"
        )
    if not columns:
        raise UserError(f"{where} has no value column; expected at least one beside {config.date!r}: add one")
    return columns


def _is_long(header: list[str]) -> bool:
    return set(LONG) <= set(header)


def _steps(
    name: str, where: str, header: list[str], cells: Iterable[tuple[str, Mapping[str, Any]]], config: SeriesConfig
) -> list[Recording]:
    """Series of a table's rows, each of which is a step."""
    long, date = _is_long(header), config.date
    if long:
        date = None if date is None else DATE
        named = [column for column in config.columns if column in header or config.joint]
        config = replace(config, date=DATE, columns=named or [TARGET])
    columns = _value_columns(where, header, config)
    shown = [""] if columns == [TARGET] and long else columns
    dates: dict[str, list[tuple[str, Any]]] = {} if long else {name: []}
    values: dict[str, list[list[float]]] = {} if long else {name: []}
    for place, row in cells:
        of = name
        if long:
            of = _identifier(row[IDENTIFIER], place)
            place = f"{place}, series {of!r}"
        if date is not None:
            dates.setdefault(of, []).append((place, row[date]))
        values.setdefault(of, []).append([_number(row[column], place, column) for column in columns])
    if not values:
        raise UserError(f"{where} has no row: expected one for every step of every series")
    return [
        Recording(
            name=of,
            columns=shown,
            value_LC=np.array(each, dtype=np.float64).reshape(-1, len(columns)),
            date_L=read_dates(dates[of], str(date)) if dates.get(of) else None,
        )
        for of, each in values.items()
    ]


def _identifier(value: Any, place: str) -> str:
    name = "" if value is None else str(value).strip()
    if not name:
        raise UserError(f"{place}, column {IDENTIFIER!r}: expected the name of the row's series: fill it in")
    return name


def _number(value: Any, place: str, column: str) -> float:
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"{place}, column {column!r}: {value!r} is no number; expected one such as 1.5, or nothing where it is "
            "missing: mend it, or name the value columns in data.series.columns"
        ) from None
    if math.isnan(number):
        return math.nan  # a signalling NaN of a binary file would warn in every sum
    if abs(number) > LARGEST:
        raise UserError(
            f"{place}, column {column!r}: {value!r} is not finite, or too large to be squared; expected a number "
            f"between -{LARGEST:g} and {LARGEST:g}: mend it"
        )
    return number
