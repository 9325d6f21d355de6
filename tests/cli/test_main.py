"""The command line: usage, loaded modules, and messages for mistakes."""

import dataclasses
import gc
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tokenv.cli import main
from tokenv.cli.command_registry import COMMANDS, load_command
from tokenv.cli.main import run_command
from tokenv.cli.usage import FUNCTIONS, overview
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "torchrl", "sacred", "matplotlib")


def test_every_command_has_a_line_and_every_experiment_its_command() -> None:
    for name in (*COMMANDS.names(), *FUNCTIONS):
        assert f"\n  tokenv {name}" in overview()
    for name in COMMANDS.names():
        assert dataclasses.is_dataclass(load_command(name))
    with pytest.raises(UserError, match="command = 'tune' is unknown"):
        load_command("tune")


@pytest.mark.parametrize(
    ("module", "arguments", "status"),
    [
        ("tokenv", [], 0),
        ("tokenv", ["--help"], 0),
        ("tokenv", ["help"], 0),
        ("tokenv", ["trian"], 2),
    ],
)
def test_help_and_a_wrong_word_load_nothing_heavy(
    module: str, arguments: list[str], status: int
) -> None:
    program = f"""
import atexit, runpy, sys
atexit.register(lambda: print("loaded:", [name for name in {HEAVY!r} if name in sys.modules]))
sys.argv = ["tokenv", *{arguments!r}]
runpy.run_module({module!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert done.stdout.endswith("loaded: []\n")
    expected = (
        overview() if status == 0 else "tokenv: unknown command 'trian': did you mean 'train'?"
    )
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (
            ["train", "quick"],
            "'quick' is no command of tokenv train: did you mean tokenv train with quick?",
        ),
        (
            ["train", "with", "quick", "--fast"],
            "cannot read 'with quick --fast': expected tokenv train with NAME",
        ),
        (["train", "with", "quik"], "no configuration 'quik'"),
        (
            ["train", "with", "quick", "train.symbls=3"],
            "command line: unknown key train.symbls: did you mean 'symbols'?",
        ),
        (["train", "with", "data.source=pyhton"], "python"),
        (["train", "with", "agent.name=lerned"], "agent.name = 'lerned' is unknown"),
        (
            ["train", "with", "agent.nme=uniform"],
            "agent.nme is no option of agent 'learned': did you mean 'name'?",
        ),
        (["segment", "with", "run=runs/1"], "no complete checkpoint in runs/1"),
        (["segment", "with", "text=a"], "run is missing"),
        (["segment", "with", "run=runs/1", "file=no.txt"], "there is no such file"),
        (["evaluate", "with", "run=runs/1", "checkpoint=last"], "expected best or latest"),
        (["evaluate", "with", "run=nowhere/1"], "no complete checkpoint"),
        (["bench", "with", "repeats=0"], "repeats = 0"),
        (["bench", "with", "repeats=some"], "repeats = 'some'"),
    ],
)
def test_mistakes_end_with_one_message_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tokenv", *arguments])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    output = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenv: ")]
    assert len(output) == 1
    assert message in output[0]


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("train small --seed 3", "tokenv train with small seed=3"),
        ("train small --seed=3 -F there", "tokenv train with small seed=3 -F there"),
        (
            "train --train.batch-size 4 --comment mine small",
            "tokenv train with train.batch_size=4 --comment mine small",
        ),
        ("train with small --rate 0.5", "tokenv train with small rate=0.5"),
        ("train with --seed 3 small -u", "tokenv train with seed=3 small -u"),
        ("train small seed=3", "tokenv train with small seed=3"),
        ("segment --run runs/1 --text 'a b'", "tokenv segment with run=runs/1 'text=a b'"),
        ("train with small --fast", None),
        ("train with small --fast --seed 3", None),
        ("train sma --seed 3", None),
    ],
)
def test_advice_is_a_command_line_that_works(
    arguments: str, advice: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run_command(arguments.split()[0], shlex.split(arguments)[1:])
    suggestion = re.search(r"did you mean (tokenv .*)\?$", str(error.value))
    if advice is None:
        assert suggestion is None
        return
    assert suggestion is not None
    assert suggestion[1] == advice
    _, name, *words = shlex.split(advice)
    commands = []
    monkeypatch.setattr(load_command(name), "work", lambda command, _: commands.append(command))
    monkeypatch.setattr("tokenv.core.run_folders.find", lambda *_: tmp_path)
    run_command(name, words)
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("error", "status", "output"),
    [
        (UserError("rate = 2"), 2, "tokenv: rate = 2\n"),
        (KeyboardInterrupt(), 130, "tokenv: stopped\n"),
        (KeyboardInterrupt("go on"), 130, "tokenv: go on\n"),
    ],
)
def test_exit_status_and_message(
    error: BaseException,
    status: int,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenv", "train"])
    monkeypatch.setattr(main, "run_command", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == status
    assert capsys.readouterr().err == output


def test_errors_of_tokenv_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenv", "train"])
    monkeypatch.setattr(main, "run_command", lambda *_: [][0])
    with pytest.raises(IndexError):
        main.main()


def test_help_of_a_command_names_sacreds_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["help"], ["help", "print_config"]):
        run_command("segment", words)
        shown = capsys.readouterr().out
        assert "\n  tokenv segment [(with UPDATE...)] [options]\n" in shown
        assert "Draw token boundaries in a text, in colour: with run=runs/7" in shown
        assert "--file_storage" in shown
        assert "dummy" not in shown


def test_configurations_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("list", ["configs"])
    assert "quick" in capsys.readouterr().out


def test_lm_eval_that_is_not_installed_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    with pytest.raises(UserError, match=r"pip install tokenv\[lm-eval\]"):
        run_command("lm-eval", ["--tasks", "piqa"])


@pytest.mark.parametrize(
    ("words", "module", "attribute"),
    [
        (["list"], "tokenv.cli.help", "list_names"),
        (["train", "with", "quick", "-u"], "tokenv.cli.train_command", "Train.work"),
        (["job", "file"], "tokenv.cli.run_job", "run_job"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_garbage_is_looked_for_as_soon_as_the_work_begins(
    words: list[str], module: str, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    monkeypatch.setattr(gc, "freeze", lambda: states.append(gc.isenabled()))

    def work(*_: object) -> None:
        states.append(gc.isenabled())

    monkeypatch.setattr(f"{module}.{attribute}", work)
    monkeypatch.setattr(sys, "argv", ["tokenv", *words])
    main.main()
    assert states == [False, True]  # when imports end, and in the work
    assert gc.isenabled()


def test_garbage_is_looked_for_after_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenv", "trian"])
    with pytest.raises(SystemExit):
        main.main()
    assert gc.isenabled()
