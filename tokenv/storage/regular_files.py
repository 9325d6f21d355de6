"""Reading files that others may have written: regular files only, and JSON of a bounded size."""

import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from tokenv.core.errors import UserError

MOST_BYTES = 2**28  # of a JSON file, which is read as a whole
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class UnreadableFileError(UserError):
    """A file that cannot be what was written.

    Args:
        path: of the file.
        reason: what is wrong with it, as it follows "is".
    """

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path} is {reason}")


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading; a named pipe or a device is refused without waiting for what it would send.

    Raises:
        OSError: the file cannot be opened.
        UnreadableFileError: it is no regular file.
    """
    flags = (getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))  # Windows lacks the first two
    handle = os.open(path, os.O_RDONLY | sum(flags))
    kind = stat.S_IFMT(os.fstat(handle).st_mode)
    if kind != stat.S_IFREG:
        os.close(handle)
        raise UnreadableFileError(path, f"{KINDS.get(kind, 'something else')}: expected a regular file")
    return os.fdopen(handle, "rb")


def check_regular(path: Path) -> None:
    """Refuse what is no regular file, for readers that open a path themselves; see ``open_regular``."""
    open_regular(path).close()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: the file cannot be read.
        UnreadableFileError: it is no regular file, larger than ``MOST_BYTES``, or no JSON.
    """
    with open_regular(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise UnreadableFileError(path, f"damaged, larger than {MOST_BYTES:,} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UnreadableFileError(path, f"damaged, no JSON: {error}") from None
