"""Exceptions which users see, spelling suggestions, and declared bounds of options."""

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from numbers import Integral
from typing import Any

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
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"


def bounds(expected: str, accepts: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the metadata of a field with a range.

    Args:
        expected: range in words, which continue "expected".
        accepts: function which says whether the range contains a value.
    """
    return {"expected": expected, "accepts": accepts}


def at_least(low: int, *, optional: bool = False) -> dict[str, Any]:
    """Return the metadata of a field which is a whole number of at least ``low``, or None if ``optional``."""

    def accepts(value: Any) -> bool:
        if value is None:
            return optional
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low

    return bounds(f"a whole number of at least {low}" + ", or null" * optional, accepts)


def choice(*values: str) -> dict[str, Any]:
    """Return the metadata of a field which is one of these values."""
    words = ", ".join(values[:-1]) + " or " + values[-1]
    return bounds(words, lambda value: value in values)


COUNT = at_least(1)
COUNT_OR_NULL = at_least(1, optional=True)
POSITIVE = bounds("a positive number", lambda value: value > 0)
POSITIVE_OR_NULL = bounds("a positive number, or null", lambda value: value is None or value > 0)
NOT_NEGATIVE = bounds("0 or more", lambda value: value >= 0)
NOT_NEGATIVE_OR_NULL = bounds("0 or more, or null", lambda value: value is None or value >= 0)
DECAY = bounds("a number in [0, 1), such as 0.9", lambda value: 0 <= value < 1)
FRACTION = bounds("0 to 1", lambda value: 0 <= value <= 1)
SHARE = bounds("a number in (0, 1]", lambda value: 0 < value <= 1)
# numpy's range
SEED = bounds("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32)


def check_bounds(options: Any, prefix: str = "") -> None:
    """Check all fields of a dataclass which declare a range, or a ``check`` of their key and value.

    Args:
        options: instance of the dataclass.
        prefix: prefix of its keys in messages, such as ``train.``.

    Raises:
        UserError: a value is out of range.
    """
    for item in fields(options):
        if "accepts" in item.metadata:
            check_value(f"{prefix}{item.name}", getattr(options, item.name), item.metadata)
        if "check" in item.metadata:
            item.metadata["check"](f"{prefix}{item.name}", getattr(options, item.name))


def check_value(key: str, value: Any, metadata: Mapping[Any, Any]) -> None:
    """Check one value.

    Args:
        key: its name in the message.
        value: the value.
        metadata: metadata of a field with a range; see ``bounds``.

    Raises:
        UserError: it is out of range.
    """
    if not metadata["accepts"](value):
        raise UserError(f"{key} = {value!r}: expected {metadata['expected']}")
