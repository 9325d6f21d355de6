"""Rows of JSON files, packed or not, and whatever may be wrong with them."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from tokenv.errors import UserError

CHUNK = 2**20
DAMAGED = (zlib.error, lzma.LZMAError, zstandard.ZstdError)
OPENERS: dict[str, Callable[[Path], IO[bytes]]] = {".gz": gzip.open, ".xz": lzma.open}  # type: ignore[dict-item]


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a file: one a line, or one list of all.

    Args:
        path: .json or .jsonl, and .gz, .xz or .zst where it is packed.

    Raises:
        UserError: a line is no object, or the file is damaged or cut off; the message names the line.
    """
    number = 0
    try:
        for number, line in enumerate(_lines(_chunks(path)), 1):
            whole = number == 1 and line.lstrip().startswith(b"[")
            rows = json.loads(b"".join(_chunks(path))) if whole else [json.loads(line)] if line.strip() else []
            for row in rows:
                if not isinstance(row, dict):
                    raise UserError(
                        f'{path} line {number} holds {str(row)[:80]!r}; expected an object such as {{"text": "..."}}'
                    )
                yield row
            if whole:
                return
    except UserError:
        raise
    except (EOFError, RecursionError, ValueError, OSError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        what = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(
            f"{path} cannot be read as json: line {number or 1}: {what}: repair it or leave it out"
        ) from error


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    yield rest


def _chunks(path: Path) -> Iterator[bytes]:
    with OPENERS.get(path.suffix, Path.open)(path, "rb") as file:  # type: ignore[call-arg]
        chunks = iter(lambda: file.read(CHUNK), b"")
        yield from _unpacked(chunks) if path.suffix == ".zst" else chunks


def _unpacked(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Zstandard frames, one after the other; unlike the library's own reader, this one sees where the last is cut."""
    frame = None
    for packed in chunks:
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(packed)
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends before its last frame does")
