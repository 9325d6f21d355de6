"""Completion of command lines in a shell."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokenv.cli.main import run_command
from tokenv.core.errors import UserError

pytest.importorskip("argcomplete")
ROOT = Path(__file__).parents[2]


def complete_line(line: str, folder: Path = ROOT) -> list[str]:
    """Return argcomplete's answer to a shell with this line and the cursor at its end."""
    path = folder / "answer"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(path),
        "_ARGCOMPLETE_COMP_WORDBREAKS": "",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "tokenv"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in path.read_text().split("\n")] if path.exists() else []


@pytest.mark.parametrize(
    ("line", "some", "others"),
    [
        ("tokenv tr", {"train"}, {"segment"}),
        ("tokenv train w", {"with"}, {"quick"}),
        ("tokenv train with qu", {"quick"}, {"words"}),
        ("tokenv train with quick train.sy", {"train.symbols="}, {"train.max_grad_norm="}),
        ("tokenv train with agent.name=le", {"agent.name=learned"}, {"agent.name=uniform"}),
        ("tokenv evaluate with ta", {"tasks=", "task_files="}, {"train.symbols="}),
        ("tokenv list a", {"agents"}, {"codecs"}),
        ("tokenv list agents u", {"uniform"}, {"learned"}),
        ("tokenv check rl", {"rloo"}, {"learned"}),
        ("tokenv check rloo k", {"kind=estimator", "kind=rate_target"}, {"rloo"}),
        ("tokenv completion z", {"zsh"}, {"bash"}),
    ],
)
def test_lines_are_completed(line: str, some: set[str], others: set[str], tmp_path: Path) -> None:
    answers = set(complete_line(line, tmp_path))
    assert some <= answers
    assert not others & answers


def test_runs_are_completed(tmp_path: Path) -> None:
    (tmp_path / "runs" / "1").mkdir(parents=True)  # has no checkpoint
    checkpoint = tmp_path / "runs" / "2" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        (checkpoint / name).touch()
    assert complete_line("tokenv segment with run=", tmp_path) == ["run=runs/2"]
    assert complete_line("tokenv train with resume=runs/", tmp_path) == ["resume=runs/2"]


def test_completion_does_not_import_torch(tmp_path: Path) -> None:
    started = time.perf_counter()
    complete_line("tokenv train with train.sy", tmp_path)
    # torch and TorchRL alone take longer on a busy machine
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_code_is_printed_for_every_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("completion", [shell])
    code = capsys.readouterr().out
    assert "tokenv" in code
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


@pytest.mark.parametrize("words", [["tcsh"], []])
def test_an_unknown_shell_is_one_message(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"known are bash, fish, zsh|did you mean"):
        run_command("completion", words)
