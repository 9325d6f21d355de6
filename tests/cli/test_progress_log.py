"""Output of a run in the terminal: its description, and progress lines where there are no progress bars."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tokenv.cli.main import run_command
from tokenv.core import trust
from tokenv.core.errors import UserError
from tokenv.training import metrics

ROOT = Path(__file__).parents[2]


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


def test_without_a_terminal_progress_is_a_line_now_and_then(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("train", ["with", *tiny_words, "-u"])
    assert "training:" not in capfd.readouterr().err
    monkeypatch.setattr(metrics, "LINE_SECONDS", 0.0)
    run_command("train", ["with", *tiny_words, "-u"])
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("training:")]
    assert len(lines) > 2
    assert re.fullmatch(
        r"training: [\d.k]+ of 2.56k \(\d+%\), .*bytes/s, [\d:?]+ left, [\d.]+ bits/byte, rate [\d.]+",
        lines[0],
    )
    assert re.search(r", validation [\d.]+$", lines[-1])


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
