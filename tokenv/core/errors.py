"""What is the user's fault: shown as one message, while all other errors keep their traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

REPORT = "tokenv: this is a mistake in tokenv, or in a module that the command names: please report all of the above"


class UserError(ValueError):
    """A value, name or file of the user's that cannot be taken; the message names it and says how to mend it."""


class MissingFileError(UserError, FileNotFoundError):
    """The user names a file or folder that is not there."""


class RunFailedError(RuntimeError):
    """Work that came to nothing for a reason that can be foreseen, such as a loss that is no number; shown as told."""


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the nearest known one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
