"""Help: keys with meaning, default and range, lists of names, and the version."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokenv
from tokenv.cli import main
from tokenv.cli.command_registry import COMMANDS
from tokenv.cli.help import KINDS, command_keys, print_help
from tokenv.cli.main import run_command
from tokenv.cli.usage import FUNCTIONS, summaries
from tokenv.config import registry
from tokenv.config.field_docs import keys_of, sentence
from tokenv.config.schema import Config
from tokenv.core import plugins
from tokenv.core.conversion import from_dict
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]


def flat(values: dict, prefix: str = "") -> list[str]:
    names = []
    for key, value in values.items():
        names += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
    return names


def test_every_key_of_a_run_has_meaning_default_and_range() -> None:
    keys = {key.name: key for key in keys_of(Config)}
    assert [
        name for name in keys if name not in ("imitation.teacher.name", "data.options")
    ] == flat(Config().as_dict())
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
    assert keys["model.pooling"].meaning.startswith(
        "chunking of bytes to tokens and back: select (the paper's)"
    )


def test_printed_defaults_are_the_defaults() -> None:
    for key in keys_of(Config):
        *sections, last = key.name.split(".")
        if key.name.endswith(".name"):
            continue
        values: dict = {last: key.default}
        for section in reversed(sections):
            values = {section: values}
        assert from_dict(Config, values) == Config()


@pytest.mark.parametrize("command", COMMANDS.names())
def test_help_names_every_key_of_a_command(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_help(command, summaries()[command])
    shown = capsys.readouterr().out
    keys = command_keys(command)
    assert {"train": "resume", "compare": "jobs", "variance": "draws", "bench": "repeats"}.get(
        command, "run"
    ) in {key.name for key in keys}
    for key in keys:
        assert re.search(rf"^  {re.escape(key.name)}( = |\s)", shown, re.MULTILINE), key
        assert key.meaning.split()[0] in shown
    assert "--file_storage" in shown


@pytest.mark.parametrize("command", FUNCTIONS)
def test_help_of_a_command_without_keys_says_which_words_it_takes(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_help(command, summaries()[command])
    shown = capsys.readouterr().out
    assert re.fullmatch(rf"tokenv {command}: .+\n\nusage: tokenv {command} .+\n", shown)


def loaded_by(*arguments: str) -> str:
    program = f"""
import atexit, runpy, sys
heavy = ("torch", "torchrl", "matplotlib", "datasets")
atexit.register(lambda: print("loaded:", [name for name in heavy if name in sys.modules]))
sys.argv = ["tokenv", *{arguments!r}]
runpy.run_module("tokenv", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["evaluate", "-h"],
        ["bench", "help"],
        ["compare", "--help"],
        ["list"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_help_and_lists_load_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(*arguments) == "loaded: []"


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_printed(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenv", word])
    main.main()
    assert capsys.readouterr().out == f"tokenv {tokenv.__version__}\n"


def test_a_closed_pipe_is_not_an_error() -> None:
    program = f"{sys.executable} -m tokenv list | head -n 1"
    done = subprocess.run(
        ["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


@pytest.mark.parametrize("kind", KINDS)
def test_all_names_of_a_kind_are_listed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_command("list", [kind])
    lines = capsys.readouterr().out.splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines)  # every line has a name and a text
    known = {
        "agents": registry.AGENTS,
        "estimators": registry.ESTIMATORS,
        "rate_targets": registry.RATE_TARGETS,
        "codecs": registry.CODECS,
        "configs": ["quick", "compare-quick"],
        "datasets": ["python", "regimes", "hub:HuggingFaceFW/fineweb"],
        "data": ["text", "series"],
        "callbacks": ["shrink"],
    }[kind]
    assert set(known) <= set(listed)
    assert "cannot be used" not in "".join(lines)


def test_one_name_is_printed_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("list", ["agents", "learned"])
    shown = capsys.readouterr().out
    assert "Boundary logits from the byte representation" in shown
    assert re.search(r"agent.window = 8 +.*earlier boundaries", shown)
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
def test_unknown_names_are_rejected(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_command("list", words)


def test_plugins_are_listed_and_broken_ones_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No plugin is imported: importing it would raise an error."""
    package = tmp_path / "plugin_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise SystemError('imported')\nfrom .tricks import Trick as Renamed\n"
    )
    (package / "tricks.py").write_text(
        'class Trick:\n    """Does it\n    all.\n\n    And more."""\n'
    )
    (package / "half.py").write_text("def half(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    targets = {
        "fine": "plugin_package.tricks:Trick",
        "passed_on": "plugin_package:Renamed",
        "gone": "plugin_package.nowhere:Trick",
        "nothing": "plugin_package.tricks:Nothing",
        "half": "plugin_package.half:half",
        "reinforce": "plugin_package.tricks:Trick",
    }
    ours = [(name, "package", target) for name, target in targets.items()]
    monkeypatch.setattr(
        plugins,
        "installed_entry_points",
        lambda group: ours if group == "tokenv.estimators" else [],
    )
    run_command("list", ["estimators"])
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed["fine"] == "Does it all. (from plugin_package.tricks:Trick)"
    assert listed["passed_on"] == "Does it all. (from plugin_package:Renamed)"
    assert listed["gone"] == "cannot be used: there is no module plugin_package.nowhere"
    assert listed["nothing"] == "cannot be used: plugin_package.tricks has no Nothing"
    assert listed["half"].startswith("cannot be used: plugin_package.half cannot be read")
    assert "is claimed by" in listed["reinforce"]
    assert "plugin_package" not in sys.modules
    assert listed["rloo"].startswith("Leave-one-out over K samples")


def test_sentence_of_a_missing_module() -> None:
    with pytest.raises(LookupError, match="there is no module nowhere"):
        sentence("nowhere.at:all")
    assert sentence("tokenv.agents.learned:Learned").startswith(
        "Boundary logits from the byte representation"
    )
