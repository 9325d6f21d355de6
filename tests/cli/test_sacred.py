"""Sacred's record of a run: the git commit, and complete files."""

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tokenv.cli import observers, sacred
from tokenv.cli.experiment import experiment
from tokenv.cli.main import main, run_command
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clear_commit_cache() -> Iterator[None]:
    sacred._commit_of.cache_clear()
    yield
    sacred._commit_of.cache_clear()


def test_sacred_is_not_changed(tiny_words: list[str], tmp_path: Path) -> None:
    """Every attribute of its modules and classes, and every setting, after an import of all commands and a run."""
    program = f"""
import copy, importlib, inspect, pkgutil, sys, warnings
warnings.simplefilter("ignore")
import sacred
for module in pkgutil.walk_packages(sacred.__path__, "sacred."):
    try:
        importlib.import_module(module.name)
    except ImportError:  # it needs a package which is not installed
        pass

def attributes():
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "sacred"]
    own = [each for module in modules for each in vars(module).values() if inspect.isclass(each)]
    classes = {{each for each in own if each.__module__.partition(".")[0] == "sacred"}}
    return {{(repr(owner), name): value for owner in (*modules, *classes) for name, value in vars(owner).items()}}

before, settings = attributes(), copy.deepcopy(sacred.SETTINGS)
import tokenv, tokenv.cli
for module in pkgutil.iter_modules(tokenv.cli.__path__, "tokenv.cli."):
    importlib.import_module(module.name)
tokenv.train
tokenv.cli.main.main(["train", "with", *{tiny_words!r}, "-F", "runs"])
after = attributes()
assert len(before) > 1000
print([key for key in before if before[key] is not after.get(key)], settings == sacred.SETTINGS)
"""
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("[] True\n"), done.stdout[-2000:] + done.stderr
    assert (tmp_path / "runs" / "1" / "metrics.json").is_file()


def test_a_run_does_not_take_the_folder_of_another(
    tiny_words: list[str], trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it is named, or a number that a database has given."""
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    for flags in (
        ["--id", "1"],
        ["--id", "1", "-F", "runs"],
        ["--id", "1", "-F", "runs", "--queue"],
    ):
        with pytest.raises(SystemExit):
            main(["train", "with", *tiny_words, *flags])
        printed = capsys.readouterr().err
        assert "tokenv: runs/1: is there already: choose another --id" in printed
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before


def test_an_sql_observer_receives_one_figure(tiny_words: list[str], tmp_path: Path) -> None:
    """One which a program has added, too."""
    events = {}

    class Sql(observers.SqlObserver):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name.endswith("_event"):
                return lambda *_, **event: events.update({name: event})
            return super().__getattribute__(name)

        def completed_event(self, stop_time: datetime, result: Any) -> None: ...

    ex = experiment("train", *tiny_words, store=tmp_path)
    ex.observers.append(Sql.create_from(None, None))
    result = ex.run().result
    assert events["completed_event"]["result"] == result["bits_per_byte"]
    assert json.loads((tmp_path / "1" / "run.json").read_text())["result"] == result


def test_a_run_has_the_number_after_the_largest(tmp_path: Path) -> None:
    """Whatever else lies in the store."""
    for name in ("3", "\u00b2", "7a", "_sources"):
        (tmp_path / name).mkdir()
    (tmp_path / "9").touch()
    assert observers.FileStorage(tmp_path)._maximum_existing_run_id() == 9


@pytest.mark.parametrize("event", ["queued_event", "started_event"])
def test_a_run_that_cannot_begin_leaves_no_folder(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(observers, "write_atomically", full)
    observer = observers.FileStorage(tmp_path / "runs")
    about: dict[str, Any] = {
        "ex_info": {"base_dir": str(tmp_path), "sources": []},
        "host_info": {},
        "meta_info": {},
    }
    about["_id"] = None
    now = datetime.now(UTC)
    about |= {
        "command": "main",
        "config": {},
        {"queued_event": "queue_time", "started_event": "start_time"}[event]: now,
    }
    with pytest.raises(OSError, match="No space"):
        getattr(observer, event)(**about)
    assert not list((tmp_path / "runs").glob("1"))
    observer.failed_event(now, [])  # which Sacred calls then


def test_a_checkout_of_another_user_is_not_an_error(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # where somebody may have told git to trust the checkout
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    run_command("train", ["print_config", "with", *tiny_words])
    assert sacred._commit_of(ROOT) == (None, None, None)


def test_git_runs_once_for_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def commit(*args: Any) -> tuple[str, str, bool]:
        calls.append(args)
        return "here", "abc", False

    monkeypatch.setattr(sacred, "get_commit_if_possible", commit)
    (tmp_path / "in" / ".git").mkdir(parents=True)
    (tmp_path / "in" / "of").mkdir()
    experiment = sacred._bare_experiment("train")
    experiment.sources.clear()
    for name in ("in/a.py", "in/of/b.py", "c.py"):
        (tmp_path / name).touch()
        sacred._add_source(experiment, tmp_path / name)
    assert calls == [(str(tmp_path / "in" / "README.md"), True)]
    info = experiment.get_experiment_info()
    assert len(info["sources"]) == 3
    assert info["repositories"] == [{"url": "here", "commit": "abc", "dirty": False}] * 2


def test_a_full_disk_leaves_the_old_record(
    trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sacred itself would truncate run.json before it finds the disk full."""
    before = (trained / "run.json").read_text()
    observer = observers.FileStorage(trained.parent)
    observer.dir = str(trained)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        observer.save_json({"status": "COMPLETED"}, "run.json")
        assert "run.json: cannot be written to (No space left on device)" in caplog.text
    assert (trained / "run.json").read_text() == before
    observer.save_json({"status": "FAILED"}, "run.json")
    assert json.loads((trained / "run.json").read_text()) == {"status": "FAILED"}


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("agent: {name: uniform, 'a=b': 1}", [], "Invalid key"),
        ("agent: {name: uniform}", ["-s", "sqlite:///x.db"], "needs the package sqlalchemy"),
    ],
)
def test_errors_of_sacred_are_one_message(
    content: str, flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    (tmp_path / "odd.yaml").write_text(content)
    with pytest.raises(UserError, match=message):
        run_command("bench", ["with", "odd.yaml", "repeats=1", *(flags or ["-u"])])


@pytest.mark.parametrize("word", ["stop=\ud800", "text=\ud800"])
def test_half_a_character_is_one_message(word: str) -> None:
    with pytest.raises(UserError, match="expected Unicode text"):
        run_command("generate", ["with", "run=runs/1", word])


def test_bytes_that_were_typed_and_are_no_utf8_are_read(trained: Path) -> None:
    assert (
        run_command("segment", ["with", f"run={trained}", "text=a\udcff", "out=null"])["characters"]
        == 2
    )
    run_command(
        "generate", ["with", f"run={trained}", "text=a\udcff", "stop=\udcff", "max_new_tokens=2"]
    )


def test_a_disk_that_is_full_while_sources_are_copied_is_one_message(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There is no traceback, no incomplete source, and no folder of the run."""
    monkeypatch.chdir(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(SystemExit):
            main(["train", "with", *tiny_words])
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("tokenv: ")]
    assert re.search(r"runs/_sources/\w+\.py: No space left on device", line)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["_sources"]
    assert not list((tmp_path / "runs" / "_sources").iterdir())


class NoMongo:
    """Stand-in for pymongo without a server."""

    class errors:  # noqa: N801
        class PyMongoError(Exception):
            """Base class of all its errors."""

    def __init__(self, url: str | None, serverSelectionTimeoutMS: float) -> None:
        assert serverSelectionTimeoutMS <= 5000
        self.url = url

    def __enter__(self) -> "NoMongo":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def admin(self) -> Any:
        raise self.errors.PyMongoError(
            f"{self.url}: Connection refused (and much more), Timeout: 5s, ..."
        )

    MongoClient: Any


NoMongo.MongoClient = NoMongo


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("localhost:9:sacred", "no MongoDB answers at localhost:9 .*Connection refused"),
        ("sacred", "no MongoDB answers at localhost:27017"),
        ("::", "expected .HOST:PORT:.DATABASE"),
    ],
)
def test_a_database_that_does_not_answer_is_one_message(
    place: str, message: str, tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pymongo", NoMongo)  # type: ignore[misc]
    # which needs the real one
    monkeypatch.setitem(sys.modules, "sacred.observers.mongo", _MongoModule)
    with pytest.raises(UserError, match=rf"--mongo_db {place}: {message}"):
        run_command("train", ["with", *tiny_words, "-m", place])
    assert not list(tmp_path.iterdir())


class _MongoModule:
    @staticmethod
    def parse_mongo_db_arg(place: str) -> dict[str, str]:
        *url, name = place.split(":")
        if not name:
            raise AttributeError("'NoneType' object has no attribute 'groupdict'")  # as Sacred's
        return {"db_name": name} | ({"url": ":".join(url)} if url else {})


@pytest.mark.parametrize("name", ["²", "٣", "x", "-1"])
def test_a_folder_of_any_name_may_lie_among_the_runs(name: str, tmp_path: Path) -> None:
    """Sacred calls int() for what str.isdigit() accepts."""
    (tmp_path / name).mkdir()
    observer = observers.FileStorage(tmp_path)
    assert observer._maximum_existing_run_id() == 0
    (tmp_path / "7").mkdir()
    assert observer._maximum_existing_run_id() == 7
