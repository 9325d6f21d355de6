"""Sacred's record of a run: the git commit, and complete files."""

import errno
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenv.cli import observers, sacred
from tokenv.cli.main import main, run_command
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clear_commit_cache() -> Iterator[None]:
    observers._commit_in.cache_clear()
    yield
    observers._commit_in.cache_clear()


def test_a_checkout_of_another_user_is_not_an_error(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where somebody may have told git to trust the checkout
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    run_command("train", ["print_config", "with", *tiny_words])
    original = observers.dependencies.get_commit_if_possible.__wrapped__
    assert observers._commit_of(original, str(ROOT / "tokenv" / "cli" / "main.py"), True) == (None, None, None)


def test_git_runs_once_for_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def original(*args: Any) -> tuple[str, str, bool]:
        calls.append(args)
        return "here", "abc", False

    (tmp_path / ".git").mkdir()
    for name in ("a.py", "of/b.py", "of/many/c.py"):
        assert observers._commit_of(original, str(tmp_path / name), True) == ("here", "abc", False)
    assert len(calls) == 1
    assert observers._commit_of(original, str(tmp_path / "a.py"), False) == (None, None, None)


def test_a_full_disk_leaves_the_old_record(
    trained: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sacred itself would truncate run.json before it finds the disk full."""
    before = (trained / "run.json").read_text()
    observer = sacred.FileStorageObserver(trained.parent)
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
    assert run_command("segment", ["with", f"run={trained}", "text=a\udcff", "out=null"])["characters"] == 2
    run_command("generate", ["with", f"run={trained}", "text=a\udcff", "stop=\udcff", "max_new=2"])


def test_a_disk_that_is_full_while_sources_are_copied_is_one_message(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is no traceback, no incomplete source, and no folder of the run."""
    monkeypatch.chdir(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(SystemExit):
            main(["train", "with", *tiny_words])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if line.startswith("tokenv: ")]
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
        raise self.errors.PyMongoError(f"{self.url}: Connection refused (and much more), Timeout: 5s, ...")

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
    monkeypatch.setitem(sys.modules, "sacred.observers.mongo", _MongoModule)  # which needs the real one
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
