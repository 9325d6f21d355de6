"""Long tables and data frames are read as wide files are, and dates go on."""

from datetime import date, datetime
from itertools import count, takewhile

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from test_series_data import make_config, table, write_csv

from tokenv.core.errors import UserError
from tokenv.series.config import SeriesConfig
from tokenv.series.tables import (
    check_dates,
    extend_dates,
    parse_date,
    read_csv,
    read_frame,
    read_table,
)
from tokenv.series.windows import load_series


def read_dates(contents):
    return check_dates([parse_date("here", content, "ds") for content in contents], "ds")


def long_rows(**lengths):
    rows = [(name, f"2020-01-{1 + i // 24:02d} {i % 24:02d}:00:00", i + len(name)) for name in lengths
            for i in range(lengths[name])]  # fmt: skip
    return dict(zip(("unique_id", "ds", "y"), map(list, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_long_tables_are_a_series_for_every_name(tmp_path, kind):
    """They may differ in length, and come in any order of names."""
    columns = long_rows(one=200, a=150, three=20)
    order = np.argsort([name != "a" for name in columns["unique_id"]], kind="stable")
    columns = {name: [values[i] for i in order] for name, values in columns.items()} | {
        "extra": [1.0] * len(order)
    }
    if kind == "frame":
        recordings = read_frame(pd.DataFrame(columns), SeriesConfig())
    elif kind == "csv":
        recordings = read_table(write_csv(tmp_path / "x.csv", columns), SeriesConfig())
    else:
        pq.write_table(pa.table(columns), tmp_path / "x.parquet")
        recordings = read_table(tmp_path / "x.parquet", SeriesConfig())
    assert [(each.name, each.columns, len(each.value_LC)) for each in recordings] == [
        ("a", [""], 150),
        ("one", [""], 200),
        ("three", [""], 20),
    ]
    assert recordings[0].value_LC[:3, 0].tolist() == [1, 2, 3]
    assert str(recordings[0].date_L[25]) == "2020-01-02 01:00:00"
    if kind != "frame":
        data = load_series(make_config(tmp_path / f"x.{kind}"))
        assert [series.name for series in data.series] == ["a", "one", "three"]
        assert {data.series[p].name for p in data.windows("test").series_P} == {"a", "one"}


def test_wide_frames_are_read_as_files_are(tmp_path):
    csv_file = write_csv(tmp_path / "x.csv", table())
    frame_ = pd.read_csv(csv_file, parse_dates=["date"])
    for each in (frame_, frame_.set_index("date")):
        (actual,) = read_frame(each, SeriesConfig())
        (expected,) = read_table(csv_file, SeriesConfig())
        assert actual.columns == expected.columns
        assert_array_equal(actual.value_LC, expected.value_LC)
        assert actual.date_L == expected.date_L


@pytest.mark.parametrize(
    ("frequency", "after"),
    [("h", "2020-01-01 05:00:00"), ("15min", None), ("D", "2020-01-06"), ("MS", "2020-06-01"), ("ME", "2020-06-30"),
     ("B", "2020-01-08"), ("YS", "2025-01-01")],
)  # fmt: skip
def test_dates_go_on_at_their_frequency(frequency, after):
    """As pandas would; the calendar's own frequencies, too."""
    every = pd.date_range("2020-01-01", periods=12, freq=frequency)
    read = read_dates(map(str, every[:5]))
    assert extend_dates(read, 7) == list(every[5:])
    assert after is None or extend_dates(read, 1)[0] == pd.Timestamp(after)


def test_numbers_go_on_as_they_step():
    assert extend_dates(read_dates([3, 5, 7]), 2) == [9, 11]
    assert extend_dates(read_dates(["1949", "1950"]), 2) == [1951, 1952]
    assert_allclose(extend_dates(read_dates([f"0.{i}" for i in range(1, 8)]), 2), [0.8, 0.9])
    months = read_dates([f"{1949 + i / 12:.3f}" for i in range(24)])  # as R writes them
    assert_allclose(extend_dates(months, 2), [1951, 1951 + 1 / 12], atol=2e-3)


FORMS = (lambda each: each, str, lambda each: each.isoformat())


@given(
    st.datetimes(datetime(1, 1, 1), datetime(9000, 1, 1)),
    st.sampled_from(["h", "D", "W", "MS", "ME", "QS", "YS", "B"]),
    st.integers(8, 40),
    st.sampled_from(FORMS),
)
@example(datetime(2096, 1, 2), "YS", 8, str)  # eight years of 365 days
@example(datetime(2021, 7, 1), "MS", 3, str)  # two months of 31 days
@example(datetime(2021, 6, 30), "QE", 3, str)  # two quarters of 92 days
def test_dates_of_all_years_go_on_at_their_frequency(first, frequency, count, form):
    every = pd.date_range(
        pd.Timestamp(first.replace(microsecond=0)), periods=count + 3, freq=frequency
    )
    read = read_dates(map(form, every[:count]))
    assert read == list(every[:count])
    assert extend_dates(read, 3) == list(every[count:])


@given(st.data())
def test_business_days_may_lack_holidays(data):
    """Up to a seventh of the days, and seven in a row; the dates go on from Monday to Friday."""
    first = data.draw(st.dates(date(1900, 1, 1), date(2100, 1, 1)))
    days = pd.bdate_range(first, periods=data.draw(st.integers(20, 80)))
    dropped = data.draw(st.sets(st.integers(1, len(days) - 2), max_size=int(0.15 * len(days))))
    kept = [day for number, day in enumerate(days) if number not in dropped]
    run = longest_run(dropped)
    if run > 7:
        with pytest.raises(UserError, match="after that of the row before; expected"):
            read_dates(kept)
    else:
        assert extend_dates(read_dates(kept), 5) == list(pd.bdate_range(days[-1], periods=6)[1:])


def longest_run(numbers):
    return max(
        (sum(1 for _ in takewhile(lambda i: i in numbers, count(n))) for n in numbers), default=0
    )


def test_other_gaps_are_no_holidays():
    days = pd.bdate_range("2024-01-01", periods=60)
    weekend = sorted([*days.delete(5), pd.Timestamp("2024-01-06")])
    times = [*days[:30], *(days[31:] + pd.Timedelta(hours=1))]
    for dates in (
        days[days.day_of_week != 2],
        days[::5].delete(4),
        weekend,
        times,
        pd.date_range(*days[:2]).append(days[10:]),
    ):
        with pytest.raises(UserError, match="after that of the row before; expected"):
            read_dates(dates)


ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "UTC")


@given(
    st.sampled_from(ZONES),
    st.integers(0, 900),
    st.sampled_from(["h", "30min", "15min"]),
    st.booleans(),
)
@example("America/New_York", 498, "h", True)
def test_an_hour_may_be_repeated_if_its_offset_is_written(zone, hours, step, text):
    """Local times alone are refused; both changes of the clocks of 2024 lie in some of the spans."""
    first = pd.Timestamp("2024-03-01" if hours % 2 else "2024-10-01", tz="UTC") + pd.Timedelta(
        hours=hours
    )
    every = pd.date_range(first, periods=300, freq=step).tz_convert(zone)
    known = [str(each) if text else each for each in every[:-3]]
    # As instants: a datetime of an hour which is repeated equals none of another zone (PEP 495).
    following = [each.timestamp() for each in extend_dates(read_dates(known), 3)]
    assert following == [each.timestamp() for each in every[-3:]]
    local = every.tz_localize(None)
    steps = set(np.diff(local))
    if len(steps) == 1:
        assert read_dates(local) == list(local)
    else:
        with pytest.raises(
            UserError, match="where clocks were changed, write dates in UTC or with their offset"
        ):
            read_dates(local)


@pytest.mark.parametrize("frequency", ["D", "MS"])
def test_days_and_months_of_local_time_go_on(frequency):
    every = pd.date_range("2024-03-01", periods=60, freq=frequency, tz="Europe/Berlin")
    for each in (every[:50], map(str, every[:50])):
        dates = extend_dates(read_dates(each), 10)
        assert [day.replace(tzinfo=None) for day in dates] == list(every[50:].tz_localize(None))


@given(st.sampled_from(ZONES), st.integers(1, 7), st.integers(2, 20))
def test_days_of_local_time_go_on_where_clocks_change_later(zone, days, known):
    every = pd.date_range("2024-03-01", periods=60, freq=pd.DateOffset(days=days), tz=zone)
    assert extend_dates(read_dates(every[:known]), 60 - known) == list(every[known:])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            lambda: long_rows(a=30, b=30) | {"ds": ["2020-01-01", "2020-01-02"] * 30},
            r"x.csv line 4, series 'a': the date 2020-01-01 is that of the row before: sort",
        ),
        (
            lambda: long_rows(a=30) | {"ds": ["2020-01-01"] * 30},
            r"x.csv line 3, series 'a': the date 2020-01-01 is that of the row before: sort the rows",
        ),
        (
            lambda: long_rows(a=30) | {"unique_id": ["a"] * 29 + [""]},
            r"x.csv line 31, column 'unique_id': expected",
        ),
        (lambda: long_rows(a=30) | {"y": [""] * 30}, r"series 'a' holds no value: leave it out"),
    ],
)
def test_bad_long_files_are_named(tmp_path, columns, message):
    path = write_csv(tmp_path / "x.csv", columns())
    with pytest.raises(UserError, match=message):
        load_series(make_config(path))


@pytest.mark.parametrize(("delimiter", "point"), [(",", "."), (";", "."), (";", ","), ("\t", ".")])
def test_delimiters_and_decimal_commas_are_recognised(tmp_path, delimiter, point):
    rows = [["date", "a", "b"], ["1", "1.5", "-2"], ["2", "", "0.25e1"]]
    text = "\n".join(delimiter.join(cell.replace(".", point) for cell in row) for row in rows)
    (tmp_path / "a.csv").write_text(text)
    (recording,) = read_csv(tmp_path / "a.csv", SeriesConfig())
    np.testing.assert_array_equal(recording.value_LC, [[1.5, -2.0], [np.nan, 2.5]])


@pytest.mark.parametrize("name", ["", " ", "Unnamed: 0"])
def test_a_nameless_column_is_no_series(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},date,a\n0,2020-01-01,1\n1,2020-01-02,2\n")
    with pytest.raises(ValueError, match=r"a column without a name.*index=False"):
        read_csv(tmp_path / "a.csv", SeriesConfig())
    (recording,) = read_csv(tmp_path / "a.csv", SeriesConfig(columns=["a"]))
    assert recording.value_LC[:, 0].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["timestamp", "Date", "datetime", "ds"])
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_date_column_is_recognised(tmp_path, name, kind):
    """As of the Numenta Anomaly Benchmark, whose files have the columns timestamp and value."""
    columns = {name: ["2014-04-01 00:00:00", "2014-04-01 00:05:00"], "value": [1.0, 2.0]}
    if kind == "csv":
        path = write_csv(tmp_path / "x.csv", columns)
    else:
        path = tmp_path / "x.parquet"
        pq.write_table(pa.table(columns), path)
    (recording,) = read_table(path, SeriesConfig())
    assert recording.columns == ["value"]
    assert recording.date_L == [datetime(2014, 4, 1), datetime(2014, 4, 1, 0, 5)]
    (recording,) = read_table(path, SeriesConfig(date=name))
    assert recording.columns == ["value"]
    with pytest.raises(UserError, match="is no number"):
        read_table(path, SeriesConfig(date=None))


def test_a_parquet_file_with_a_column_twice_is_rejected(tmp_path):
    column = pa.array([1.0, 2.0])
    pq.write_table(pa.table([column, column], names=["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet has a column twice: a, a: rename one"):
        read_table(tmp_path / "x.parquet", SeriesConfig(date=None))
