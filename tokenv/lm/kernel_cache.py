"""Store compiled functions on disk, so that no damaged, full or foreign folder stops a program.

numba's own cache is pickle: whoever can write its files runs code in the program that reads them.
"""

import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])
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


class _KernelCache(FunctionCache):
    """numba's cache, of which an error costs the time to compile, and nothing else."""

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
