"""Whose code may run and whose files may be read: what a stored run names needs the user's word.

A run folder may come from anybody. Building what its configuration names (``module:attribute``) imports a module and
calls what is in it, and its data section may name any file that the user can read. The user's own command line and YAML
files are his word already; whatever is read of a stored run is held against it. Local data that the user has named once
is remembered (``remembered``), so that his own runs can be measured later.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from tokenv.core.errors import UserError
from tokenv.storage.regular_files import open_regular

Word: TypeAlias = bool | str | Sequence[str]
_ALL, _NAME = "*", re.compile(r"\s*[\w.]+:\w+\s*")
_allowed: set[str] = set()  # of this process: what its user has named himself, names of code and absolute paths
_foreign: dict[str, str] = {}  # data sources that stored runs name and their user has not: to the run that names it


def allow(word: Word) -> None:
    """Let stored runs name code and local data, from now on and in this process.

    Args:
        word: what ``trust_code=...`` says: a name such as ``mytrick:mine`` or the path of a file or folder that begins
            with ``/`` or ``~``, several (a list, or with commas between), or True for all.

    Raises:
        UserError: it is neither.
    """
    names = word == "True" or word.split(",") if isinstance(word, str) else word
    if isinstance(names, bool):
        _allowed.update({_ALL} if names else ())
        return
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and (_NAME.fullmatch(name) or _is_path(name)) for name in names
    ):
        raise UserError(
            f"trust_code = {word!r}: expected the name that is to be trusted, such as mytrick:mine, the path of a "
            f"file such "
            "as /data/book.txt, or True"
        )
    _allowed.update(_absolute(name) if _is_path(name) else name.strip() for name in names)


def _is_path(name: str) -> bool:
    return name.strip().startswith(("/", "~")) or Path(name).is_absolute()


@contextmanager
def allowing(word: Word) -> Iterator[None]:
    """As ``allow``, for what happens inside; afterwards what was allowed before."""
    before = set(_allowed)
    try:
        allow(word)
        yield
    finally:
        _allowed.intersection_update(before)


def allow_named(values: Mapping[str, Any]) -> None:
    """Let stored runs name what these values of the user's own name: he asks for this code and this data anyway."""
    _allowed.update(_names(values))
    paths = {path for source in _sources(values) if os.path.exists(path := local_path(source))}
    _allowed.update(paths)
    _remember(paths - remembered())


def check(values: Mapping[str, Any], whence: str | Path) -> None:
    """Refuse code that the user has not named, and mark local data that he has not: see ``check_source``.

    Args:
        values: a stored configuration, or a part of it.
        whence: where it is stored, for the message.

    Raises:
        UserError: it names code; the message says how to allow it.
    """
    for name in _names(values):
        check_name(name, whence)
    for source in _sources(values):
        if is_allowed(local_path(source)):
            _foreign.pop(source, None)
        else:
            _foreign[source] = str(whence)


def check_source(source: str) -> None:
    """Refuse to read local data that a stored run names, unless the user has named it, now or in an earlier command.

    Args:
        source: as a configuration names it: a path, or ``hub:`` and one.

    Raises:
        UserError: it is a file or folder that only the run names; the message says how to allow it.
    """
    path = local_path(source)
    if source in _foreign and os.path.exists(path) and not is_allowed(path):
        raise UserError(
            f"{_foreign[source]} names {path}, which would be read as its data: if it is meant to be, add "
            f"trust_code={path} "
            "(trust_code=True for all that the run names)"
        )


def is_allowed(path: str) -> bool:
    """Whether the user has named this absolute path, now or in an earlier command."""
    return not _allowed.isdisjoint((_ALL, path)) or path in remembered()


def local_path(source: str) -> str:
    """The absolute path that a data source stands for, if it is one of a file or folder."""
    return _absolute(source.removeprefix("hub:"))


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path.strip()))


def remembered() -> set[str]:
    """Absolute paths of the local data that this user has named on this machine."""
    try:
        with open_regular(_memory()) as file:
            return {path for line in file if isinstance(path := json.loads(line), str)}
    except (OSError, ValueError, RuntimeError):  # none yet, damaged, or a user without a home
        return set()


def _remember(paths: set[str]) -> None:
    lines = "".join(json.dumps(path) + "\n" for path in sorted(paths))
    with suppress(OSError, RuntimeError):  # then the user has to name it again
        if lines:
            _memory().parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(_memory(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(lines)


def _memory() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tokenv" / "data-sources.jsonl"


def check_name(name: str, whence: str | Path) -> None:
    """Refuse one name that is stored, unless it is a registered one or the user has named it; see ``check``."""
    if ":" in name and _allowed.isdisjoint((_ALL, name)):
        raise UserError(
            f"{whence} names code, {name!r}, that would be imported and run: if you know what it is and trust it, "
            f"add trust_code={name} (trust_code=True for all that the run names)"
        )


def granted() -> bool | list[str]:
    """The user's word, as ``allow`` takes it, for a process that goes on with his work."""
    return True if _ALL in _allowed else sorted(_allowed)


def as_cli_args() -> list[str]:
    """The same for that process's command line."""
    return [f"trust_code={granted()!r}"] if _allowed else []


def _sources(values: Mapping[str, Any]) -> list[str]:
    """Data sources of a configuration, whether or not they are files."""
    data = values.get("data")
    named = [data.get(key) for key in ("source", "validation_source")] if isinstance(data, Mapping) else []
    return [source for source in named if isinstance(source, str) and source and "\0" not in source]


def _names(values: Mapping[str, Any]) -> Iterator[str]:
    """Names of code at any depth, without recursion: what is stored may be nested as deep as its writer likes."""
    left: list[Any] = [values]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            name = value.get("name")
            if isinstance(name, str) and ":" in name:
                yield name
            left.extend(value.values())
        elif isinstance(value, list | tuple):
            left.extend(value)
