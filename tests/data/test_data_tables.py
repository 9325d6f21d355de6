"""Long tables and data frames are read as wide files are, and dates go on."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from test_data_series import make_config, table, write_csv

from tokenv.core.errors import UserError
from tokenv.data.config import SeriesConfig
from tokenv.data.tables import extend_dates, read_csv, read_dates, read_frame, read_table
from tokenv.data.windows import load_series


def long_rows(**lengths):
    rows = [(name, f"2020-01-{1 + i // 24:02d} {i % 24:02d}:00:00", i + len(name)) for name in lengths
            for i in range(lengths[name])]  # fmt: skip
    return dict(zip(("unique_id", "ds", "y"), map(list, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_long_tables_are_a_series_for_every_name(tmp_path, kind):
    """They may differ in length, and come in any order of names."""
    columns = long_rows(one=200, a=150, three=20)
    order = np.argsort([name != "a" for name in columns["unique_id"]], kind="stable")
    columns = {name: [values[i] for i in order] for name, values in columns.items()} | {"extra": [1.0] * len(order)}
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
        (found,), (expected,) = read_frame(each, SeriesConfig()), read_table(csv_file, SeriesConfig())
        assert found.columns == expected.columns
        assert_array_equal(found.value_LC, expected.value_LC)
        assert found.date_L == expected.date_L


@pytest.mark.parametrize(
    ("frequency", "after"),
    [("h", "2020-01-01 05:00:00"), ("15min", None), ("D", "2020-01-06"), ("MS", "2020-06-01"), ("ME", "2020-06-30"),
     ("B", "2020-01-08"), ("YS", "2025-01-01")],
)  # fmt: skip
def test_dates_go_on_at_their_frequency(frequency, after):
    """As pandas would; the calendar's own frequencies, too."""
    every = pd.date_range("2020-01-01", periods=12, freq=frequency)
    read = read_dates([("here", str(date)) for date in every[:5]], "ds")
    assert extend_dates(read, 7) == list(every[5:])
    assert after is None or extend_dates(read, 1)[0] == pd.Timestamp(after)


def test_numbers_go_on_as_they_step():
    assert extend_dates(read_dates([("", 3), ("", 5), ("", 7)], "ds"), 2) == [9, 11]
    assert_allclose(extend_dates(read_dates([("", f"0.{i}") for i in range(1, 8)], "ds"), 2), [0.8, 0.9])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            lambda: long_rows(a=30, b=30) | {"ds": ["2020-01-01", "2020-01-02"] * 30},
            r"x.csv line 4, series 'a': the date 2020-01-01 is earlier than that of the row before: sort",
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
    (found,) = read_csv(tmp_path / "a.csv", SeriesConfig())
    np.testing.assert_array_equal(found.value_LC, [[1.5, -2.0], [np.nan, 2.5]])


@pytest.mark.parametrize("name", ["", " ", "Unnamed: 0"])
def test_a_nameless_column_is_no_series(tmp_path, name):
    (tmp_path / "a.csv").write_text(f"{name},date,a\n0,2020-01-01,1\n1,2020-01-02,2\n")
    with pytest.raises(ValueError, match=r"a column without a name.*index=False"):
        read_csv(tmp_path / "a.csv", SeriesConfig())
    (found,) = read_csv(tmp_path / "a.csv", SeriesConfig(columns=["a"]))
    assert found.value_LC[:, 0].tolist() == [1, 2]
