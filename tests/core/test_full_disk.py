"""A disk that is full, read-only or gone: nothing saved is lost, and one message says what to do."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shrunk
from tiny import overrides

from tokenv.cli.main import run_command
from tokenv.core import atomic, checkpoints
from tokenv.core.errors import UserError
from tokenv.training import trainer as training


@pytest.fixture
def words(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return overrides(tiny_settings | {"checkpoint": {"every_symbols": 512}})


def weights(run: Path) -> bytes:
    return (checkpoints.list_complete(run / "checkpoints")[-1] / "model.safetensors").read_bytes()


def test_a_full_disk_keeps_what_was_saved(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third checkpoint does not fit, nor does anything after it."""
    run_command("train", ["with", *words])
    calls = []

    def flush(path: Path) -> None:
        calls.append(path)
        if len({each for each in calls if each.name.startswith(".partial-step")}) > 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "_flush", flush)
        message = r"runs/2: cannot be written to \(No space left on device\); resume it with"
        with pytest.raises(UserError, match=message):
            run_command("train", ["with", *words])
    folder = Path("runs/2/checkpoints")
    assert len(checkpoints.list_complete(folder)) == 2
    assert not list(folder.glob(".partial-*"))
    assert json.loads(Path("runs/2/run.json").read_text())["status"] == "FAILED"
    run_command("train", ["with", "resume=runs/2"])
    assert weights(Path("runs/3")) == weights(Path("runs/1"))


def test_a_store_that_vanishes_is_not_made_again(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it was unmounted, a new folder would lie on another disk; it comes back with all that was in it."""
    save = training.checkpoints.save

    def vanish(folder: Path, *of: Any, **more: Any) -> Path:
        if checkpoints.list_complete(folder):
            shutil.move("runs", "away")
        return save(folder, *of, **more)

    with monkeypatch.context() as patch:
        patch.setattr(training.checkpoints, "save", vanish)
        with pytest.raises(
            UserError, match=r"runs/1: cannot be written to \(No such file or directory\)"
        ):
            run_command("train", ["with", *words])
    assert not Path("runs").exists()
    shutil.move("away", "runs")
    assert run_command("train", ["with", "resume=runs/1"])["bits_per_byte"] > 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 3 MiB; only root may do this."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if (
        shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True, check=False).returncode
    ):
        pytest.skip("cannot mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def train(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(shrunk.ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tokenv", "train", "with", *words, "-F", str(folder)]
    return subprocess.run(
        command, cwd=folder.parent, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_disk_that_is_really_full(words: list[str], small_disk: Path) -> None:
    """It fills up after some checkpoints; with room again, the run goes on to the weights it would have had."""
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(500_000))
    done = train([*words, "checkpoint.keep=1000", "train.symbols=25600"], small_disk)
    assert done.returncode == 2, done.stderr
    assert (
        "cannot be written to (No space left on device); resume it with: tokenv train with resume="
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    (run,) = small_disk.glob("[0-9]*")
    record = json.loads((run / "run.json").read_text())  # whole, though perhaps not the last word
    assert record["experiment"]["name"] == "tokenv-train"
    kept = checkpoints.list_complete(run / "checkpoints")
    assert kept
    steps = checkpoints.load_state(kept[-1])["step"]
    ballast.unlink()
    for path in kept[:-1]:
        shutil.rmtree(path)
    home = small_disk.parent / "home"
    home.mkdir()
    done = train([f"resume={run}", "checkpoint.keep=1"], home)
    assert done.returncode == 0, done.stderr
    assert (
        checkpoints.load_state(checkpoints.list_complete(home / "1" / "checkpoints")[-1])["step"]
        > steps
    )
    done = train([*words, "train.symbols=25600"], home)
    assert done.returncode == 0, done.stderr
    assert weights(home / "1") == weights(home / "2")


def test_a_read_only_store_is_reported_before_work_starts(
    words: list[str], small_disk: Path
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for folder in (small_disk, small_disk / "deeper" / "runs"):
        with pytest.raises(
            UserError,
            match=r"disk.*: cannot be written to .*: expected a folder for runs; name another",
        ):
            run_command("train", ["with", *words, "-F", str(folder)])
    assert run_command("train", ["with", *words, "-u"])["bits_per_byte"] > 0
    Path("file").touch()
    with pytest.raises(UserError, match="file: cannot be written to"):
        run_command("train", ["with", *words, "-F", "file"])
    run_command("train", ["print_config", "with", *words])
    assert not Path("runs").exists()
