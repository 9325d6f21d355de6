"""Folders that somebody else made: links in them lead nowhere, and what is no regular file is refused at once."""

import copy
import json
import os
import random
import secrets
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import settings

import tokenv
from tokenv.cli.observers import FileStorage
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.locks import is_locked, lock_gpu, run_lock
from tokenv.compare.run_evaluation import FILE, load_evaluation
from tokenv.compare.store import read_run
from tokenv.config.files import resolve
from tokenv.config.schema import Config
from tokenv.core import atomic, checkpoints, trust
from tokenv.core.errors import UserError
from tokenv.core.processes import read_progress
from tokenv.core.run_folders import DIGESTS, verify, write_digests
from tokenv.evaluation.loaded_run import load_run
from tokenv.training.trainer import train

SECRET = "the user's own"


@pytest.fixture
def linked_file(tmp_path: Path) -> Path:
    """Return a file of the user's, outside of the foreign folder."""
    path = tmp_path / "linked"
    path.write_text(SECRET)
    return path


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    (tmp_path / "foreign").mkdir()
    return tmp_path / "foreign"


WRITERS: dict[str, Callable[[Path], Any]] = {
    "file": lambda path: atomic.write_atomically(path, "theirs"),
    "copy": lambda path: atomic.write_atomically(path, b"copy"),
    "sealed": lambda path: checkpoints.write_json(path, {"a": 1}, 1),
    "tensors": lambda path: checkpoints.save_tensors({"a": torch.ones(2)}, path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_follows_a_link(name: str, linked_file: Path, foreign: Path) -> None:
    """Neither one that lies at the target nor one of a name that could be foreseen."""
    for link in ("run.json", f".partial-{os.getpid()}-run.json", ".partial-run.json"):
        (foreign / link).symlink_to(linked_file)
    WRITERS[name](foreign / "run.json")
    assert linked_file.read_text() == SECRET
    assert not (foreign / "run.json").is_symlink()
    assert (foreign / "run.json").stat().st_size > 0


@pytest.mark.parametrize("name", WRITERS)
def test_a_predictable_name_is_not_written_to(
    name: str, linked_file: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "known")
    (foreign / ".partial-known.json").symlink_to(linked_file)
    with pytest.raises(FileExistsError):
        WRITERS[name](foreign / "run.json")
    assert linked_file.read_text() == SECRET


def test_folders_are_replaced_where_links_lie(
    linked_file: Path, foreign: Path, tmp_path: Path
) -> None:
    """And what a link leads to is not swept away."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "kept").touch()
    for link in (".partial-step-1", ".deleted-step-1", "step-1", ".partial-odd"):
        (foreign / link).symlink_to(own)
    with atomic.replacing_folder(foreign / "step-1") as partial:
        (partial / "a").write_text("new")
    atomic.remove_partial_files(foreign)
    assert [path.name for path in foreign.iterdir()] == ["step-1"]
    assert not (foreign / "step-1").is_symlink()
    assert [path.name for path in own.iterdir()] == ["kept"]


def test_a_lock_in_a_shared_folder_is_no_link(
    linked_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    (tmp_path / "tokenv-me-gpu-0-0.lock").symlink_to(linked_file)
    with pytest.raises(UserError, match=r"gpu-0-0\.lock: cannot be opened"):
        lock_gpu("0", 1)
    assert linked_file.read_text() == SECRET


def test_a_store_neither_redirects_sources_nor_runs_a_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sacred would render ``template.html``, which is Mako; names in ``_sources`` can be foreseen."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sacred.optional.has_mako", True)
    Path("own.py").write_text(SECRET)
    about = {
        "ex_info": {"base_dir": str(tmp_path), "sources": [("own.py", None)]},
        "host_info": {},
        "meta_info": {},
    }
    more = {"command": "main", "config": {}, "start_time": datetime.now(UTC), "_id": None}
    for store in (Path("first"), Path("second")):
        (store / "_sources").mkdir(parents=True)
        for path in Path("first/_sources").iterdir():
            (store / "_sources" / path.name).symlink_to(tmp_path / "nowhere")
        (store / "template.html").write_text("<% open('ran', 'w') %>")
        observer = FileStorage(store)
        observer.started_event(**copy.deepcopy(about), **more)
        observer.completed_event(datetime.now(UTC), 1)
        (kept,) = (store / "_sources").iterdir()
        assert kept.read_text() == SECRET
        assert not kept.is_symlink()
        assert not list((store / "1").glob("report*"))
    assert not Path("nowhere").exists()
    assert not Path("ran").exists()


# --- what is no regular file ---


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "1"
    train(resolve([], settings(train={"symbols": 512})), folder / "checkpoints", lambda *_: None)
    record = {
        "experiment": {"name": "tokenv-train"},
        "status": "COMPLETED",
        "start_time": "2026-01-01T00:00:00",
    }
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.json").write_text(
        json.dumps(resolve([], settings(train={"symbols": 512})).as_dict())
    )
    return folder


@pytest.fixture
def run(trained_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained_once, tmp_path / "runs" / "1"))


KINDS: dict[str, Callable[[Path], Any]] = {
    "named pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": Path.mkdir,
}


@pytest.mark.parametrize("kind", KINDS)
def test_irregular_files_are_rejected_at_once(kind: str, run: Path) -> None:
    """Reading a pipe would wait for ever, reading a device would fill the memory."""
    checkpoint = checkpoints.find(run)

    def put(path: Path) -> Path:
        path.unlink(missing_ok=True)
        KINDS[kind](path)
        return path

    for name in ("run.json", "config.json"):
        kept = (run / name).read_bytes()
        path = put(run / name)
        assert read_run(run) is None
        path.rmdir() if kind == "folder" else path.unlink()
        path.write_bytes(kept)
    assert read_run(run) is not None
    put(run / FILE)
    assert load_evaluation(run, EvaluationRequest()) is None
    put(run / "checkpoints" / "progress.json")
    assert read_progress(run / "checkpoints") is None
    put(checkpoint / DIGESTS)
    with pytest.raises(
        checkpoints.DamagedError, match=f"digests.json: a {kind}: expected a regular file"
    ):
        verify(checkpoint)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_irregular_files_are_not_loaded(kind: str, name: str, run: Path) -> None:
    checkpoint = checkpoints.find(run)
    (checkpoint / name).unlink()
    KINDS[kind](checkpoint / name)
    with pytest.raises(UserError):
        load_run(str(checkpoint))
    with pytest.raises(UserError):
        checkpoints.read_json(checkpoint / name, 1)
    with pytest.raises(UserError):
        checkpoints.load_tensors(checkpoint / name)


def test_the_size_of_json_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("[" + "1," * 100 + "1]")
    assert len(trust.read_json(tmp_path / "a.json")) == 101
    monkeypatch.setattr(trust, "MAX_JSON_BYTES", 100)
    with pytest.raises(UserError, match=r"a\.json is damaged, larger than 100 bytes"):
        trust.read_json(tmp_path / "a.json")


def test_a_configuration_of_a_million_numbers_is_refused_at_once(run: Path) -> None:
    config = json.loads((run / "config.json").read_text()) | {
        "agent": {"name": "learned", "x": [1] * 10**6}
    }
    (run / "config.json").write_text(json.dumps(config))
    assert read_run(run) is None
    with pytest.raises(UserError, match=r"config\.json is damaged, larger than 1,048,576 bytes"):
        resolve([str(run / "config.json")], {})


def test_a_lock_in_a_foreign_store_follows_no_link(run: Path, linked_file: Path) -> None:
    lock = Path(run_lock(Config(), run.parent).lock_file)
    lock.symlink_to(linked_file)
    with pytest.raises(OSError, match="symbolic link"):
        is_locked(Config(), run.parent)
    assert linked_file.read_text() == SECRET


# --- models ---


def test_flipped_bits_of_a_saved_model_are_noticed(trained_once: Path, tmp_path: Path) -> None:
    """In every file which is read; the model's card is text for people, who may edit it."""
    saved = tokenv.load(trained_once).save_pretrained(tmp_path / "model")
    generator = random.Random(0)
    assert sorted(path.name for path in saved.iterdir()) == [
        "README.md",
        DIGESTS,
        "model.safetensors",
        "state.json",
    ]
    for name in ("model.safetensors", "state.json", DIGESTS):
        content = (saved / name).read_bytes()
        for _ in range(100):
            bit = generator.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            (saved / name).write_bytes(flipped)
            with pytest.raises(checkpoints.DamagedError):
                tokenv.load(saved)
        (saved / name).write_bytes(content)
    tokenv.load(saved)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38, -1e10])
def test_implausible_weights_are_rejected(value: float, run: Path) -> None:
    for path in checkpoints.list_complete(run / "checkpoints"):
        tensors = checkpoints.load_file(path / checkpoints.MODEL)
        tensors["lm.head.weight"][3, 1] = value
        checkpoints.save_file(tensors, path / checkpoints.MODEL)
        write_digests(path)
    for read in (lambda: load_run(str(run)), lambda: checkpoints.load(checkpoints.find(run))):
        with pytest.raises(
            UserError,
            match=r"model\.safetensors: lm\.head\.weight holds .*, expected finite numbers",
        ):
            read()
