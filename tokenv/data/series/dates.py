"""Dates of a series' steps: read, checked, and continued."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from datetime import date, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from tokenv.core.errors import UserError

DATE_FORMATS = ("%Y/%m/%d %H:%M", "%Y/%m/%d", "%d.%m.%Y %H:%M:%S", "%d.%m.%Y %H:%M", "%d.%m.%Y")


def read_dates(cells: Sequence[tuple[str, Any]], column: str) -> list[Any]:
    """Dates, or numbers, of a series' rows.

    Args:
        cells: Where each stands, for messages, and what was written there.
        column: Their column.

    Returns:
        As many datetimes, dates or numbers, one kind of them, each later than the one before and as far from it as
        all others (or as calendar months, business days and their like are).

    Raises:
        UserError: If one is no date, or they are unsorted, repeated, of several kinds or irregular.
    """
    read: list[Any] = []
    advice = f"sort the rows by {column!r}, once each, or set data.series.date=null to take them as they come"
    for place, value in cells:
        now = _parse_timestamp(value)
        if now is None:
            raise UserError(f"{place}, column {column!r}: {value!r} is no date; expected such as 2016-07-01 00:00:00")
        try:
            if read and now == read[-1]:
                raise UserError(f"{place}: the date {value} is that of the row before: {advice}")
            if read and now < read[-1]:
                raise UserError(f"{place}: the date {value} is earlier than that of the row before: {advice}")
        except TypeError:  # a number after a date, or a time zone after none
            raise UserError(f"{place}: the date {value} is of another kind than that of the row before") from None
        read.append(now)
    if len(read) > 1 and _step(read) is None:
        gaps = [after - before for before, after in pairwise(read)]
        usual = Counter(gaps).most_common(1)[0][0]
        row = next(row for row, gap in enumerate(gaps, 1) if gap != usual)
        raise UserError(
            f"{cells[row][0]}: the date {cells[row][1]} is {gaps[row - 1]} after that of the row before; expected "
            f"{usual}, as between most rows: give every step a row, with empty cells where values are missing, or set "
            "data.series.date=null to take the rows as they come"
        )
    return read


def extend_dates(dates: Sequence[Any], steps: int) -> list[Any]:
    """The dates of the steps that follow, at the frequency of all before.

    Args:
        dates: As `read_dates` gave them.
        steps: How many are wanted.

    Raises:
        UserError: If a single date tells no frequency, or the calendar ends.
    """
    step = _step(dates) if len(dates) > 1 else None
    if step is None:
        raise UserError(f"{len(dates)} dates tell no frequency to go on with: expected at least two, evenly spaced")
    try:
        if isinstance(step, pd.offsets.BaseOffset):
            return list(pd.date_range(dates[-1], periods=steps + 1, freq=step)[1:])
        return [dates[-1] + number * step for number in range(1, steps + 1)]
    except (ValueError, OverflowError) as error:
        raise UserError(f"no {steps} steps of {step} follow {dates[-1]}: {error}: lower horizon") from error


def _step(dates: Sequence[Any]) -> Any:
    """What lies between all neighbours: a number, a timedelta or an offset of the calendar; None where it differs."""
    first = dates[1] - dates[0]
    if isinstance(first, float):  # such as 0.1, 0.2, 0.3, whose differences are not equal
        mean = (dates[-1] - dates[0]) / (len(dates) - 1)
        return mean if np.allclose(np.diff(dates), mean, rtol=1e-6, atol=0.0) else None
    if all(after - before == first for before, after in pairwise(dates)):
        return first
    if isinstance(first, int) or len(dates) < 3:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pandas 3.1 announces that 4 will give an offset, which is taken, too
            frequency = pd.infer_freq(pd.DatetimeIndex(dates))
        return None if frequency is None else pd.tseries.frequencies.to_offset(frequency)
    except (ValueError, OverflowError, TypeError):  # beyond what pandas can count
        return None


def _parse_timestamp(value: Any) -> Any:
    """What dates are compared by; None for what is no date."""
    if value is pd.NaT:
        return None
    if isinstance(value, datetime | date | int | float):
        return None if isinstance(value, float) and not np.isfinite(value) else value
    text = str(value).strip()
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass
    for layout in DATE_FORMATS:
        try:
            return datetime.strptime(text, layout)
        except ValueError:
            continue
    try:
        number = float(text)
    except ValueError:
        return None
    return number if np.isfinite(number) else None
