"""Store compiled functions on disk, so that no damaged, full or foreign folder stops or misleads a program.

numba's own cache is pickle: whoever can write its files runs code in the program that reads them.
"""

import hashlib
import io
import os
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

Function = TypeVar("Function", bound=Callable[..., Any])
DIGEST_SIZE = hashlib.sha256().digest_size
COMPILED_ANEW = "the decoder is compiled anew, which takes some seconds"


def compiled(function: Function, **options: Any) -> Function:
    """Compile a function when it is first called, with ``options`` of ``numba.njit``, and store the result.

    Nothing is stored if no folder for it can be written, or if others may write it, of which a warning tells.
    """
    dispatcher: Any = numba.njit(**options)(function)
    try:
        cache = _KernelCache(function)
    except (RuntimeError, OSError):  # no folder can be written
        return dispatcher
    unsafe = unsafe_folder(Path(cache.cache_path))
    if unsafe is None:
        dispatcher._cache = cache
    else:
        _warn_once(
            f"{unsafe} can be written by others, who could plant code in {cache.cache_path}: {COMPILED_ANEW} by every "
            "process: take the right from them (chmod go-w), or set NUMBA_CACHE_DIR to a folder of your own"
        )
    return dispatcher


def unsafe_folder(folder: Path) -> Path | None:
    """Return the first of a folder and its parents in which others may replace files; None if there is none.

    Others are all but this user, root, the owner of this program, and a group of this user alone. Of a parent with the
    sticky bit, such as /tmp, they cannot take what is this user's.
    """
    if os.name == "nt":  # where folders of a user are closed to others, and have no such modes
        return None
    trusted = {0, os.getuid(), Path(__file__).stat().st_uid}
    real = folder.resolve()
    for each in (folder.absolute(), real, *folder.absolute().parents, *real.parents):
        status = each.stat()
        is_parent = each not in (folder.absolute(), real)
        if is_parent and status.st_mode & stat.S_ISVTX:
            continue
        if status.st_uid not in trusted or _others_may_write(status):
            return each
    return None


def _others_may_write(status: os.stat_result) -> bool:
    by_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _is_own_group(gid: int) -> bool:
    """Return whether a group has this user's name and no other member, as many systems create one for each user."""
    import grp
    import pwd

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
        group = grp.getgrgid(gid)
    except KeyError:  # without a name
        return False
    return group.gr_name == name and not {*group.gr_mem} - {name}


class _UnusableError(Exception):
    """A stored file is not what this user has written."""


class _DigestedFiles(IndexDataCacheFile):
    """Files of a cache which end with their SHA-256, since machine code with flipped bits would be run."""

    @contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        with super()._open_for_write(filepath) as file:
            content = io.BytesIO()
            yield content
            file.write(content.getvalue())
            file.write(hashlib.sha256(content.getvalue()).digest())

    def _load_index(self) -> Any:
        if Path(self._index_path).exists():
            _check_file(Path(self._index_path))
        return super()._load_index()

    def _load_data(self, name: str) -> Any:
        _check_file(Path(self._data_path(name)))
        return super()._load_data(name)


def _check_file(path: Path) -> None:
    if os.name != "nt" and _others_may_write(path.stat()):
        raise _UnusableError(f"{path.name} can be written by others")
    content = path.read_bytes()
    if hashlib.sha256(content[:-DIGEST_SIZE]).digest() != content[-DIGEST_SIZE:]:
        raise _UnusableError(f"{path.name} is damaged")


class _KernelCache(FunctionCache):
    """numba's cache, of which an error costs the time to compile, and nothing else."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # beside files which numba alone may have stored
        base = f"{self._impl.filename_base}.tokenv"
        self._cache_file = _DigestedFiles(
            self._cache_path,
            base,
            self._impl.locator.get_source_stamp(),
        )

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the stored code for a signature, or None to compile it."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling damaged data raises anything
            self._give_up(error)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store the code for a signature, if that is possible."""
        try:
            super().save_overload(sig, data)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Warn, and forget what is stored; if that fails, too, store nothing."""
        _warn_once(
            f"numba's code in {self.cache_path} cannot be used ({error or type(error).__name__}): {COMPILED_ANEW}"
        )
        try:
            self.flush()
        except OSError:
            self.disable()


_warned = False


def _warn_once(message: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(f"tokenv: {message}", stacklevel=2)
