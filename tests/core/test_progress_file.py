"""The progress file of a run."""

import json

import pytest

from tokenv.core import processes
from tokenv.core.processes import PROGRESS_FILE, ProgressFile, read_progress


@pytest.fixture
def clock(monkeypatch):
    """Give a clock which the test sets."""
    now = [100.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now[0])
    return now


def test_it_is_written_once_a_second_and_at_the_end(tmp_path, clock):
    folder = tmp_path / "run" / "checkpoints"
    assert read_progress(folder) is None
    writer = ProgressFile(folder, total=100)
    writer.update(10)
    assert read_progress(folder) == processes.Progress(10, 100, 0.0)
    clock[0] += 0.9
    writer.update(20)
    assert read_progress(folder).symbols == 10
    clock[0] += 0.2
    writer.update(30)
    assert read_progress(folder).symbols == 30
    writer.update(100)
    assert read_progress(folder).symbols == read_progress(folder).total == 100
    assert [path.name for path in folder.iterdir()] == [PROGRESS_FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"symbols": 3})])
def test_an_unreadable_file_is_no_progress(tmp_path, content):
    (tmp_path / PROGRESS_FILE).write_text(content)
    assert read_progress(tmp_path) is None


def test_a_disk_which_is_full_for_a_while_is_survived(tmp_path, clock):
    writer = ProgressFile(tmp_path / "run", total=10)
    (tmp_path / "run").rename(tmp_path / "away")
    writer.update(1)
    (tmp_path / "away").rename(tmp_path / "run")
    writer.update(10)
    assert read_progress(tmp_path / "run").symbols == 10
