"""Read files which may be compressed; a truncated end is an error, whatever the compression."""

import gzip
import lzma
import zlib
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import pyarrow

from tokenv.core.errors import UserError

BUFFER_BYTES = 2**20
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".zst": partial(pyarrow.input_stream, compression="zstd"),
}
PACKED = tuple(OPENERS)


def read_unpacked(path: Path) -> bytes:
    """Return the contents of a file, decompressed if its name ends with one of ``PACKED``.

    Raises:
        OSError: the file cannot be opened.
        UserError: it is damaged or truncated.
    """
    if path.suffix not in PACKED:
        return path.read_bytes()
    try:
        with open_unpacked(path) as file:
            return file.read()
    except DAMAGED as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise UserError(
            f"{path} cannot be decompressed: {error}: repair it or leave it out"
        ) from error


def open_unpacked(path: Path) -> BufferedReader:
    """Open a file for reading, decompressed if its name ends with one of ``PACKED``.

    Reading a file which is damaged raises one of ``DAMAGED``.
    """
    return BufferedReader(OPENERS.get(path.suffix, partial(open, mode="rb"))(path), BUFFER_BYTES)
