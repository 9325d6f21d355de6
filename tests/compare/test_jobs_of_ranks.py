"""A run of several ranks is started by torchrun, can be stopped, and its failure is reported as a rank found it."""

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tokenv.compare.job import STOP_FILE, Job, JobResult, JobSpec
from tokenv.compare.locks import is_locked
from tokenv.compare.store import stored_runs
from tokenv.config.files import merge, resolve

ENDLESS = {"train": {"symbols": 10**9}, "checkpoint": {"every_symbols": 1024}}
BROKEN = """
import os
from tokenv.agents.fixed import Uniform


class Broken(Uniform):
    def draw(self, observation, noise):
        if os.environ.get("RANK") == "1":
            raise TypeError("the value of 3 is wrong")
        return super().draw(observation, noise)
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def make_job(place: Path, settings: dict[str, Any], changes: dict[str, Any], ranks: int = 2) -> Job:
    config = resolve([], merge(settings, changes))
    return Job(JobSpec(config, None, "runs", str(place), "work/0", threads=1, ranks=ranks))


def ranks_at_work(job: Job, result: Future[JobResult]) -> list[psutil.Process]:
    """Wait for a checkpoint, and return the ranks in order."""
    until = time.monotonic() + 240
    while not list(Path(job.spec.store).glob("*/checkpoints/step-*")):
        assert not result.done(), (job.spec.job_dir / "log").read_text()
        assert time.monotonic() < until
        time.sleep(0.1)
    ranks = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(job.spec.job_dir) in " ".join(process.cmdline()) and "RANK" in process.environ():
                ranks[process.environ()["RANK"]] = process
    return [ranks[rank] for rank in sorted(ranks)]


def test_every_rank_is_started_and_stopped(place: Path, tiny_settings: dict[str, Any]) -> None:
    job = make_job(place, tiny_settings, ENDLESS)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(job)
        try:
            assert len(ranks_at_work(job, result)) == 2
            assert is_locked(job.spec.config, place / "runs")
        finally:
            (place / "work" / STOP_FILE).touch()
        assert result.result() == JobResult("stopped")
    (run,) = stored_runs(place / "runs")
    assert run.status == "INTERRUPTED"
    assert run.is_resumable
    assert not is_locked(job.spec.config, place / "runs")


def test_the_message_of_a_rank_is_reported(place: Path, tiny_settings: dict[str, Any]) -> None:
    job = make_job(place, tiny_settings, {"agent": {"name": "broken:Broken"}})
    assert job() == JobResult("failed", "TypeError: the value of 3 is wrong")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_is_lost_and_no_failure(
    killed: int, place: Path, tiny_settings: dict[str, Any]
) -> None:
    job = make_job(place, tiny_settings, ENDLESS)
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(job)
        timer = threading.Timer(300, (place / "work" / STOP_FILE).touch)
        timer.start()
        ranks_at_work(job, result)[killed].kill()
        assert result.result().status == "lost"
        timer.cancel()


def test_two_ranks_finish_a_run_and_one_finds_it(
    place: Path, tiny_settings: dict[str, Any]
) -> None:
    assert make_job(place, tiny_settings, {})() == JobResult("finished", "1")
    (place / "work" / "0").rename(place / "work" / "two")
    assert make_job(place, tiny_settings, {}, ranks=1)() == JobResult("finished", "1")
    (record,) = [json.loads(path.read_text()) for path in place.glob("runs/*/run.json")]
    assert record["status"] == "COMPLETED"
