"""What a shell is answered when the Tab key is pressed."""

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


def asked(line: str, folder: Path = ROOT) -> list[str]:
    """What argcomplete answers a shell whose line this is, the cursor at its end."""
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
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False, timeout=60)
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
        ("tokenv completion z", {"zsh"}, {"bash"}),
    ],
)
def test_a_line_goes_on(line: str, some: set[str], others: set[str], tmp_path: Path) -> None:
    answers = set(asked(line, tmp_path))
    assert some <= answers
    assert not others & answers


def test_runs_are_found(tmp_path: Path) -> None:
    (tmp_path / "runs" / "1").mkdir(parents=True)  # has no checkpoint
    checkpoint = tmp_path / "runs" / "2" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        (checkpoint / name).touch()
    assert asked("tokenv segment with run=", tmp_path) == ["run=runs/2"]
    assert asked("tokenv train with resume=runs/", tmp_path) == ["resume=runs/2"]


def test_an_answer_does_not_wait_for_torch(tmp_path: Path) -> None:
    started = time.perf_counter()
    asked("tokenv train with train.sy", tmp_path)
    assert time.perf_counter() - started < 3  # torch and TorchRL alone take longer on a busy machine


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_code_to_read(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("completion", [shell])
    code = capsys.readouterr().out
    assert "tokenv" in code
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


@pytest.mark.parametrize("words", [["tcsh"], []])
def test_another_shell_is_one_message(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"known are bash, fish, zsh|did you mean"):
        run_command("completion", words)
