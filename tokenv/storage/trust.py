"""Whose code may run: names like ``module:attribute`` that a stored run brings along need the user's word.

A run folder may come from anybody, and building what its configuration names imports a module and calls what is in it.
The user's own command line and YAML files are his word already; whatever is read of a stored run is held against it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenv.errors import UserError

_ALL, _NAME = "*", re.compile(r"\s*[\w.]+:\w+\s*")
_allowed: set[str] = set()  # of this process: what its user has named himself


def allow(word: bool | str | Sequence[str]) -> None:
    """Let stored runs name code, from now on and in this process.

    Args:
        word: what ``trust=...`` says: one name, several (a list, or with commas between), or True for all.

    Raises:
        UserError: it is neither.
    """
    names = word == "True" or word.split(",") if isinstance(word, str) else word
    if isinstance(names, bool):
        _allowed.update({_ALL} if names else ())
        return
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) and _NAME.fullmatch(name) for name in names
    ):
        raise UserError(f"trust = {word!r}: expected the name that is to be trusted, such as mytrick:mine, or True")
    _allowed.update(str(name).strip() for name in names)


@contextmanager
def allowing(word: bool | str | Sequence[str]) -> Iterator[None]:
    """As ``allow``, for what happens inside; afterwards what was allowed before."""
    before = set(_allowed)
    try:
        allow(word)
        yield
    finally:
        _allowed.intersection_update(before)


def allow_named(values: Mapping[str, Any]) -> None:
    """Let stored runs name what these values of the user's own name: he asks for this code anyway."""
    _allowed.update(_names(values))


def check(values: Mapping[str, Any], whence: str | Path) -> None:
    """Refuse code that the user has not named.

    Args:
        values: a stored configuration, or a part of it.
        whence: where it is stored, for the message.

    Raises:
        UserError: it names code; the message says how to allow it.
    """
    for name in _names(values):
        check_name(name, whence)


def check_name(name: str, whence: str | Path) -> None:
    """Refuse one name that is stored, unless it is a registered one or the user has named it; see ``check``."""
    if ":" in name and _allowed.isdisjoint((_ALL, name)):
        raise UserError(
            f"{whence} names code, {name!r}, that would be imported and run: if you know what it is and trust it, "
            f"add trust={name} (trust=True for all that the run names)"
        )


def words() -> list[str]:
    """The user's word, for the command line of a process that goes on with his work."""
    named = ",".join(sorted(_allowed))
    return [f"trust={True if _ALL in _allowed else named}"] if named else []


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
