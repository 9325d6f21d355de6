"""What a command says of itself: its keys with meaning, default and range, what there is by name, its version."""

import dataclasses
import re
import subprocess
import sys
import time
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import tokenv
from tokenv.cli import main
from tokenv.cli.help import SAMPLES, command_keys, show
from tokenv.cli.list import KINDS
from tokenv.cli.main import COMMANDS, run_command
from tokenv.config import registry
from tokenv.config.conversion import from_dict
from tokenv.config.field_docs import keys_of, sentence
from tokenv.config.schema import Config
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]


def flat(values: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return found


def test_every_key_of_a_run_is_told_with_meaning_default_and_range() -> None:
    keys = {key.name: key for key in keys_of(Config())}
    assert list(keys) == flat(Config().as_dict())
    for key in keys.values():
        assert key.meaning, key
        assert key.expected, key
    assert keys["rate"].default == 0.2
    assert keys["rate"].expected == (
        "boundaries per symbol in (0, 1), such as 0.2, or a range such as rate.min=0.05 rate.max=0.5"
    )
    assert keys["train.max_grad_norm"].expected == "a positive norm (.inf to switch clipping off)"
    assert keys["data.cut"].expected == "chunk or document"
    assert keys["hardware.precision"].expected == "auto, float32, bfloat16 or float64"
    assert keys["agent.name"].expected == "a name that tokenv list agents shows"
    assert keys["model.pooling"].meaning.startswith("how bytes become tokens and come back: select (the paper's)")


def test_defaults_that_are_told_are_those_that_are_taken() -> None:
    for key in keys_of(Config()):
        *sections, last = key.name.split(".")
        if key.name.endswith(".name"):
            continue
        values: dict = {last: key.default}
        for section in reversed(sections):
            values = {section: values}
        assert from_dict(Config, values) == Config()


@pytest.mark.parametrize("command", SAMPLES)
def test_help_names_every_key_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command(command, ["--help"])
    shown = capsys.readouterr().out
    keys = command_keys(command)
    assert {"train": "resume", "compare": "jobs", "variance": "draws", "bench": "repeats"}.get(command, "run") in {
        key.name for key in keys
    }
    for key in keys:
        assert re.search(rf"^  {re.escape(key.name)}( = |\s)", shown, re.MULTILINE), key
        assert key.meaning.split()[0] in shown
    assert "--file_storage" in shown


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in SAMPLES])
def test_help_of_what_has_no_keys_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(command)
    assert re.fullmatch(rf"tokenv {command}: .+\n", capsys.readouterr().out)


def loaded_by(*arguments: str) -> str:
    program = f"""
import atexit, runpy, sys
heavy = ("torch", "torchrl", "matplotlib", "datasets")
atexit.register(lambda: print("loaded:", [name for name in heavy if name in sys.modules]))
sys.argv = ["tokenv", *{arguments!r}]
runpy.run_module("tokenv", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [["train", "--help"], ["evaluate", "-h"], ["bench", "help"], ["compare", "--help"], ["list"], ["--version"]],
    ids=" ".join,
)
def test_what_is_told_loads_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(*arguments) == "loaded: []"


def test_help_is_there_at_once() -> None:
    """About 0.05 s beyond Python's own start; three times that much is allowed on a busy machine."""

    def seconds(*words: str) -> float:
        times = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - started)
        return min(times)

    assert seconds("-m", "tokenv", "--help") - seconds("-c", "pass") < 0.2


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_version(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenv", word])
    main.main()
    assert capsys.readouterr().out == f"tokenv {tokenv.__version__}\n"


def test_a_reader_that_leaves_is_no_mistake_of_ours() -> None:
    program = f"{sys.executable} -m tokenv list | head -n 1"
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_a_kind_is_listed_with_a_line_each(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("list", [kind])
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.split(maxsplit=1) for line in lines)  # every line has a name and a text
    known = {
        "agents": registry.AGENTS,
        "estimators": registry.ESTIMATORS,
        "rate_targets": registry.RATE_TARGETS,
        "codecs": registry.CODECS,
        "configs": ["quick", "compare-quick"],
        "datasets": ["python", "regimes", "hub:HuggingFaceFW/fineweb"],
    }[kind]
    assert set(known) <= set(told)
    assert "cannot be used" not in "".join(lines)


def test_one_is_shown_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("list", ["agents", "learned"])
    shown = capsys.readouterr().out
    assert "Boundary logits from the byte representation" in shown
    assert re.search(r"agent.window = 8 +w >= 0 earlier boundaries that a decision reads.", shown)
    run_command("list", ["configs", "quick"])
    assert "rate: 0.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["agent"], "did you mean 'agents'"),
        (["agents", "lerned"], "did you mean 'learned'"),
        (["configs", "quik"], "did you mean 'quick'"),
        (["agents", "learned", "please"], "cannot list 'agents learned please'"),
    ],
)
def test_what_is_not_there_cannot_be_listed(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_command("list", words)


def test_plug_ins_are_listed_and_a_broken_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """None of them is imported: theirs would fail."""
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemError('imported')\nfrom .tricks import Trick as Renamed\n")
    (package / "tricks.py").write_text('class Trick:\n    """Does it\n    all.\n\n    And more."""\n')
    (package / "half.py").write_text("def half(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    targets = {
        "fine": "theirs.tricks:Trick",
        "passed_on": "theirs:Renamed",
        "gone": "theirs.nowhere:Trick",
        "nothing": "theirs.tricks:Nothing",
        "half": "theirs.half:half",
        "reinforce": "theirs.tricks:Trick",
    }
    group = "tokenv.estimators"
    ours = EntryPoints(EntryPoint(name, target, group) for name, target in targets.items())
    monkeypatch.setattr(registry, "entry_points", lambda group: ours.select(group=group))
    run_command("list", ["estimators"])
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert told["fine"] == "Does it all. (from theirs.tricks:Trick)"
    assert told["passed_on"] == "Does it all. (from theirs:Renamed)"
    assert told["gone"] == "cannot be used: there is no module theirs.nowhere"
    assert told["nothing"] == "cannot be used: theirs.tricks has no Nothing"
    assert told["half"].startswith("cannot be used: theirs.half cannot be read")
    assert "is claimed by" in told["reinforce"]
    assert "theirs" not in sys.modules
    assert told["rloo"].startswith("Leave-one-out over K samples")


def test_a_sentence_of_what_is_not_there() -> None:
    with pytest.raises(LookupError, match="there is no module nowhere"):
        sentence("nowhere.at:all")
    assert sentence("tokenv.cli.segment") == "tokenv segment: draw token boundaries in a text, in colour."


def test_every_command_is_documented_by_its_own_sample() -> None:
    assert {*SAMPLES, "lm-eval", "list", "configs", "completion"} == set(COMMANDS)
    assert dataclasses.is_dataclass(Config)
