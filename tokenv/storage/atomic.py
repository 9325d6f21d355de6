"""Files and folders that are complete or not there at all."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PARTIAL, DELETED = ".partial-", ".deleted-"


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Give another path to write a file to, and rename it when written: a kill at any moment leaves the old one.

    Two processes may write the same file; it is the last one's.
    """
    scratch = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
    try:
        with _as_os_error(scratch):
            yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file, complete or not at all.

    Args:
        path: in an existing folder; a file that is there is replaced.
        content: text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    with replacing_file(path) as scratch:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write files to, and rename it when they are on the disk; what is there makes room.

    Raises:
        OSError: it cannot be written, or the folder that its own lies in is gone; nothing is left behind.
    """
    partial = path.with_name(f"{PARTIAL}{path.name}")
    shutil.rmtree(partial, ignore_errors=True)
    path.parent.mkdir(exist_ok=True)  # no more: where a store was unmounted, another disk would be written to
    partial.mkdir()
    try:
        with _as_os_error(partial):
            yield partial
        for written in (*partial.iterdir(), partial):
            _flush(written)
        if path.exists():
            remove_folder(path)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(path.parent)


def remove_folder(path: Path) -> None:
    """Rename a folder out of the way, then delete it: a kill in between leaves no half of it under its name."""
    doomed = path.with_name(f"{DELETED}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Delete what kills have left of folders that were being written or deleted here; nobody may be at it now."""
    for left in (*folder.glob(f"{PARTIAL}*/"), *folder.glob(f"{DELETED}*/")):
        shutil.rmtree(left)


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """A full disk is an OSError, also where safetensors finds it."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
