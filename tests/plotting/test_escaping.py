"""Escaped texts in the console and in CSV files."""

import csv
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from tokenv.core.errors import REPORT
from tokenv.plotting.console import FORMULA, console, summary_table, write_csv

ROOT = Path(__file__).parents[2]
RED = "\x1b[31m\x07\x9bname"
SHOWN = "\\x1b[31m\\x07\\u009bname"


def test_the_console_escapes_control_characters_everywhere() -> None:
    out = io.StringIO()
    shown = console(out)
    shown.print(f"page: {RED}.html")
    table = Table(RED, title=RED)
    table.add_row(RED)
    shown.print(table)
    shown.print(summary_table({RED: RED}, RED))
    printed = out.getvalue()
    assert printed.startswith(f"page: {SHOWN}.html\n")
    assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 for c in printed)
    assert printed.count("name") == 7


def test_csv_files_escape_control_characters(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", ["name", RED], [[RED, 1.5], ["\udcff", None]])
    with path.open(encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["name", SHOWN], [SHOWN, "1.5"], ["\\udcff", ""]]


@pytest.mark.parametrize("first", FORMULA)
def test_no_cell_is_a_spreadsheets_formula(first: str, tmp_path: Path) -> None:
    """Names of methods, files and columns may begin with anything; numbers stay numbers."""
    name = f"{first}HYPERLINK(1)"
    path = write_csv(tmp_path / "t.csv", [name, "b"], [[name, "a=1"], ["-1.5e3", "+2"], [-3, -4.5]])
    with path.open(encoding="utf-8", newline="") as file:
        read = list(csv.reader(file))
    assert read[0][0] == read[1][0]
    assert read[1][0].startswith("'")
    assert read[1][0].endswith("HYPERLINK(1)")
    assert [read[1][1], *read[2:]] == ["a=1", ["-1.5e3", "+2"], ["-3", "-4.5"]]


def test_a_csv_file_is_written_row_by_row(tmp_path: Path) -> None:
    """Rows are not collected, since the test windows of a series may be millions."""

    class Row(list[int]):
        alive = most = 0

        def __init__(self, number: int) -> None:
            super().__init__([number])
            Row.alive += 1
            Row.most = max(Row.most, Row.alive)

        def __del__(self) -> None:
            Row.alive -= 1

    write_csv(tmp_path / "t.csv", ["n"], (Row(number) for number in range(100)))
    assert (tmp_path / "t.csv").read_text().split() == ["n", *map(str, range(100))]
    assert Row.most <= 2


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (
            "import sys, tokenv.cli.main as m; sys.argv[1:] = ['list', 'configs']; m.main()",
            128 + signal.SIGPIPE,
        ),
        ("import sys, tokenv.cli.main as m; m.main()", 128 + signal.SIGPIPE),
        (
            "from tokenv.plotting.console import console\nfor _ in range(9): console().print('x' * 99)\nprint('more')",
            0,
        ),
    ],
)
def test_a_closed_pipe_is_not_an_error(program: str, status: int) -> None:
    """A command continues after ``| head -1``, as far as the console prints."""
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        assert process.stderr is not None
        printed = process.stderr.read()
    assert (process.returncode, printed) == (status, "")
    assert REPORT not in printed
