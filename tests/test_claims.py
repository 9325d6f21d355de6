"""Run locks: one comparison alone trains a run, and processes end with the one which started them."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import shrunk
import yaml

from tokenv.cli.main import run_command
from tokenv.compare.command import resolve_comparison
from tokenv.compare.job import JobResult
from tokenv.compare.locks import LockHolder, RunLock, acquire_run
from tokenv.compare.scheduler import run_all
from tokenv.compare.store import SILENT_SECONDS, StoredRun, read_run
from tokenv.compare.worker import UNKNOWN_EXIT, WorkerProcess, describe_exit
from tokenv.config.schema import Config
from tokenv.core import processes


def test_one_alone_has_a_claim_and_different_runs_have_different_ones(tmp_path: Path) -> None:
    first = acquire_run(Config(), tmp_path)
    assert isinstance(first, RunLock)
    other = acquire_run(Config(), tmp_path)
    assert isinstance(other, LockHolder)
    assert f"process {os.getpid()}" in other.description
    assert isinstance(acquire_run(Config(seed=1), tmp_path), RunLock)
    first.release()
    assert isinstance(acquire_run(Config(), tmp_path), RunLock)


def test_of_many_that_come_at_once_one_alone_has_it(tmp_path: Path) -> None:
    for seed in range(20):
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda _, seed=seed: acquire_run(Config(seed=seed), tmp_path), range(8)))
        assert sum(isinstance(one, RunLock) for one in got) == 1
        assert len(list(tmp_path.glob(".*"))) == seed + 1


def rewritten(store: Path, **changes: object) -> Path:
    """Return the lock of another process."""
    held = acquire_run(Config(), store)
    assert isinstance(held, RunLock)
    held.path.write_text(json.dumps(json.loads(held.path.read_text()) | changes))
    return held.path


def test_a_claim_of_a_process_that_is_gone_is_nobodys(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    for process in ({"pid": gone.pid, "started": time.time()}, {"pid": os.getpid(), "started": 0.0}):
        stale = rewritten(tmp_path, processes=[process])
        new = acquire_run(Config(), tmp_path)
        assert isinstance(new, RunLock)
        assert not stale.exists()
        new.release()


def test_a_clock_that_steps_gives_no_claim_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Psutil tells when a process started by the wall clock; the kernel counts ticks from the machine's start."""
    held = acquire_run(Config(), tmp_path)
    assert isinstance(held, RunLock)
    real = psutil.Process.create_time
    for step in (3600, -3600):
        monkeypatch.setattr(psutil.Process, "create_time", lambda self, step=step: real(self) + step)
        assert isinstance(acquire_run(Config(), tmp_path), LockHolder)
    (told,) = json.loads(held.path.read_text())["processes"]
    held.path.write_text(json.dumps(processes.describe() | {"processes": [told | {"start_ticks": 1}]}))
    assert isinstance(acquire_run(Config(), tmp_path), RunLock)  # the id is another process's by now


def test_a_run_whose_process_lives_goes_on_whatever_the_clock_says(tmp_path: Path) -> None:
    alive = processes.describe()
    run = StoredRun(tmp_path, Config(), {}, "RUNNING", last_heartbeat=0.0, process=alive)
    assert run.is_running
    assert not replace(run, process=alive | {"processes": []}).is_running
    assert not replace(run, process=None).is_running
    assert replace(run, process=None, last_heartbeat=time.time()).is_running


def test_a_killed_fork_server_ends_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its jobs go on, and nobody can tell how they end: that is said, and what comes next has another server."""
    monkeypatch.setattr("tokenv.compare.worker.PRELOADED", [])
    job = WorkerProcess("time:sleep", [3], tmp_path / "log")
    server = psutil.Process(job.pid).ppid()
    assert server != os.getpid()
    os.kill(server, signal.SIGKILL)
    assert job.wait(0.5) is None
    assert job.wait() == UNKNOWN_EXIT
    outcome = describe_exit(tmp_path / "log", UNKNOWN_EXIT)
    assert outcome == JobResult("lost", "the process that forks all others was killed")
    assert WorkerProcess("time:sleep", [0], tmp_path / "log").wait() == 0


@pytest.mark.parametrize(
    "content",
    ["", "[", "3", "[]", "{}", '{"place": 3, "processes": []}', '{"place": "x", "processes": 3}', "[" * 100_000]
    + [
        json.dumps({"place": processes.host_id(), "processes": [{"pid": pid} | began]})
        for pid in ("x", 2**70, -1, None)
        for began in ({}, {"start_ticks": 1}, {"started": "x"})
    ],
)
def test_a_claim_that_says_nothing_is_nobodys(content: str, tmp_path: Path) -> None:
    stale = rewritten(tmp_path)
    stale.write_text(content)
    new = acquire_run(Config(), tmp_path)
    assert isinstance(new, RunLock)
    assert not stale.exists()


def test_who_holds_a_claim_is_shown_in_plain_words(tmp_path: Path) -> None:
    rewritten(tmp_path, place="\x1b[31mred pid:[1]", processes=[{"pid": "\x07", "started": 1}])
    other = acquire_run(Config(), tmp_path)
    assert isinstance(other, LockHolder)
    assert other.description == "process \\x07 on \\x1b[31mred"


def test_a_run_whose_process_is_gone_is_dead_at_once(
    tiny_settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits a minute for a sign of life of what was killed on this machine."""
    monkeypatch.chdir(tmp_path)
    run_command("train", ["with", *shrunk.words(tiny_settings)])
    path = Path("runs/1/run.json")
    told = json.loads(path.read_text())
    assert told["host"]["process"]["processes"][0]["pid"] == os.getpid()
    told |= {"status": "RUNNING", "heartbeat": datetime.now(UTC).replace(tzinfo=None).isoformat()}
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for place, pid, is_running in (
        (processes.host_id(), os.getpid(), True),
        (processes.host_id(), ended.pid, False),
        ("elsewhere", ended.pid, True),
    ):
        host = processes.describe() | {"place": place}
        host["processes"][0]["pid"] = pid
        path.write_text(json.dumps(told | {"host": {"process": host}}))
        run = read_run(Path("runs/1"))
        assert run is not None
        assert run.is_running == is_running
        assert run.is_resumable != is_running
    for damaged in ("[]", "3", "{}", json.dumps(told | {"experiment": 3})):
        path.write_text(damaged)
        assert read_run(Path("runs/1")) is None
    path.write_text(json.dumps(told | {"host": {}}))  # Sacred's own
    assert read_run(Path("runs/1")).is_running  # type: ignore[union-attr]


def test_a_claim_holds_as_long_as_the_process_that_trains(tmp_path: Path) -> None:
    """The comparison was killed, and what it started is still saving."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as trains:
        held = acquire_run(Config(), tmp_path)
        assert isinstance(held, RunLock)
        held.write_owners(trains.pid)
        told = json.loads(held.path.read_text())
        held.path.write_text(json.dumps(told | {"processes": told["processes"][1:]}))
        assert isinstance(acquire_run(Config(), tmp_path), LockHolder)
        trains.kill()
    assert isinstance(acquire_run(Config(), tmp_path), RunLock)


def test_a_claim_of_another_machine_is_stale_when_it_was_not_refreshed(tmp_path: Path) -> None:
    path = rewritten(tmp_path, place="elsewhere pid:[1]")
    other = acquire_run(Config(), tmp_path)
    assert isinstance(other, LockHolder)
    assert other.description.endswith("on elsewhere")
    long_ago = time.time() - SILENT_SECONDS - 1
    os.utime(path, (long_ago, long_ago))
    RunLock(path).refresh()
    assert isinstance(acquire_run(Config(), tmp_path), LockHolder)
    os.utime(path, (long_ago, long_ago))
    assert isinstance(acquire_run(Config(), tmp_path), RunLock)


def test_no_machines_clock_decides(
    tiny_settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the file system does: ours may be an hour ahead of the one that wrote a claim, or that trains."""
    monkeypatch.chdir(tmp_path)
    run_command("train", ["with", *shrunk.words(tiny_settings)])
    path = rewritten(Path("runs"), place="elsewhere pid:[1]")
    told = json.loads(Path("runs/1/run.json").read_text())
    host = {"process": processes.describe() | {"place": "elsewhere pid:[1]"}}
    Path("runs/1/run.json").write_text(json.dumps(told | {"status": "RUNNING", "host": host, "heartbeat": "never"}))
    at = time.time()
    for clock in (at + 3600, at - 3600):
        monkeypatch.setattr("time.time", lambda clock=clock: clock)
        assert isinstance(acquire_run(Config(), Path("runs")), LockHolder)
        run = read_run(Path("runs/1"))
        assert run is not None
        assert run.is_running
        for silent in (path, Path("runs/1/run.json")):
            os.utime(silent, (at - SILENT_SECONDS - 10,) * 2)
        again = read_run(Path("runs/1"))
        assert again is not None
        assert not again.is_running
        for silent in (path, Path("runs/1/run.json")):
            os.utime(silent, (at, at))
    os.utime(path, (at - SILENT_SECONDS - 10,) * 2)
    assert isinstance(acquire_run(Config(), Path("runs")), RunLock)


def test_two_comparisons_on_one_store_train_each_run_once(
    tiny_settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one is at, the second one leaves until the end, waits for, and finds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tokenv.compare.worker.WorkerProcess", shrunk.InThisProcess)
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    values = {"base": "tiny.yaml", "seeds": [0], "bpe_vocabulary": 260, "passages": 1}
    options = resolve_comparison([], values | {"methods": {"one": {}, "two": {"seed": 0, "rate": 0.3}}})
    one, two = options.make_tasks()
    held = acquire_run(one.config, Path("runs"))
    assert isinstance(held, RunLock)
    said: list[str] = []
    monkeypatch.setattr("tokenv.compare.progress.ProgressDisplay.print", lambda _, line: said.append(line))

    def release() -> None:
        while not [line for line in said if "waiting for process" in line]:
            time.sleep(0.1)
        assert [line.split(":")[0] for line in said] == ["two, seed 0", "one, seed 0"]
        held.release()

    with ThreadPoolExecutor(1) as pool:
        released = pool.submit(release)
        folders, failed = run_all([one, two], options, progress=False)
        released.result()
    assert failed == {}
    assert [str(folder) for folder in folders] == ["runs/2", "runs/1"]
    assert run_all([one, two], options, progress=False) == (folders, {})
    assert not list(Path("runs").glob(".claim-*"))


CHILD = """
import time
from tokenv.core.processes import GracefulStop

def work(path):
    try:
        with GracefulStop(at_once=True):
            open(path, "w").write("up")
            time.sleep(60)
    except KeyboardInterrupt:
        open(path, "w").write("told")
"""
PARENT = """
import pathlib, sys
from tokenv.compare.worker import WorkerProcess
if __name__ == "__main__":
    WorkerProcess("child:work", [sys.argv[1]], pathlib.Path(sys.argv[1] + ".log")).wait()
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    told = tmp_path / "told"

    def wait_for(text: str) -> None:
        until = time.monotonic() + 60
        while not (told.exists() and told.read_text() == text):
            assert time.monotonic() < until
            time.sleep(0.1)

    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(shrunk.ROOT)}
    with subprocess.Popen([sys.executable, "parent.py", str(told)], cwd=tmp_path, env=environment) as parent:
        wait_for("up")
        started = time.monotonic()
        parent.send_signal(signal.SIGKILL)
        wait_for("told")
        assert time.monotonic() - started < 10
