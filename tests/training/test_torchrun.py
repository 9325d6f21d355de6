"""``torchrun -m tokenv train`` as typed: it equals one process, writes once, reports once, and ends in order."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from tiny import settings

from tokenv.cli.main import run_command
from tokenv.config.files import merge
from tokenv.core import checkpoints
from tokenv.core.errors import UserError

pytestmark = pytest.mark.slow
SETTINGS = settings(
    train={"symbols": 40960, "batch_size": 4},
    validation={"every_symbols": 8192},
    checkpoint={"every_symbols": 8192},
    hardware={"precision": "float64"},
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(SETTINGS))


def start(count: int, *words: str) -> subprocess.Popen[str]:
    torchrun = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={count}",
    ]
    own = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*torchrun, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=own
    )


def messages(process: subprocess.Popen[str]) -> list[str]:
    """Return the last messages of tokenv."""
    _, printed = process.communicate(timeout=120)
    return [line for line in printed.splitlines() if line.startswith("tokenv: ")]


def wait_for_checkpoint(run: Path) -> None:
    end = time.monotonic() + 100
    while not checkpoints.list_complete(run / "checkpoints"):
        assert time.monotonic() < end
        time.sleep(0.05)


def metrics(run: str) -> dict[str, Any]:
    stored = json.loads((Path(run) / "metrics.json").read_text())
    return {
        name: (of["steps"], of["values"]) for name, of in stored.items() if "per_second" not in name
    }


def assert_same_run(run: str, expected: str) -> None:
    actual = metrics(run)
    reference = metrics(expected)
    assert actual.keys() == reference.keys()
    for name, (steps, values) in reference.items():
        assert actual[name][0] == steps
        assert actual[name][1] == pytest.approx(values, rel=1e-6, abs=1e-9, nan_ok=True), name


def test_two_processes_equal_one_stop_are_lost_and_resume() -> None:
    run_command("train", ["with", "tiny.yaml"])
    whole = start(2, "-m", "tokenv", "train", "with", "tiny.yaml")
    assert messages(whole) == []
    assert whole.returncode == 0
    stored = {path.name for path in Path("runs").iterdir()}
    assert stored - {".locks"} == {"1", "2", "_sources"}
    assert_same_run("runs/2", "runs/1")

    stopped = start(2, "-m", "tokenv", "train", "with", "tiny.yaml")
    wait_for_checkpoint(Path("runs/3"))
    stopped.send_signal(signal.SIGINT)
    assert messages(stopped) == ["tokenv: stopped; resume it with: tokenv train with resume=runs/3"]
    assert json.loads(Path("runs/3/run.json").read_text())["status"] == "INTERRUPTED"
    assert messages(start(2, "-m", "tokenv", "train", "with", "resume=runs/3")) == []
    assert_same_run("runs/4", "runs/1")

    lost = start(2, "-m", "tokenv", "train", "with", "tiny.yaml")
    wait_for_checkpoint(Path("runs/5"))
    others = [
        each for each in psutil.Process(lost.pid).children() if each.environ().get("RANK") == "1"
    ]
    others[0].kill()
    (message,) = messages(lost)
    assert message.endswith("resume it with: tokenv train with resume=runs/5")
    run_command("train", ["with", "resume=runs/5"])
    assert_same_run("runs/6", "runs/1")

    # shows what came out once more
    finished = start(2, "-m", "tokenv", "train", "with", "resume=runs/6")
    assert messages(finished) == []
    assert finished.returncode == 0
    assert not Path("runs/7").exists()


@pytest.mark.parametrize(
    ("count", "words", "expected"),
    [
        (
            3,
            ["train", "with", "tiny.yaml"],
            "3 processes cannot share the 4 sequences of an update evenly",
        ),
        (2, ["train", "with", "tiny.yaml", "train.batch_siz=1"], "unknown key train.batch_siz"),
        (
            2,
            ["train", "with", "tiny.yaml", "seed=$RANK"],
            "rank 0 has seed = 0, and rank 1 has 1: expected the same",
        ),
        (2, ["train", "with", "tiny.yaml", "estimator.name=no-such"], "no-such"),
        (2, ["evaluate", "with", "run=runs/1"], "tokenv evaluate works in one process"),
    ],
)
def test_an_impossible_run_is_one_message_and_no_run(
    count: int, words: list[str], expected: str
) -> None:
    Path("each.sh").write_text(f"exec {sys.executable} -W ignore -m tokenv {' '.join(words)}\n")
    process = start(count, "--no-python", "sh", "each.sh")
    (message,) = messages(process)
    assert expected in message
    assert process.returncode == 1
    assert not Path("runs").exists()


def test_other_commands_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match="tokenv bench works in one process"):
        run_command("bench", ["with", "bench-d256"])


def test_a_plain_worker_in_a_world_of_one_is_alone() -> None:
    Path("tiny.yaml").write_text(yaml.safe_dump(merge(SETTINGS, {"train": {"symbols": 1024}})))
    one = start(1, "-m", "tokenv", "train", "with", "tiny.yaml")
    assert messages(one) == []
    assert one.returncode == 0
    assert Path("runs/1/metrics.json").exists()
