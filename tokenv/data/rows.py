"""Read rows of JSON files and of data sets; whatever is wrong is one message."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import datasets
import zstandard

from tokenv.core.errors import UserError
from tokenv.storage import trust

Row = Mapping[str, Any]
HUB_ADVICE = "expected a connection, and a data set of this name, configuration and split"


def iterate_rows(opened: Callable[[], Iterable[Row]], failed: str, advice: str) -> Iterator[Row]:
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
    except UserError:
        raise
    except Exception as error:  # of many packages, none of which knows the user's words
        why = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{failed}: {why}: {advice}") from error


def open_hub(name: str, hub_config: str | None, split: str) -> datasets.IterableDataset:
    """Open a data set of the Hugging Face hub, or a local folder that is laid out as one, for streaming.

    Its README may name data files anywhere, on this machine too: those outside of the data set need the user's word.

    Args:
        name: ``owner/name``, or the path of a folder.
        hub_config: the data set's configuration; None for its default.
        split: such as ``train``.

    Raises:
        UserError: it names a file outside of the hub, or of the folder, that the user has not named.
    """
    builder = datasets.load_dataset_builder(name, hub_config)
    folder = os.path.join(trust.local_path(name), "") if os.path.isdir(name) else None
    for file in (file for files in (builder.config.data_files or {}).values() for file in files):
        path = os.path.abspath(file)
        inside = file.startswith("hf://") if folder is None else "://" not in file and path.startswith(folder)
        if not inside and not trust.is_allowed(path):
            raise UserError(
                f"hub data set {name!r} names {file}, which is no file of its own and would be read: if it is meant "
                f"to be, add trust_code={file} (trust_code=True for all that it names)"
            )
    return builder.as_streaming_dataset(split=split)


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
