"""The file that tells how far a run is."""

import json

import pytest

from tokenv.training import metrics
from tokenv.training.metrics import FILE, ProgressFile, read_progress


@pytest.fixture
def clock(monkeypatch):
    """What time it is."""
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_it_is_written_once_a_second_and_at_the_end(tmp_path, clock):
    folder = tmp_path / "run" / "checkpoints"
    assert read_progress(folder) is None
    told = ProgressFile(folder, total=100)
    told.update(10)
    assert read_progress(folder) == metrics.Progress(10, 100, 0.0)
    clock[0] += 0.9
    told.update(20)
    assert read_progress(folder).symbols == 10
    clock[0] += 0.2
    told.update(30)
    assert read_progress(folder).symbols == 30
    told.update(100)
    assert read_progress(folder).symbols == read_progress(folder).total == 100
    assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"symbols": 3})])
def test_what_cannot_be_read_is_no_progress(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    assert read_progress(tmp_path) is None


def test_training_outlives_a_disk_that_is_full_for_a_while(tmp_path, clock):
    told = ProgressFile(tmp_path / "run", total=10)
    (tmp_path / "run").rename(tmp_path / "away")
    told.update(1)
    (tmp_path / "away").rename(tmp_path / "run")
    told.update(10)
    assert read_progress(tmp_path / "run").symbols == 10
