"""Locks of runs: one process alone trains a run, and whoever was killed holds no lock."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import shrunk
import yaml
from filelock import Timeout

from tokenv.cli.main import error_message, run_command
from tokenv.cli.run_job import do_job
from tokenv.compare.command import resolve_comparison
from tokenv.compare.job import JobSpec
from tokenv.compare.locks import holding_if_free, is_locked, run_lock
from tokenv.compare.scheduler import run_all
from tokenv.config.schema import Config

HOLDER = """
import sys
from pathlib import Path
from tokenv.compare.locks import run_lock
from tokenv.config.schema import Config
with run_lock(Config(), Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(store: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process which holds the lock of the default configuration."""
    environment = os.environ | {"PYTHONPATH": str(shrunk.ROOT)}
    command = [sys.executable, "-c", HOLDER, str(store)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_process_alone_holds_a_lock_and_a_killed_one_none(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        assert is_locked(Config(), tmp_path)
        with pytest.raises(Timeout):
            run_lock(Config(), tmp_path).acquire(timeout=0.2)
        assert not is_locked(Config(seed=1), tmp_path)
        with holding_if_free(Config(), tmp_path):  # a second training by hand goes on
            assert is_locked(Config(), tmp_path)
        process.kill()
        process.wait()
        assert not is_locked(Config(), tmp_path)
    # a job, and the training in its process
    with run_lock(Config(), tmp_path), holding_if_free(Config(), tmp_path):
        pass
    assert not is_locked(Config(), tmp_path)


def test_of_many_that_come_at_once_one_alone_has_it(tmp_path: Path) -> None:
    everybody = threading.Barrier(8)

    def try_it(seed: int) -> bool:
        lock = run_lock(Config(seed=seed), tmp_path)
        everybody.wait()
        try:
            lock.acquire(blocking=False)
        except Timeout:
            return False
        finally:
            everybody.wait()
        lock.release()
        return True

    for seed in range(20):
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(try_it, [seed] * 8)) == 1


def test_a_job_whose_run_is_locked_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenv.cli.run_job.LOCK_SECONDS", 0.2)
    (tmp_path / "work").mkdir()
    spec = JobSpec(Config(), None, str(tmp_path), str(tmp_path), "work/0")
    spec.write()
    assert JobSpec.read(spec.job_dir / "job.json") == spec
    with another_process(tmp_path):
        do_job(spec, 0, run_command, error_message)
    assert spec.result_file(0).read_text() == '{"status": "locked", "detail": ""}'
    assert not list(tmp_path.glob("*/run.json"))


def test_two_comparisons_on_one_store_train_each_run_once(
    tiny_settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first one is at, the second one leaves until the end, waits for, and finds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    Path("tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    values = {"base": "tiny.yaml", "seeds": [0], "bpe_vocabulary": 260, "passages": 1}
    options = resolve_comparison(
        [], values | {"methods": {"one": {}, "two": {"seed": 0, "rate": 0.3}}}
    )
    one, two = options.make_tasks()
    said: list[str] = []
    monkeypatch.setattr(
        "tokenv.compare.progress.ProgressDisplay.print", lambda _, line: said.append(line)
    )

    held = threading.Event()

    def hold() -> None:
        with run_lock(one.config, Path("runs")):
            held.set()
            while not [line for line in said if "waiting for another process" in line]:
                time.sleep(0.1)
            assert [line.split(":")[0] for line in said] == ["two, seed 0", "one, seed 0"]

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(60)
        folders, failed = run_all([one, two], options, progress=False)
        holding.result()
    assert failed == {}
    assert [str(folder) for folder in folders] == ["runs/2", "runs/1"]
    assert run_all([one, two], options, progress=False) == (folders, {})
    assert not is_locked(one.config, Path("runs"))
