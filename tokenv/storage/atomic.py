"""Files and folders that are complete or not there at all."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

PARTIAL, DELETED = ".partial-", ".deleted-"


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Give another path to write a file to, and rename it when written: a kill at any moment leaves the old one.

    Two processes may write the same file; it is the last one's. A link is replaced, never followed: the new file has a
    random name, and is made only where nothing of this name exists.

    Raises:
        OSError: the file cannot be written, or its path is a folder's; nothing is left behind.
    """
    if not path.name or (path.is_dir() and not path.is_symlink()):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    scratch = _beside(path, PARTIAL, path.suffix)
    try:
        os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with _as_os_error(path):
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


def copy_atomically(source: str | Path, path: str | Path) -> None:
    """Copy a file's content, complete or not at all; see ``write_atomically``."""
    write_atomically(Path(path), Path(source).read_bytes())


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Give an empty folder to write files to, and rename it when they are on the disk; what is there makes room.

    Raises:
        OSError: it cannot be written, or the folder that its own lies in is gone; nothing is left behind.
    """
    partial = _beside(path, f"{PARTIAL}{path.name}-")
    path.parent.mkdir(exist_ok=True)  # no more: where a store was unmounted, another disk would be written to
    partial.mkdir()
    try:
        with _as_os_error(partial):
            yield partial
        for written in (*partial.iterdir(), partial):
            _flush(written)
        if os.path.lexists(path):
            remove_folder(path)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(path.parent)


def remove_folder(path: Path) -> None:
    """Rename a folder out of the way, then delete it: a kill in between leaves no half of it under its name."""
    doomed = _beside(path, f"{DELETED}{path.name}-")
    os.replace(path, doomed)
    _delete(doomed)


def remove_partial_files(folder: Path) -> None:
    """Delete what kills have left of files and folders that were being written or deleted here.

    Nobody may be writing here now.
    """
    for left in (*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{DELETED}*")):
        _delete(left)


def _beside(path: Path, prefix: str, suffix: str = "") -> Path:
    """A path in the same folder that nobody can foresee."""
    return path.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}")


def _delete(path: Path) -> None:
    """Delete a folder with all in it, or a file, or a link but not where it leads."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """A full disk is an OSError that names the file to be written, also where safetensors finds it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
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
