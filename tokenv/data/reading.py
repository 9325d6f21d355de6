"""Rows from readers that raise errors of their own: whatever is wrong is one message."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tokenv.errors import UserError

Row = Mapping[str, Any]
HUB_ADVICE = "expected a connection, and a data set of this name, configuration and split"


def rows_of(opened: Callable[[], Iterable[Row]], failed: str, advice: str) -> Iterator[Row]:
    """The rows of a source, one by one.

    Args:
        opened: opens it.
        failed: what it means if that fails, for the message.
        advice: what may help.

    Raises:
        UserError: it cannot be opened, or read to its end.
    """
    try:
        yield from opened()
    except Exception as error:  # of many packages, none of which knows the user's words
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{failed}: {why}: {advice}") from error
