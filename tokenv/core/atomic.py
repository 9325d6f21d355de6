"""Write files and folders atomically: they are complete or do not exist."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from tokenv.core.errors import UserError

PARTIAL = ".partial-"
DELETED = ".deleted-"


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yield another path to write a file to, and rename it at the end: a kill at any moment leaves the old file.

    If two processes write the same file, the last one wins. A link is replaced, never followed: the new file has a
    random name and is created only if nothing of this name exists.

    Raises:
        OSError: the file cannot be written, or its path is a folder; no partial file remains.
    """
    if not path.name or (path.is_dir() and not path.is_symlink()):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    scratch = _random_sibling(path, PARTIAL, path.suffix)
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
        path: path in an existing folder; an existing file is replaced.
        content: content of the file; text is written as UTF-8.

    Raises:
        OSError: the file cannot be written; no partial file remains.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing_file(path) as scratch:
        scratch.write_bytes(data)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to write files to, and rename it when they are on the disk; it replaces an existing one.

    Raises:
        OSError: it cannot be written, or its grandparent folder is missing; no partial folder remains.
    """
    partial = _random_sibling(path, f"{PARTIAL}{path.name}-")
    # not its parents: where a store was unmounted, another disk would be written to
    path.parent.mkdir(exist_ok=True)
    partial.mkdir()
    try:
        with _as_os_error(partial):
            yield partial
        for path_to_flush in (*partial.iterdir(), partial):
            _flush(path_to_flush)
        if os.path.lexists(path):
            remove_folder(path)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(path.parent)


def remove_folder(path: Path) -> None:
    """Rename a folder, then delete it: a kill in between leaves no incomplete folder under its name."""
    renamed = _random_sibling(path, f"{DELETED}{path.name}-")
    os.replace(path, renamed)
    _delete(renamed)


def remove_partial_files(folder: Path) -> None:
    """Delete the files and folders which killed processes were writing or deleting in a folder.

    No process may be writing to the folder.
    """
    for path in (*folder.glob(f"{PARTIAL}*"), *folder.glob(f"{DELETED}*")):
        _delete(path)


def _random_sibling(path: Path, prefix: str, suffix: str = "") -> Path:
    """Return an unpredictable path in the same folder."""
    return path.with_name(f"{prefix}{secrets.token_hex(8)}{suffix}")


def _delete(path: Path) -> None:
    """Delete a folder with its contents, a file, or a link but not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Raise an OSError which names the file when the disk is full, also for errors of safetensors."""
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


def check_encoding(path: str | Path) -> None:
    """Raise an error for a path which is not UTF-8, which safetensors cannot open.

    Raises:
        UserError: a folder in the path, or its last name, is not UTF-8.
    """
    absolute = os.path.abspath(path)
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{absolute}: expected a path in UTF-8, because parameters cannot be stored under any other: rename it, or "
            "name another"
        ) from None


def output(*suffixes: str) -> dict[str, Any]:
    """Return the metadata of a field which names a file to write, which is checked before hours of work.

    Args:
        suffixes: endings of the files which are written, where the field has only the beginning of their names.
    """

    def check(key: str, path: str | None) -> None:
        for suffix in suffixes or ("",) if path is not None else ():
            target = Path(f"{path}{suffix}")
            if not Path(str(path)).name or (target.exists() and not target.is_file()):
                raise UserError(
                    f"{key} = {path!r}: expected the name of a file to write, such as {key}=result"
                )
            if not target.parent.is_dir():
                raise UserError(
                    f"{key} = {path!r}: there is no folder {target.parent}: make it, or name another file"
                )

    return {"check": check}
