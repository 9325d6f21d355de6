"""Read documents from the built-in corpora and local files, and write a program's documents."""

import difflib
import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenv.core.atomic import PARTIAL
from tokenv.core.errors import MissingFileError, UserError
from tokenv.data.builtin import prose_documents, python_documents, synthetic_documents
from tokenv.data.chunks import Document
from tokenv.data.config import BUILT_IN, HUB_PREFIX, DataConfig
from tokenv.data.packed import PACKED, read_unpacked
from tokenv.data.rows import json_rows, parquet_rows

TEXTS = (".txt", ".py", ".md", ".rst")
TEXT_SUFFIXES = tuple(map("".join, product(TEXTS, ("", *PACKED))))
JSON_SUFFIXES = tuple(map("".join, product((".jsonl", ".json"), ("", *PACKED))))
PARQUET_SUFFIXES = (".parquet",)
COLUMN = "text"  # of files which are written
ROWS_PER_GROUP = 1000
ACCEPTED = (
    f"one of {', '.join(BUILT_IN)}; a file or folder of {' '.join(TEXTS)}, "
    f".jsonl or .json (also {' '.join(PACKED)}) or .parquet; or {HUB_PREFIX}owner/name"
)


def read_documents(source: str, config: DataConfig) -> Iterator[Document]:
    """Read the documents of a built-in corpus or of a local file or folder.

    A folder is read recursively: its text files, one document each, or, if it has no text file
    except a README, its .parquet files (else its .jsonl and .json files), one document per row.

    Args:
        source: name of a built-in corpus, or a path.
        config: text column and size of the synthetic language.

    Yields:
        The documents in a fixed order.

    Raises:
        MissingFileError: `source` is neither a built-in name nor a path that exists.
        UserError: a file is of no known kind or broken, or its rows lack the text column.
    """
    if source == "python":
        yield from python_documents()
    elif source == "prose":
        yield from prose_documents()
    elif source == "words":
        yield from synthetic_documents(config.lexicon_size, config.words_documents, config.seed)
    else:
        root = Path(source).expanduser()
        for path in _find_files(source, root):
            if path.name.endswith(TEXT_SUFFIXES):
                folder = root if root.is_dir() else root.parent
                yield Document(path.relative_to(folder).as_posix(), read_unpacked(path))
            else:
                yield from _read_table(path, config.column)


def content_of(row: Mapping[str, Any], column: str, origin: str) -> bytes:
    """Return the bytes of a row's text; a missing value is an empty document.

    Args:
        row: row of a data set.
        column: text column.
        origin: description of the row, for the message.

    Raises:
        UserError: the row lacks the column, or holds something other than str or bytes there.
    """
    if column not in row:
        raise UserError(
            f"{origin} has no column {column!r} but {', '.join(row)}: set data.column to one"
        )
    value = row[column]
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(
            f"column {column!r} of {origin} holds {type(value).__name__}, expected text: "
            f"set data.column to a text column of {', '.join(row)}"
        )
    try:
        return value.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return value.encode("utf-8", errors="replace")


def _find_files(source: str, root: Path) -> list[Path]:
    if root.is_file():
        if not root.name.endswith(TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES):
            raise UserError(
                f"{root} is of no known kind; expected {ACCEPTED}: rename or convert it"
            )
        return [root]
    if not root.is_dir():
        near = [
            f"did you mean {name!r}? " for name in difflib.get_close_matches(source, BUILT_IN, n=1)
        ]
        raise MissingFileError(
            f"data source {source!r} does not exist; {''.join(near)}expected {ACCEPTED}"
        )
    files = sorted(path for path in root.rglob("*") if path.is_file())
    texts = [path for path in files if path.name.endswith(TEXT_SUFFIXES)]
    parquet = [path for path in files if path.name.endswith(PARQUET_SUFFIXES)]
    tables = parquet or [path for path in files if path.name.endswith(JSON_SUFFIXES)]
    # Published data sets carry a README, and often their description as .json, beside their tables.
    described = all(path.name.upper().startswith("README.") for path in texts)
    chosen = tables if tables and described else texts
    if not chosen:
        raise UserError(
            f"folder {root} holds no file to read; expected {ACCEPTED}: point to another folder"
        )
    return chosen


def _read_table(path: Path, column: str) -> Iterator[Document]:
    if path.name.endswith(PARQUET_SUFFIXES):
        rows = parquet_rows(path, "repair it or leave it out")
    else:
        rows = json_rows(path)
    for number, row in enumerate(rows):
        yield Document(
            f"{path.name} row {number}", content_of(row, column, f"{path}, row {number},")
        )


def write_documents(texts: Iterable[Any], folder: Path, *, column: str = COLUMN) -> Path:
    """Write documents as a parquet file whose name depends on their contents.

    Args:
        texts: str or bytes, or rows of a data set such as ``datasets.Dataset``.
        folder: folder of the file, created if it is missing.
        column: text column of rows.

    Returns:
        The file, whose column is ``text``.

    Raises:
        UserError: there are no documents, or one is no text.
    """
    if isinstance(texts, str | bytes):
        raise UserError(
            f"texts = {texts[:40]!r}: expected several documents, such as a list of them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.blake2b(digest_size=16)
    count = 0
    schema = pa.schema([(COLUMN, pa.large_binary())])
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as scratch:
        written = Path(scratch) / "texts.parquet"
        with pq.ParquetWriter(written, schema) as writer:
            batch: list[bytes] = []
            for count, text in enumerate(texts, start=1):
                row: Mapping[str, Any] = {column: text}
                if isinstance(text, Mapping):
                    row = text
                batch.append(content_of(row, column, f"texts[{count - 1}]"))
                digest.update(len(batch[-1]).to_bytes(8, "big") + batch[-1])
                if len(batch) == ROWS_PER_GROUP:
                    writer.write_table(pa.table({COLUMN: batch}, schema))
                    batch = []
            writer.write_table(pa.table({COLUMN: batch}, schema))
        if not count:
            raise UserError("texts is empty: expected documents to train on")
        return written.replace(folder / f"texts-{digest.hexdigest()}.parquet")
