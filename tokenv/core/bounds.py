"""Declared ranges of dataclass fields, from which both the error message and the command line's help come.

::

    batch_size: int = field(default=32, metadata=bounds("a whole number of at least 1", lambda value: value >= 1))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from tokenv.core.errors import UserError


def bounds(expected: str, accepts: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the metadata of a field with a range.

    Args:
        expected: range in words, which continue "expected".
        accepts: function which says whether the range contains a value.
    """
    return {"expected": expected, "accepts": accepts}


COUNT = bounds("a whole number of at least 1", lambda value: value >= 1)
POSITIVE = bounds("a positive number", lambda value: value > 0)
POSITIVE_OR_NULL = bounds("a positive number, or null", lambda value: value is None or value > 0)
NOT_NEGATIVE = bounds("0 or more", lambda value: value >= 0)
FRACTION = bounds("0 to 1", lambda value: 0 <= value <= 1)
SEED = bounds("a whole number from 0 to 4294967295", lambda value: 0 <= value < 2**32)  # numpy's range


def check_bounds(options: Any, prefix: str = "") -> None:
    """Check all fields of a dataclass which declare a range.

    Args:
        options: instance of the dataclass.
        prefix: prefix of its keys in messages, such as ``train.``.

    Raises:
        UserError: a value is out of range.
    """
    for item in fields(options):
        value = getattr(options, item.name)
        if "accepts" in item.metadata and not item.metadata["accepts"](value):
            raise UserError(f"{prefix}{item.name} = {value!r}: expected {item.metadata['expected']}")
