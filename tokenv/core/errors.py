"""Errors of users: the command line shows their message alone, and all other errors with their traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

REPORT = "tokenv: this is a mistake in tokenv, or in a module that the command names: please report all of the above"


class UserError(ValueError):
    """Invalid value, name or file given by the user; the message names it and says how to correct it."""


class MissingFileError(UserError, FileNotFoundError):
    """File or folder named by the user which does not exist."""


class RunFailedError(RuntimeError):
    """Run which failed for a foreseeable reason, such as a loss that is not finite; shown without traceback."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a mistyped name: the nearest known name, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
