"""Read files which may be compressed; unlike the libraries' own readers, notice every truncated end."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import zstandard

from tokenv.core.errors import UserError

CHUNK_BYTES = 2**20
DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open}  # type: ignore[dict-item]
PACKED = (".gz", ".xz", ".zst")


def read_unpacked(path: Path) -> bytes:
    """Return the contents of a file, decompressed if its name ends with one of ``PACKED``.

    Raises:
        OSError: the file cannot be opened.
        UserError: it is damaged or truncated.
    """
    if path.suffix not in PACKED:
        return path.read_bytes()
    try:
        return b"".join(unpacked_chunks(path))
    except DAMAGED as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise UserError(
            f"{path} cannot be decompressed: {error}: repair it or leave it out"
        ) from error


def unpacked_chunks(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file, decompressed if its name ends with one of ``PACKED``.

    Raises:
        Exception: one of ``DAMAGED``.
    """
    with OPENERS.get(path.suffix, Path.open)(path, "rb") as file:  # type: ignore[call-arg]
        chunks = iter(lambda: file.read(CHUNK_BYTES), b"")
        if path.suffix == ".zst":
            chunks = _decompress(chunks)
        yield from chunks


def _decompress(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Decompress successive Zstandard frames."""
    frame = None
    for packed in chunks:
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed = frame.unused_data  # nothing before the frame's end
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the file ends before its last frame does")
