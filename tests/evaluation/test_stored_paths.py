"""Runs are read from their own state: no path which they name is opened, and their files may be anywhere."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tiny import settings

import tokenv
from tokenv.cli.main import run_command
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints
from tokenv.core.errors import UserError
from tokenv.core.run_folders import write_digests
from tokenv.data.corpus import load_corpus
from tokenv.data.tokenizer import train_bpe
from tokenv.training.trainer import train

TEXT = "a text that is read, and one that is not\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with a tokenizer's file, and with nothing that an earlier test has named."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    shutil.copy(train_bpe(load_corpus(resolve([], settings()).data), 300), "tokenizer.json")
    return tmp_path / "home"


def train_once(**changes: Any) -> Path:
    """Train a run as ``tokenv train`` does, without its pictures; return its folder."""
    config = resolve([], merge(settings(train={"symbols": 256}), changes))
    folder = Path("runs") / str(1 + len(list(Path("runs").glob("*"))))
    train(config, folder / "checkpoints", lambda *_: None)
    (folder / "config.json").write_text(json.dumps(config.as_dict()))
    return folder


OF_TOKENIZER: dict[str, dict[str, Any]] = {
    "agent": {"agent": {"name": "bpe", "tokenizer": "tokenizer.json"}},
    "teacher": {"imitation": {"teacher": {"name": "bpe", "tokenizer": "tokenizer.json"}}},
}


@pytest.mark.parametrize("kind", OF_TOKENIZER)
def test_a_run_outlives_the_file_of_its_tokenizer(
    kind: str, home: Path, another_process: Callable[[], None], tmp_path: Path
) -> None:
    train_once(**OF_TOKENIZER[kind])
    before = tokenv.load("runs/1").tokens(TEXT)
    (home / "tokenizer.json").unlink()
    os.mkfifo("tokenizer.json")  # opening it would wait for ever
    another_process()
    assert tokenv.load("runs/1").tokens(TEXT) == before
    assert (
        run_command("evaluate", ["with", "run=runs/1", "sequences=4"])["sampled"]["boundary_rate"]
        > 0
    )
    if kind == "teacher":
        assert tokenv.load("runs/1").generate("abc", 2)
    tokenv.load("runs/1").save_pretrained(tmp_path / "elsewhere")
    shutil.rmtree(home / "runs")
    another_process()
    assert tokenv.load(tmp_path / "elsewhere").tokens(TEXT) == before


def test_a_run_resumes_without_the_files_it_began_with(home: Path) -> None:
    train_once()
    train_once(**OF_TOKENIZER["teacher"], init_from="runs/1")
    shutil.rmtree("runs/1")
    Path("tokenizer.json").unlink()
    resume = checkpoints.load(checkpoints.find("runs/2"))
    config = resolve([], {"train": {"symbols": 512}}, base=resume.state["config"])
    train(config, Path("runs/2/checkpoints"), lambda *_: None, resume=resume)


def test_relative_paths_are_stored_absolute(
    home: Path, monkeypatch: pytest.MonkeyPatch, another_process: Callable[[], None], tmp_path: Path
) -> None:
    Path("book.txt").write_text("".join(f"{number} {TEXT}" for number in range(2000)))
    train_once(**OF_TOKENIZER["agent"], data={"source": "book.txt", "validation": 0.1})
    stored = json.loads(Path("runs/1/config.json").read_text())
    assert stored["data"]["source"] == str(home / "book.txt")
    assert stored["agent"]["tokenizer"] == str(home / "tokenizer.json")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    another_process()
    elsewhere = ["with", f"run={home}/runs/1", "sequences=4"]
    with pytest.raises(UserError, match=f"add trust_code={home}/book.txt"):
        run_command("evaluate", elsewhere)
    assert run_command("evaluate", [*elsewhere, f"trust_code={home}"])


PLANTS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "agent.tokenizer": lambda config, path: config.update(agent={"name": "bpe", "tokenizer": path}),
    "imitation.teacher.tokenizer": lambda config, path: config["imitation"].update(
        teacher={"name": "bpe", "tokenizer": path}
    ),
    "agent.pretrained": lambda config, path: config["agent"].update(pretrained=path),
    "imitation.teacher.pretrained": lambda config, path: config["imitation"].update(
        teacher={"name": "loaded", "pretrained": path}
    ),
    "init_from": lambda config, path: config.update(init_from=path),
}


@pytest.mark.parametrize("key", PLANTS)
def test_no_reader_opens_a_path_that_a_stored_run_names(
    key: str, home: Path, another_process: Callable[[], None], tmp_path: Path
) -> None:
    train_once()
    planted = tmp_path / "planted"
    shutil.copytree(home / "runs" / "1" / "checkpoints", planted / "checkpoints")
    for path in checkpoints.list_complete(home / "runs" / "1" / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        PLANTS[key](state["config"], str(planted))
        (path / "state.json").write_text(json.dumps(state))
        write_digests(path)
    config = json.loads(Path("runs/1/config.json").read_text())
    PLANTS[key](config, str(planted))
    Path("runs/1/config.json").write_text(json.dumps(config))
    opened: list[str] = []
    watching = [True]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in ("open", "os.listdir", "os.scandir"):
            opened.append(str(arguments[0]))

    sys.addaudithook(watch)  # which cannot be removed
    commands = {
        "segment": ["run=runs/1", "text=abc", "out=null"],
        "evaluate": ["run=runs/1", "sequences=4"],
        "train": ["resume=runs/1", "-u"],
    }
    for command, words in commands.items():
        another_process()
        # init_from is ignored by readers, the rest is no configuration of this checkpoint
        with suppress(UserError):
            run_command(command, ["with", *words])
    another_process()
    with pytest.raises(UserError, match=r"names code|which would be read|is missing"):
        run_command("train", ["with", "runs/1/config.json", "-u"])
    watching.clear()
    assert [path for path in opened if str(planted) in path] == []
