"""Words of a command line: texts are not changed, and all command lines in help and messages are valid."""

import json
import logging
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenv.cli import main
from tokenv.cli.command_registry import COMMANDS
from tokenv.cli.evaluate import Evaluate
from tokenv.cli.help import KINDS, command_keys, print_help
from tokenv.cli.inference import Generate, Segment, Serve
from tokenv.cli.main import run_command
from tokenv.cli.train_command import Train
from tokenv.cli.usage import FUNCTIONS, overview, summaries
from tokenv.compare.command import parse_comparison_arguments
from tokenv.compare.config import CompareOptions
from tokenv.config.files import config_path
from tokenv.config.literals import read_words
from tokenv.config.registry import AGENTS, CODECS, ESTIMATORS, RATE_TARGETS, find
from tokenv.core.atomic import output
from tokenv.core.conversion import SECTION_TEXTS, parameters
from tokenv.core.errors import UserError
from tokenv.lab.config import BenchOptions, VarianceOptions
from tokenv.series.forecast_command import Forecast

TEXT_KEYS = [
    *((Segment, key) for key in ("text", "file", "run", "out", "json")),
    *((Generate, key) for key in ("text", "stop")),
    *((Evaluate, key) for key in ("tasks", "data.source", "task_files.lambada")),
    *((Forecast, key) for key in ("csv", "out", "peers")),
    *(
        (Train, key)
        for key in (
            "resume",
            "data.source",
            "data.column",
            "init_from",
            "agent.name",
            "agent.pretrained",
        )
    ),
    *(
        (CompareOptions, key)
        for key in ("store", "reference", "common.data.source", "methods.a.agent.tokenizer")
    ),
    *(
        (CompareOptions, key)
        for key in ("protocols.a.common.init_from", "protocols.a.reference", "only", "runs")
    ),
    *((VarianceOptions, key) for key in ("run", "reference", "data.source")),
    *((BenchOptions, key) for key in ("out", "data.source")),
    (Serve, "host"),
]
LIKE_VALUES = [
    "1e3",
    "007",
    "1_000",
    "true",
    "None",
    "[1",
    "{'a': 1}",
    "'a b'",
    " a ",
    "",
    "b'x'",
    "0x10",
    "...",
    "a=b",
]


def read(kind: type, word: str, *sections: str) -> Any:
    values, _ = read_words([word], kind)
    for section in sections:
        values = values[section]
    return values


def test_a_configuration_file_may_lie_in_a_folder_with_an_equals_sign(tmp_path: Path) -> None:
    path = tmp_path / "learning_rate=0.1" / "run.yaml"
    assert read_words([f"{path}"], Train)[1] == []  # a key, as long as there is no such file
    path.parent.mkdir()
    path.write_text("seed: 1")
    assert read_words([f"{path}", "seed=2"], Train) == ({"seed": 2}, [f"{path}"])


@pytest.mark.parametrize(("kind", "key"), TEXT_KEYS)
def test_texts_of_text_keys_are_not_changed(kind: type, key: str) -> None:
    for text in LIKE_VALUES:
        assert read(kind, f"{key}={text}", *key.split(".")) == text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_is_not_changed(text: str) -> None:
    if text != "null":
        assert read(Segment, f"text={text}", "text") == text


def test_null_and_keys_of_other_types() -> None:
    assert read(Segment, "out=null", "out") is None
    assert read(Segment, "tokens=1e3", "tokens") == 1000
    assert read(Train, "agent.window=3", "agent", "window") == 3
    assert read(Train, "agent={'name': 'learned'}", "agent") == {"name": "learned"}
    assert read(CompareOptions, "tune={'rate': [0.1]}", "tune") == {"rate": [0.1]}


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("only=[1e3, 007, a b]", ["1e3", "007", "a b"]),
        ("runs=[runs/1,runs/2]", ["runs/1", "runs/2"]),
        ("""only=["rloo(a=1, b=2)", 'it"s']""", ["rloo(a=1, b=2)", 'it"s']),
        ("only=[]", []),
        ("only=[it's]", "[it's]"),
    ],
)
def test_lists_hold_texts_as_they_are_written(word: str, texts: Any) -> None:
    key = word.partition("=")[0]
    assert read(CompareOptions, word, key) == texts


def test_methods_of_odd_names_take_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("methods: {v1.5: {}}\n")
    values, _ = parse_comparison_arguments(
        [str(path), "methods.v1.5.data.source=1e3"], CompareOptions
    )
    assert values["methods"]["v1.5"]["data"]["source"] == "1e3"


def test_text_options_of_sections_are_listed() -> None:
    """All other texts are choices, of which none looks like a number."""
    choices = {"pooling", "rounding", "align", "mode", "density"}
    text_options = {"name"}
    tables = {
        "agent": AGENTS,
        "estimator": ESTIMATORS,
        "rate_target": RATE_TARGETS,
        "codec": CODECS,
    }
    for section, table in tables.items():
        for name in table:
            for key, parameter in parameters(find(section, name, table)).items():
                text_options |= (
                    {key} if re.search(r"\bstr\b|\bPath\b", str(parameter.annotation)) else set()
                )
    assert text_options - choices - {"train_tokenizer"} <= set(SECTION_TEXTS)


def test_segment_cuts_the_text_that_was_typed(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r'expected one of text="\.\.\." and file=PATH'):
        run_command("segment", ["with", f"run={trained}"])
    for text in ("1e3", "None", "'a b'"):
        assert run_command("segment", ["with", f"run={trained}", f"text={text}", "out=null"])[
            "characters"
        ] == len(text)
        assert text in capsys.readouterr().out.replace("│", "")


POINTER = re.compile(
    r"\btokenv ([a-z][a-z-]*)((?: (?:with|help|--help|print_config|[\w./]+=[^\s,;]+|[a-z][\w-]*\b(?![.=])))*)"
)


def check_pointer(command: str, words: list[str]) -> None:
    """Parse a command line without running it."""
    assert command in (*COMMANDS.names(), *FUNCTIONS), command
    if command == "list":
        run_command(command, words[:1])
        return
    if "with" not in words or "help" in words or "--help" in words:
        return
    known = {key.name for key in command_keys(command)}
    sections = {key.rpartition(".")[0] for key in known}
    for word in words[words.index("with") + 1 :]:
        key, equals, _ = word.partition("=")
        if equals:
            assert key in known or key.rpartition(".")[0] in sections, word
        elif word not in ("key", "NAME"):
            config_path(word)


@pytest.mark.parametrize("command", ["", *COMMANDS.names(), *FUNCTIONS])
def test_command_lines_in_help_are_valid(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    if command:
        print_help(command, summaries()[command])
    text = re.sub(r"\s+", " ", capsys.readouterr().out) if command else overview()
    command_lines = POINTER.findall(text)
    assert command_lines
    for name, words in command_lines:
        if name in COMMANDS.names() or command == "":
            prose = [word for word in shlex.split(words) if "=" in word or word in (*KINDS, "with")]
            check_pointer(name, prose)


@pytest.mark.parametrize("command", ["segment", "train", "bench"])
def test_help_lists_keys_before_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_help(command, summaries()[command])
    shown = capsys.readouterr().out
    assert shown.startswith(f"tokenv {command}: ")
    assert shown.index("\nKeys, as ") < shown.index("--file_storage")


@pytest.fixture
def run_wrong_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Any:
    """Return a function which runs a wrong command line and returns its stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("hi")
    (tmp_path / "empty").mkdir()

    def of(line: str) -> list[str]:
        handlers = logging.getLogger().handlers[:]
        monkeypatch.setattr(sys, "argv", ["tokenv", *line.split()])
        with pytest.raises(SystemExit):
            main.main()
        logging.getLogger().handlers = handlers
        return capsys.readouterr().err.splitlines()

    return of


@pytest.mark.parametrize(
    "line",
    [
        "train with data.source=empty hardware.device=cpu",
        "train with data.source=short.txt hardware.device=cpu",
        "variance with quick data.source=short.txt hardware.device=cpu",
        "compare with runs=[a,b]",
    ],
)
def test_a_mistake_leaves_no_log_and_no_run(run_wrong_line: Any, line: str) -> None:
    """The data are read after the run has begun: its number is free again."""
    (message,) = run_wrong_line(line)
    assert message.startswith("tokenv: ")
    assert {path.name for path in Path("runs").iterdir()} <= {"_sources", ".locks"}


def test_a_number_suggests_the_run_of_that_number(trained: Path) -> None:
    with pytest.raises(UserError, match=r"did you mean runs/1\?"):
        run_command("segment", ["with", "run=1", "text=a"])
    with pytest.raises(UserError, match="runs with checkpoints are runs/1"):
        run_command("segment", ["with", "run=7", "text=a"])


def test_a_comparison_of_one_runs_configuration_says_what_is_needed(run_wrong_line: Any) -> None:
    (message,) = run_wrong_line("compare with small")
    assert "a comparison needs methods" in message
    written = re.search(r"a YAML file such as (\{.*\}), or", message)
    assert written is not None
    Path("mine.yaml").write_text(written[1])
    options = parse_comparison_arguments(["mine.yaml"], CompareOptions)
    assert options == ({}, ["mine.yaml"])
    for line in (["mine.yaml"], ["compare-quick", "base=small"]):
        run_command("compare", ["print_config", "with", *line])


def test_a_comparison_file_is_named_as_it_can_be_typed(run_wrong_line: Any) -> None:
    Path("my").mkdir()
    Path("my/own.yaml").write_text(json.dumps({"methods": {"a": {}}}))
    assert run_wrong_line("train with my/own.yaml")[0].endswith(
        "expected tokenv compare with my/own.yaml"
    )
    assert run_wrong_line("train with compare-quick")[0].endswith(
        "expected tokenv compare with compare-quick"
    )


def test_the_defaults_are_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stop where training would begin."""

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenv.cli.train.train", stop)
    for words, announced in (([], True), (["with", "quick"], False), (["with", "seed=1"], False)):
        with pytest.raises(KeyboardInterrupt):
            run_command("train", [*words, "-u"])
        shown = capsys.readouterr().out
        assert ("no configuration is named" in shown) == announced
        assert "bytes of python" in shown


@pytest.mark.parametrize("path", [".", "", "..", "folder", "gone/made", "pipe"])
@pytest.mark.parametrize(
    ("command", "key"), [("segment", "out"), ("segment", "json"), ("evaluate", "json")]
)
def test_an_output_file_is_checked_before_the_work(
    path: str, command: str, key: str, run_wrong_line: Any
) -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")
    more = " text=a" if command == "segment" else ""
    (message,) = run_wrong_line(f"{command} with run=runs/1 {key}={path}{more}")
    assert message.startswith(f"tokenv: {key} = {path!r}: ")


def test_names_of_files_without_endings_may_be_those_of_folders(tmp_path: Path) -> None:
    check = output(".csv", ".png")["check"]
    (tmp_path / "made").mkdir()
    check("out", str(tmp_path / "made"))
    (tmp_path / "made.png").mkdir()
    with pytest.raises(UserError, match="expected the name of a file"):
        check("out", str(tmp_path / "made"))
