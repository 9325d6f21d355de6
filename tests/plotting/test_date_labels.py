"""Dates on a time axis."""

from datetime import date, datetime, timedelta

import pytest

from tokenv.plotting.figures import date_labels


@pytest.mark.parametrize(
    ("step", "count", "expected"),
    [
        (timedelta(days=1), 3, ["2020-01-01", "2020-01-11", "2020-01-21"]),
        (timedelta(hours=1), 2, ["2020-01-01 00:00", "2020-01-01 20:00"]),
        (timedelta(seconds=20), 2, ["2020-01-01 00:00:00", "2020-01-01 00:06:40"]),
    ],
)
def test_labels_omit_what_all_dates_share(step: timedelta, count: int, expected: list[str]) -> None:
    places, labels = date_labels([datetime(2020, 1, 1) + i * step for i in range(21)], count)
    assert labels == expected
    assert (places[0], places[-1]) == (0, 20)


def test_short_axes_and_other_dates_are_labelled_too() -> None:
    assert date_labels([3, 5]) == ([0, 1], ["3", "5"])
    assert date_labels([date(2020, 1, 1)]) == ([0], ["2020-01-01"])
