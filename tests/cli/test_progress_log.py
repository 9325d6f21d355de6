"""Output of a run in the terminal: its description, and progress lines where there are no progress bars."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenv.cli import train
from tokenv.cli.main import run_command
from tokenv.config.schema import Config
from tokenv.core import trust
from tokenv.core.conversion import from_dict
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tiny_settings: dict[str, Any]) -> Config:
    return from_dict(Config, tiny_settings)


def test_the_first_line_describes_the_run(trained: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first_line = (trained / "cout.txt").read_text().splitlines()[0]
    assert re.fullmatch(
        r"runs/1 · 2,560 bytes of words, 32 a sequence · [\d,]+ parameters, 48 of the agent · "
        r"agent learned, estimator reinforce, rate 0.2 · cpu, float32, seed 0",
        first_line,
    )
    capfd.readouterr()
    run_command("train", ["with", f"resume={trained}/checkpoints/step-00000004", "-u"])
    shown = capfd.readouterr()
    assert shown.out.startswith(f"not stored (from {trained}/checkpoints/step-00000004) · ")
    assert "WARNING" not in shown.err  # that nobody observes


def test_an_agent_that_does_not_learn_has_no_estimator(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in tiny_words if not word.startswith("agent.")]
    run_command("train", ["with", *words, "agent.name=uniform", "-u"])
    assert "agent uniform, which does not learn, rate 0.2" in capfd.readouterr().out


@pytest.mark.parametrize(
    "line",
    [["generate", "max_new_tokens=20"], ["segment", "out=null"], ["evaluate", "sequences=4"]],
)
def test_nothing_is_printed_twice(line: list[str], trained: Path) -> None:
    """Nor is Sacred's own log, which goes to the stderr of a process."""
    words = ["text=a_word_that_is_seen"] if line[0] != "evaluate" else []
    command = [sys.executable, "-m", "tokenv", line[0], "with", f"run={trained}", *words, line[1]]
    done = subprocess.run(
        command,
        cwd=trained,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    plain = done.stdout.replace("│", "")
    assert plain.count("a_word_that_is_seen") == len(words)
    # sampled and thresholded
    assert "bits_per_byte" not in plain or plain.count("bits_per_byte ") == 2


def test_sacreds_own_log_is_printed_on_request(trained: Path) -> None:
    words = ["generate", "with", f"run={trained}", "text=a", "max_new_tokens=2", "-l", "INFO"]
    command = [sys.executable, "-m", "tokenv", *words]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert "Completed after" in done.stderr


def test_progress_lines_are_seldom_and_say_the_time_left(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(train.time, "monotonic", lambda: now)
    log = train.ProgressLog(config, "bits_per_byte")

    def step(seconds: float, symbols: int) -> str:
        nonlocal now
        now = seconds
        log("train/bits_per_byte", 3.5, symbols)
        log("train/bits_per_byte_early", 9.0, symbols)
        log("train/boundary_rate", 0.21, symbols)
        log("train/symbols_per_second", 1e9, symbols)
        return capsys.readouterr().err

    assert step(train.FIRST_SECONDS / 2, 256) == ""
    assert step(16, 640) == (
        "training: 640 of 2,560 bytes (25%), train 3.500 bits/byte, rate 0.210, 40 bytes/s, 48 s left\n"
    )
    assert step(17, 1024) == ""
    log("validation/bits_per_byte", 3.25, 1024)
    assert step(16 + train.EVERY_SECONDS, 1280) == (
        "training: 1,280 of 2,560 bytes (50%), train 3.500 bits/byte, validation 3.250 bits/byte, rate 0.210, "
        "17 bytes/s, 76 s left\n"
    )


def test_the_speed_of_a_resumed_run_is_its_own(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(train.time, "monotonic", lambda: now)
    log = train.ProgressLog(config, "bits_per_byte", resumed_symbols=1280)
    now = 20.0
    log("train/symbols_per_second", 1.0, 1920)
    assert "32 bytes/s, 20 s left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (600, "10 min"), (3 * 3600, "3.0 h")]
)
def test_durations_have_one_unit(seconds: float, words: str) -> None:
    assert train._format_duration(seconds) == words


def test_a_stored_configuration_trains_again(trained: Path) -> None:
    run_command("train", ["with", "runs/1/config.json", "seed=1"])
    first, second = (
        json.loads((trained.parent / name / "config.json").read_text()) for name in "12"
    )
    assert second == first | {"seed": 1}
    # its config.json names that
    run_command("train", ["with", f"resume={trained}/checkpoints/step-00000004"])
    run_command("train", ["with", "runs/3/config.json", "-u"])


def test_a_stored_configuration_runs_no_code_without_permission(trained: Path) -> None:
    path = trained / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"agent": {"name": "theirs:Agent"}}))
    with pytest.raises(UserError, match="names code, 'theirs:Agent'"):
        run_command("train", ["print_config", "with", str(path)])
    assert trust.granted() == []
