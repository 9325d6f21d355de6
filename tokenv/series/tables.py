"""Read series from CSV and parquet files, from data frames and from the Hugging Face hub.

A table has a row for every step, and is wide or long: a wide one has a column for every series (or channel), a long one
the columns ``unique_id``, ``ds`` and ``y``, as Nixtla's libraries name them: the series, date and value of a row. As
there, the rows of a long table may have any order.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tokenv.core.errors import MissingFileError, UserError
from tokenv.data import rows
from tokenv.data.rows import HUB_ADVICE, iterate_rows, parquet_rows
from tokenv.series.config import COLUMN_KEYS, Frequency, SeriesConfig

MAX_VALUE = 1e100
DELIMITERS = ",;\t"
DECIMAL_COMMA = re.compile(r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$")
WHOLE = re.compile(r"[+-]?\d{1,18}$")  # such as a year; longer ones are read as floats
MISSING = {"", "nan", "na", "n/a", "null", "none"}
IDENTIFIER, DATE, TARGET = LONG_COLUMNS = ("unique_id", "ds", "y")
DATE_FORMATS = (
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d",
    "%d.%m.%Y %H:%M:%S",
    "%d.%m.%Y %H:%M",
    "%d.%m.%Y",
    "%Y-%m",
)
# of a date column, in any case, where no option names another
DATE_NAMES = ("date", "timestamp", "datetime", DATE)
MOST_HOLIDAYS = 0.15  # of the business days
LONGEST_HOLIDAYS = 7  # business days
ROUNDED_STEP = 0.01  # share of a step by which numbers such as 1949.083 may be rounded
HOUR = timedelta(hours=1)
SHORTEST_MONTH = timedelta(days=28)
MONTHS = re.compile(r"\d*B?[MQY]")  # pandas' frequencies of months, quarters and years


@dataclass(frozen=True)
class Recording:
    """Series recorded together.

    Attributes:
        name: description of its origin, or the name of a long table's series.
        columns: names of the C channels; an empty one if `name` suffices.
        value_LC: values, float64 [L, C], NaN where missing.
        date_L: dates of the rows, see `check_dates`; None if there are none.
        gold_L: True at the last step before a change, bool [L]; None if unknown.
        covariate_MK: values of the covariates, those of the past first, float64 [M, K]; None if there are none. M is L
            and the rows after it in which only future covariates are known.
    """

    name: str
    columns: list[str]
    value_LC: np.ndarray[Any, Any]
    date_L: list[Any] | None = None
    gold_L: np.ndarray[Any, Any] | None = None
    covariate_MK: np.ndarray[Any, Any] | None = None


def read_table(path: Path, config: SeriesConfig) -> list[Recording]:
    """Read a .parquet file, or else a CSV file: one recording, or, of a long table, one for every series.

    If the columns of a parquet file hold lists, each of its rows is a series, else a step.

    Raises:
        MissingFileError: there is no such file.
        UserError: as for `read_csv`, or the file is broken.
    """
    is_parquet = path.suffix == ".parquet"
    if not path.is_file():
        kind = "parquet" if is_parquet else "CSV"
        raise MissingFileError(
            f"data source {str(path)!r} does not exist; expected a {kind} file: give its path"
        )
    if is_parquet:
        return _from_rows(path.name, str(path), list(parquet_rows(path, "repair it")), config)
    return read_csv(path, config)


def read_csv(path: Path, config: SeriesConfig) -> list[Recording]:
    """Read a CSV file with a header and one row per step, wide or long.

    Columns are separated by commas, semicolons or tabs, whichever the header has most of; between semicolons numbers
    may have a decimal comma. Empty cells and NaN, NA, null or none are missing values.

    Args:
        path: path of the file.
        config: columns to read.

    Raises:
        UserError: a column is unknown, a value is no finite number, or dates are unsorted, repeated or irregular.
    """
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
            raise UserError(
                f"{path} line {line} has {len(row)} cells; expected {len(header)} as in the header"
            )
    cells = []
    for line, row in rows:
        if delimiter == ";":
            row = [DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in row]
        cells.append((f"{path} line {line}", dict(zip(header, row, strict=True))))
    return _steps(path.name, str(path), header, cells, config)


def check_frame(name: str, frame: Any) -> pd.DataFrame:
    """Return a data frame whose series' names and dates are columns: a `DatetimeIndex` or another named index, too.

    Raises:
        UserError: it is no data frame.
    """
    if not isinstance(frame, pd.DataFrame):
        raise UserError(
            f"{name} is a {type(frame).__name__}: expected a pandas.DataFrame, with a row for every step"
        )
    named = {*frame.index.names} - {*frame.columns}
    if named & {*LONG_COLUMNS, *DATE_NAMES}:
        return frame.reset_index()
    return frame


def read_frame(frame: pd.DataFrame, config: SeriesConfig) -> list[Recording]:
    """Read a data frame, wide or long; a `DatetimeIndex` holds its dates.

    Raises:
        UserError: as for `read_csv`.
    """
    if isinstance(frame.index, pd.DatetimeIndex):
        date_column = config.date or DATE
        if IDENTIFIER in frame.columns:
            date_column = DATE
        frame = frame.rename_axis(date_column).reset_index()
    header = [str(column) for column in frame.columns]
    known = frame.astype(object).where(frame.notna(), None)
    rows = (dict(zip(header, row, strict=True)) for row in known.itertuples(index=False, name=None))
    cells = ((f"frame row {number}", row) for number, row in enumerate(rows))
    return _steps("frame", "frame", header, cells, config)


def read_hub(
    name: str, hub_config: str | None, split: str, config: SeriesConfig
) -> list[Recording]:
    """Read a whole data set of the hub: one row per step, or, if the columns hold lists, one row per series.

    Raises:
        UserError: as for `read_csv`, or the hub or the data set cannot be read.
    """
    origin = f"hub data set {name!r}"
    table = list(
        iterate_rows(
            lambda: rows.open_hub(name, hub_config, split), f"{origin} cannot be read", HUB_ADVICE
        )
    )
    return _from_rows(name, origin, table, config)


def _from_rows(
    title: str, origin: str, rows: list[Mapping[str, Any]], config: SeriesConfig
) -> list[Recording]:
    header = list(rows[0]) if rows else []
    config = _with_date_column(header, config)
    channels: list[str] = []
    columns: list[str] = []
    if not _is_long(header):
        channels = _value_columns(origin, header, config, dated=False)
        columns = [*channels, *config.covariates]
    if (
        not rows
        or not columns
        or not all(isinstance(rows[0][column], list | tuple) for column in columns)
    ):
        cells = ((f"{origin} row {number}", row) for number, row in enumerate(rows))
        return _steps(title, origin, header, cells, config)
    recordings = []
    for number, row in enumerate(rows):
        location = f"{origin} row {number}"
        for column in columns:
            if not isinstance(row[column], list | tuple):
                raise UserError(
                    f"{location}, column {column!r}: {row[column]!r} is no list, as row 0 has: mend it"
                )
        lengths = {len(row[column]) for column in columns}
        if len(lengths) > 1:
            raise UserError(
                f"{location} holds lists of lengths {sorted(lengths)}; expected equal ones: choose others"
            )
        value_LC = np.empty((*lengths, len(columns)))
        for index, column in enumerate(columns):
            for step, value in enumerate(row[column]):
                value_LC[step, index] = _number(value, f"{location}, step {step}", column)
        recordings.append(_recording(f"{title} row {number}", channels, value_LC, config))
    return recordings


def _value_columns(
    origin: str, header: list[str], config: SeriesConfig, *, dated: bool = True
) -> list[str]:
    if len(set(header)) < len(header):
        raise UserError(f"{origin} has a column twice: {', '.join(header)}: rename one")
    if dated and config.date is not None and config.date not in header:
        raise UserError(
            f"{origin} has no date column {config.date!r} but {', '.join(header) or 'none at all'}: set "
            "data.options.date to one, or to null if there is none and rows are in order"
        )
    for key in COLUMN_KEYS:
        for column in getattr(config, key):
            if column not in header:
                hint = f"it has {', '.join(header) or 'none'}"
                if near := difflib.get_close_matches(column, header, n=1):
                    hint = f"did you mean {near[0]!r}?"
                raise UserError(
                    f"{origin} has no column {column!r}, which data.options.{key} names: {hint}"
                )
    columns = list(config.columns) or [
        column for column in header if column not in (config.date, *config.covariates)
    ]
    if any(not column.strip() or column.startswith("Unnamed: ") for column in columns):
        raise UserError(
            f"{origin} has a column without a name, as where an index was written with the table: drop it "
            "(pandas: to_csv(index=False)), give it a name, or name the value columns in data.options.columns"
        )
    if not columns:
        raise UserError(
            f"{origin} has no value column; expected at least one beside {config.date!r}: add one"
        )
    return columns


def _with_date_column(header: Sequence[str], config: SeriesConfig) -> SeriesConfig:
    """Return the options with the date column which a table without ``data.options.date`` seems to have."""
    if config.date != SeriesConfig.date or config.date in header:
        return config
    named = {*config.columns, *config.covariates}
    for column in header:
        if column.lower() in DATE_NAMES and column not in named:
            return replace(config, date=column)
    return config


def _is_long(header: list[str]) -> bool:
    return set(LONG_COLUMNS) <= set(header)


def _steps(
    name: str,
    origin: str,
    header: list[str],
    cells: Iterable[tuple[str, Mapping[str, Any]]],
    config: SeriesConfig,
) -> list[Recording]:
    """Return the series in a table's rows, each of which is a step."""
    long = _is_long(header)
    dated = config.date is not None
    if long:
        chosen = [column for column in config.columns if column in header or config.joint]
        config = replace(config, date=DATE, columns=chosen or [TARGET])
    config = _with_date_column(header, config)
    date_column = str(config.date)
    channels = _value_columns(origin, header, config)
    columns = [*channels, *config.covariates]
    dates: dict[str, list[DateCell]] = {}
    values: dict[str, list[list[float]]] = {}
    if not long:
        values[name] = []  # it is a series even if it has no row
    for location, row in cells:
        series = name
        if long:
            series = _identifier(row[IDENTIFIER], location)
            location = f"{location}, series {series!r}"
        if dated:
            dates.setdefault(series, []).append(parse_date(location, row[date_column], date_column))
        values.setdefault(series, []).append(
            [_number(row[column], location, column) for column in columns]
        )
    if not values:
        raise UserError(f"{origin} has no row: expected one for every step of every series")
    if long and channels == [TARGET]:
        channels = [""]
    recordings = []
    for series, steps in values.items():
        value_MC = np.array(steps, dtype=np.float64).reshape(-1, len(columns))
        date_M = None
        if dates.get(series):
            order_M = list(range(len(steps)))
            if long:
                order_M = _order_of(dates[series])
            cells_M = [dates[series][row] for row in order_M]
            date_M = check_dates(cells_M, date_column, config.freq)
            value_MC = value_MC[order_M]
        recordings.append(_recording(series, channels, value_MC, config, date_M))
    return recordings


def _order_of(cells: Sequence[DateCell]) -> list[int]:
    """Return the rows by date; as they are, if their dates are of several kinds, which ``check_dates`` reports."""
    try:
        return sorted(range(len(cells)), key=lambda row: cells[row].date)
    except TypeError:
        return list(range(len(cells)))


def _recording(
    name: str,
    columns: list[str],
    value_MC: np.ndarray[Any, Any],
    config: SeriesConfig,
    date_M: list[Any] | None = None,
) -> Recording:
    """Return a recording from its rows, in which covariates follow the C channels.

    With future covariates, the last rows in which no channel has a value are those of the future.
    """
    value_LC, covariate_MK = np.split(value_MC, [len(columns)], axis=1)
    if config.future_covariates:
        known = np.flatnonzero(~np.isnan(value_LC).all(1))
        value_LC = value_LC[: known.max(initial=-1) + 1]
    recording = Recording(name, columns, value_LC)
    if date_M is not None:
        recording = replace(recording, date_L=date_M[: len(value_LC)])
    if config.covariates:
        recording = replace(recording, covariate_MK=covariate_MK)
    return recording


def identifier_text(value: Any) -> str:
    """Return the name of a series as text."""
    if value is None:
        return ""
    return str(value).strip()


def _identifier(value: Any, location: str) -> str:
    name = identifier_text(value)
    if not name:
        raise UserError(
            f"{location}, column {IDENTIFIER!r}: expected the name of the row's series: fill it in"
        )
    return name


def _number(value: Any, location: str, column: str) -> float:
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise UserError(
            f"{location}, column {column!r}: {value!r} is no number; expected one such as 1.5, or nothing where it is "
            "missing: mend it, or name the value columns in data.options.columns"
        ) from None
    if math.isnan(number):
        return math.nan  # a signalling NaN of a binary file would cause a warning in every sum
    if abs(number) > MAX_VALUE:
        raise UserError(
            f"{location}, column {column!r}: {value!r} is not finite, or too large to be squared; expected a number "
            f"between -{MAX_VALUE:g} and {MAX_VALUE:g}: mend it"
        )
    return number


class DateCell(NamedTuple):
    """Cell of a date column.

    Attributes:
        location: its row, for messages.
        content: what it holds.
        date: that as datetime, date or number.
    """

    location: str
    content: Any
    date: Any


def parse_date(location: str, content: Any, column: str) -> DateCell:
    """Parse a cell of the date column.

    Raises:
        UserError: it holds no date.
    """
    timestamp = _parse_timestamp(content)
    if timestamp is None:
        raise UserError(
            f"{location}, column {column!r}: {content!r} is no date; expected such as 2016-07-01 00:00:00"
        )
    return DateCell(location, content, timestamp)


def check_dates(cells: Sequence[DateCell], column: str, freq: Frequency = None) -> list[Any]:
    """Return the dates of a series' rows.

    Args:
        cells: cells of the date column.
        column: its name.
        freq: frequency which they must have; None to infer it.

    Returns:
        As many datetimes, dates or numbers, all of one kind, increasing and evenly spaced, or spaced as calendar
        months, business days with or without holidays, and similar units are.

    Raises:
        UserError: the dates are unsorted, repeated, of several kinds or irregular.
    """
    advice = f"sort the rows by {column!r}, once each, or set data.options.date=null to take them as they come"
    for before, cell in pairwise(cells):
        try:
            if cell.date > before.date:
                continue
        except TypeError:  # a number after a date, or a time zone after none
            raise UserError(
                f"{cell.location}: the date {cell.content} is of another kind than that of the row before"
            ) from None
        relation = "earlier than that"
        if cell.date == before.date:
            relation = "that"
        raise UserError(
            f"{cell.location}: the date {cell.content} is {relation} of the row before: {advice}{_clock_advice(cell)}"
        )
    dates = [cell.date for cell in cells]
    if len(dates) > 1 and freq is not None:
        _check_frequency(cells, freq)
    elif len(dates) > 1 and _date_step(dates) is None:
        gaps = [after - before for before, after in pairwise(dates)]
        usual = Counter(gaps).most_common(1)[0][0]
        row = next(row for row, gap in enumerate(gaps, 1) if gap != usual)
        cell = cells[row]
        clock_advice = ""
        if isinstance(usual, timedelta) and abs(gaps[row - 1] - usual) <= HOUR:
            clock_advice = _clock_advice(cell)
        raise UserError(
            f"{cell.location}: the date {cell.content} is {gaps[row - 1]} after that of the row before; expected "
            f"{usual}, as between most rows: give every step a row, with empty cells where values are missing, or set "
            f"data.options.date=null to take the rows as they come{clock_advice}"
        )
    return dates


def _check_frequency(cells: Sequence[DateCell], freq: Frequency) -> None:
    """Raise an error unless each date is one step of a frequency after that of the row before.

    Between business days, holidays may be missing.
    """
    step = _offset(freq)
    dates = [cell.date for cell in cells]
    is_calendar = isinstance(step, pd.offsets.BaseOffset)
    try:
        if is_calendar and isinstance(dates[0], int | float):
            raise TypeError("it is a number")
        if step == pd.offsets.BusinessDay() and _are_business_days(dates):
            return
        if is_calendar:
            dates = [pd.Timestamp(each) for each in dates]
        expected = _add_steps(dates[0], step, len(dates) - 1)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"freq = {freq!r} does not follow {cells[0].content}: {error}: expected a step for numbers, and a "
            "frequency of pandas for dates"
        ) from error
    for cell, given, following in zip(cells[1:], dates[1:], expected, strict=True):
        if given != following:
            raise UserError(
                f"{cell.location}: the date {cell.content} is not {following}, one step of freq = {freq!r} after that "
                "of the row before: give every step a row, with empty cells where values are missing, or another freq"
            )


def _clock_advice(cell: DateCell) -> str:
    """Return what to do if clocks were changed at a time of the day; nothing for a date alone or with an offset."""
    if (
        not isinstance(cell.date, datetime)
        or cell.date.tzinfo is not None
        or cell.date.time() == time()
    ):
        return ""
    return "; where clocks were changed, write dates in UTC or with their offset, as 02:00+01:00"


def extend_dates(dates: Sequence[Any], steps: int, freq: Frequency = None) -> list[Any]:
    """Return the dates of the following steps.

    Args:
        dates: dates from `check_dates`.
        steps: number of following dates.
        freq: frequency of the dates; None to infer it.

    Raises:
        UserError: there is a single date, which has no frequency, or the calendar ends.
    """
    step = _offset(freq)
    if step is None and len(dates) > 1:
        step = _date_step(dates)
    if step is None:
        raise UserError(
            f"{len(dates)} dates tell no frequency to go on with: expected at least two, evenly spaced, or freq"
        )
    try:
        return _add_steps(dates[-1], step, steps)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(
            f"no {steps} steps of {step} follow {dates[-1]}: {error}: lower the horizon, or change freq"
        ) from error


def _offset(freq: Frequency) -> Any:
    """Return the step of a frequency: an offset, or the number or None as it is."""
    if isinstance(freq, str):
        return pd.tseries.frequencies.to_offset(freq)
    return freq


def _add_steps(start: Any, step: Any, count: int) -> list[Any]:
    """Return the dates of so many steps after a date: the next ones of a calendar offset, or multiples of a step."""
    if isinstance(step, pd.offsets.BaseOffset):
        first = pd.Timestamp(start) + step
        return list(pd.date_range(first, periods=count, freq=step))
    return [start + number * step for number in range(1, count + 1)]


def _date_step(dates: Sequence[Any]) -> Any:
    """Return the step between all neighbours: a number, a timedelta or a calendar offset; None if it varies."""
    first = dates[1] - dates[0]
    if isinstance(first, float):  # such as 0.1, 0.2, 0.3, whose differences are not equal
        mean = (dates[-1] - dates[0]) / (len(dates) - 1)
        even = np.allclose(np.diff(dates), mean, rtol=ROUNDED_STEP, atol=0.0)
        return mean if even else None
    is_even = all(after - before == first for before, after in pairwise(dates))
    if isinstance(first, int):
        return first if is_even else None
    # A day or a month of local time may be an hour longer or shorter than another one.
    local = [each.replace(tzinfo=None) if isinstance(each, datetime) else each for each in dates]
    frequency = None if is_even and first < SHORTEST_MONTH else _calendar_frequency(local)
    # months, quarters and years may be equally long for a while
    if is_even and (frequency is None or not MONTHS.match(frequency.freqstr)):
        if getattr(dates[0], "tzinfo", None) is not None and not first % timedelta(days=1):
            return pd.DateOffset(days=first.days)  # a day after clocks change is no 24 hours
        return first
    if frequency is not None:
        return frequency
    return pd.offsets.BusinessDay() if _are_business_days(local) else None


def _calendar_frequency(dates: Sequence[Any]) -> Any:
    """Return the calendar's offset by which dates follow one another; None if there is none."""
    try:
        # pandas 3.1 announces that 4 will return an offset, which works, too
        with warnings.catch_warnings(action="ignore"):
            return pd.tseries.frequencies.to_offset(pd.infer_freq(pd.DatetimeIndex(dates)))
    except (ValueError, OverflowError, TypeError):  # outside of pandas' range
        return None


def _are_business_days(dates: Sequence[Any]) -> bool:
    """Return whether dates are the days from Monday to Friday but for holidays, all at one time of the day."""
    if len({each.time() for each in dates if isinstance(each, datetime)}) > 1:
        return False
    day_L = np.array([each.isoformat()[:10] for each in dates], "datetime64[D]")
    missing_G = np.busday_count(day_L[:-1], day_L[1:]) - 1
    few = missing_G.sum() <= MOST_HOLIDAYS * (len(dates) + missing_G.sum())
    return bool(few and missing_G.max() <= LONGEST_HOLIDAYS and np.is_busday(day_L).all())


def _parse_timestamp(value: Any) -> Any:
    """Parse a cell as a datetime, date or number; return None if it is no date."""
    if value is pd.NaT:
        return None
    if isinstance(value, datetime | date | int | float):
        return None if isinstance(value, float) and not np.isfinite(value) else value
    text = str(value).strip()
    with suppress(ValueError):
        return datetime.fromisoformat(text)
    for layout in DATE_FORMATS:
        with suppress(ValueError):
            return datetime.strptime(text, layout)
    if WHOLE.match(text):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        return number if np.isfinite(number) else None
    return None
