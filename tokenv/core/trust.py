"""Read what others may have written: regular files of bounded size, and code and data which the user must allow.

A run folder may come from anybody. Building what its configuration names (``module:attribute``) imports a module and
calls its contents, and its data section may name any file which the user can read. The user's own command line and
YAML files are allowed; values read from a stored run are checked. Files in the folder in which the user works need no
further word, so that the user's own runs can be evaluated later.
"""

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeAlias

from tokenv.core.errors import UserError

MAX_JSON_BYTES = 2**28  # of a JSON file, which is read into memory
MAX_CONFIG_BYTES = 2**20  # of a configuration, all values of which are checked
FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}

PATH_OPTIONS = {  # of a configuration, by section
    (): ("init_from",),
    ("data",): ("source", "validation_source"),
    ("agent",): ("pretrained", "tokenizer"),
    ("imitation", "teacher"): ("pretrained", "tokenizer"),
}
Trust: TypeAlias = bool | str | Sequence[str]
# whose values may name code, at any depth of a configuration
CODE_KEYS = ("name", "kind", "density")
_ALL = "*"
_NAME = re.compile(r"\s*[\w.]+:\w+\s*")
# names of code and absolute paths which the user of this process has allowed
_allowed: set[str] = set()
# absolute paths which only stored runs name: to the run that names them
_untrusted: dict[str, str] = {}


class UntrustedCodeError(UserError):
    """Code which stored data name and the user does not; nothing of it has been imported."""


class UnreadableFileError(UserError):
    """File which cannot be what was written.

    Args:
        path: path of the file.
        reason: what is wrong with it, as it follows "is".
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path} is {reason}")


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; raise an error for a named pipe or a device without waiting for its data.

    Raises:
        OSError: the file cannot be opened.
        UnreadableFileError: it is no regular file.
    """
    # Windows lacks the first two
    flags = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    handle = os.open(path, os.O_RDONLY | sum(flags))
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise UnreadableFileError(
            path, f"{FILE_KINDS.get(kind, 'something else')}: expected a regular file"
        )
    return os.fdopen(handle, "rb")


def read_bytes(path: Path, *, limit: int) -> bytes:
    """Read a regular file.

    Raises:
        OSError: the file cannot be read.
        UnreadableFileError: it is no regular file, or larger than ``limit`` bytes.
    """
    with open_regular(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UnreadableFileError(path, f"damaged, larger than {limit:,} bytes")
    return content


def read_json(path: Path, *, limit: int | None = None) -> Any:
    """Read a JSON file of at most ``limit`` bytes; None for ``MAX_JSON_BYTES``.

    Raises:
        OSError: the file cannot be read.
        UnreadableFileError: it is no regular file, larger than the limit, or no JSON.
    """
    content = read_bytes(path, limit=limit or MAX_JSON_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(path, f"damaged, no JSON: {error}") from None


def allow(trust: Trust) -> None:
    """Allow stored runs to name code and local data, from now on and in this process.

    Args:
        trust: value of ``trust_code=...``: a name such as ``mytrick:mine`` or the path of a file or folder which
            begins with ``/`` or ``~``, several of them (a list, or separated by commas), or True for all.

    Raises:
        UserError: the value is neither.
    """
    if isinstance(trust, bool) or trust == "True":
        if trust:
            _allowed.add(_ALL)
        return
    names = trust
    if isinstance(trust, str):
        names = trust.split(",")
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and (_NAME.fullmatch(name) or _is_path(name)) for name in names
    ):
        raise UserError(
            f"trust_code = {trust!r}: expected the name that is to be trusted, such as mytrick:mine, the path of a "
            "file such as /data/book.txt, or True"
        )
    for name in names:
        if _is_path(name):
            _allowed.add(_absolute(name))
        else:
            _allowed.add(name.strip())


def _is_path(name: str) -> bool:
    return name.strip().startswith(("/", "~")) or Path(name).is_absolute()


@contextmanager
def allowing(trust: Trust) -> Iterator[None]:
    """Allow names as ``allow`` does, within the context only."""
    before = set(_allowed)
    try:
        allow(trust)
        yield
    finally:
        _allowed.intersection_update(before)


def allow_named(values: Mapping[str, Any]) -> None:
    """Allow stored runs to name the code and data which the user's own configuration names."""
    _allowed.update(code_names(values))
    named = {local_path(section[key]) for section, key in path_options(values)}
    _allowed.update(path for path in named if os.path.exists(path))


def check(values: Mapping[str, Any], origin: str | Path) -> None:
    """Raise an error for code which the user has not allowed, and mark paths: see ``check_path``.

    Args:
        values: stored configuration, or a section of it.
        origin: file or folder in which it is stored, for the message.

    Raises:
        UntrustedCodeError: it names code; the message says how to allow it.
    """
    for name in code_names(values):
        check_name(name, origin)
    for section, key in path_options(values):
        path = local_path(section[key])
        if is_named(path):
            _untrusted.pop(path, None)
        else:
            _untrusted[path] = str(origin)


def check_name(name: str, origin: str | Path) -> None:
    """Raise an error unless a stored name is a registered one or the user has allowed it; see ``check``."""
    if ":" in name and _allowed.isdisjoint((_ALL, name)):
        raise UntrustedCodeError(
            f"{origin} names code, {name!r}, that would be imported and run: if you know what it is and trust it, "
            f"add trust_code={name} (trust_code=True for all that the run names)"
        )


def check_path(source: str) -> None:
    """Raise an error for a path which only a stored run names, unless it leads into the current folder.

    If the current folder is the user's home or holds it, nothing in it is exempt.

    Args:
        source: path in a configuration, such as its data source; or ``hub:`` and a path.

    Raises:
        UserError: it is a file or folder elsewhere; the message says how to allow it.
    """
    path = local_path(source)
    if path not in _untrusted or is_named(path) or not os.path.exists(path):
        return
    here = {os.getcwd()}
    if not _leads_into(path, here) or _leads_into(os.path.expanduser("~"), here):
        raise UserError(
            f"{_untrusted[path]} names {path}, which would be read: if it is meant to be, add "
            f"trust_code={path} (trust_code=True for all that the run names)"
        )


def is_named(path: str) -> bool:
    """Return whether the user has named this absolute path, or a folder around it, in this process."""
    return not _allowed.isdisjoint((_ALL, path)) or _leads_into(path, _allowed)


def _leads_into(path: str, folders: set[str]) -> bool:
    """Return whether a path is one of some folders or in one, links followed: one in a run's folder may lead out."""
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(os.path.realpath(folder)) for folder in folders)


def local_path(source: str) -> str:
    """Return the absolute path of a data source, if it is a file or folder."""
    return _absolute(source.removeprefix("hub:"))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path.strip()))


def granted() -> bool | list[str]:
    """Return what the user has allowed, as ``allow`` takes it, for a child process."""
    return True if _ALL in _allowed else sorted(_allowed)


def path_options(values: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the section and the key of each option which names a path, or, as of data, may name one."""
    for place, keys in PATH_OPTIONS.items():
        section: Any = values
        for part in place:
            section = section.get(part) if isinstance(section, Mapping) else None
        for key in keys:
            path = section.get(key) if isinstance(section, Mapping) else None
            if isinstance(path, str) and path and "\0" not in path:
                yield section, key


def code_names(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield names of code at any depth, without recursion, because stored values may be nested arbitrarily deep."""
    pending: list[Any] = [values]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            named = (value.get(key) for key in CODE_KEYS)
            yield from (name for name in named if isinstance(name, str) and ":" in name)
            callbacks = value.get("callbacks")
            if isinstance(callbacks, list | tuple):
                yield from (each for each in callbacks if isinstance(each, str) and ":" in each)
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
