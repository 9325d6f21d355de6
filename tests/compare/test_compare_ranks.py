"""A run of several ranks is started by torchrun, can be stopped, and its failure is reported as a rank printed it."""

import signal
import time
from pathlib import Path

import pytest

from tokenv.compare.job import JobResult
from tokenv.compare.worker import WorkerProcess, describe_exit, training_call

STAND_IN = """
import os, pathlib, signal, sys, time
rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
words = sys.argv[1:]
if words[0] == "fail":
    sys.exit("tokenv: the value of 3 is wrong" if rank == "0" else time.sleep(60))
if words[0] == "die" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path(f"begun-{rank}").write_text(" ".join([ranks, *words]))
stopped = []
signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
while not stopped:
    time.sleep(0.05)
pathlib.Path(f"saved-{rank}").touch()
raise SystemExit(130)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder where ``python -m tokenv`` is a program which only notes its rank."""
    (tmp_path / "tokenv").mkdir()
    (tmp_path / "tokenv" / "__main__.py").write_text(STAND_IN)
    (tmp_path / "tokenv" / "__init__.py").write_text("GYMNASIUM_ENTRY_POINTS = {}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_rank_is_started_and_told_to_stop(place: Path) -> None:
    job = WorkerProcess(*training_call(["train", "with", "x.yaml", "-F", "runs"], 2, place), place / "log")
    until = time.monotonic() + 120
    while len(list(place.glob("begun-*"))) < 2:
        assert job.wait(0.1) is None, (place / "log").read_text()
        assert time.monotonic() < until
    assert [path.read_text() for path in place.glob("begun-*")] == ["2 train with x.yaml -F runs"] * 2
    job.interrupt()
    assert job.wait(60)
    assert len(list(place.glob("saved-*"))) == 2


def test_what_a_rank_has_said_is_told(place: Path) -> None:
    job = WorkerProcess(*training_call(["fail"], 2, place), place / "log")
    code = job.wait(120)
    assert code == 1
    assert describe_exit(place / "log", code) == JobResult("failed", "the value of 3 is wrong")


def test_a_rank_that_is_killed_is_lost_and_no_failure(place: Path) -> None:
    job = WorkerProcess(*training_call(["die"], 2, place), place / "log")
    code = job.wait(120)
    assert code == -signal.SIGKILL
    assert describe_exit(place / "log", code) == JobResult("lost", "killed by signal 9")


def test_one_rank_needs_no_torchrun(place: Path) -> None:
    assert training_call(["train", "with", "x"], 1, place) == ("tokenv.__main__:main", [["train", "with", "x"]])
