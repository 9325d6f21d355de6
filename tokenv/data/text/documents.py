"""Read documents from the built-in corpora and local files, and write documents that a program gives."""

from __future__ import annotations

import difflib
import glob
import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from datasets import logging as datasets_logging
from datasets.io.parquet import ParquetDatasetReader

from tokenv.core.errors import MissingFileError, UserError
from tokenv.data.chunks import Document
from tokenv.data.config import BUILT_IN, HUB_PREFIX, DataConfig
from tokenv.data.rows import iterate_rows, json_rows
from tokenv.data.text.builtin import prose_documents, python_documents
from tokenv.data.text.synthetic_language import words_documents
from tokenv.storage.atomic import PARTIAL

datasets_logging.set_verbosity(datasets_logging.CRITICAL)  # what it logs of a broken file is in our message
TEXT_SUFFIXES = (".txt", ".py", ".md", ".rst")
JSON_SUFFIXES = tuple(kind + packed for kind in (".jsonl", ".json") for packed in ("", ".gz", ".xz", ".zst"))
PARQUET_SUFFIXES = (".parquet",)
ACCEPTED = (
    f"one of {', '.join(BUILT_IN)}; a file or folder of {' '.join(TEXT_SUFFIXES)}, "
    f".jsonl or .json (also .gz .xz .zst) or .parquet; or {HUB_PREFIX}owner/name"
)


def read_documents(source: str, config: DataConfig) -> Iterator[Document]:
    """Read the documents of a built-in corpus or of a local file or folder.

    A folder is read with all below it: its text files, one document each, or, where it has no text file
    but perhaps a README, its .parquet files (else its .jsonl and .json files), one document a row.

    Args:
        source: A built-in name or a path.
        config: Names the text column and sizes the synthetic language.

    Yields:
        The documents in a fixed order.

    Raises:
        MissingFileError: If `source` is neither a built-in name nor a path that exists.
        UserError: If a file is of no known kind or broken, or its rows lack the text column.
    """
    if source == "python":
        yield from _from_rows(python_documents())
    elif source == "prose":
        yield from _from_rows(prose_documents())
    elif source == "words":
        yield from _from_rows(words_documents(config.lexicon_size, config.words_documents, config.seed))
    else:
        root = Path(source).expanduser()
        for path in (files := _find_files(source, root)):
            if not path.name.endswith(TEXT_SUFFIXES):
                yield from _read_table(path, config.column)
        texts = [path for path in files if path.name.endswith(TEXT_SUFFIXES)]
        for path in texts:
            yield Document(path.relative_to(root).as_posix() if path != root else path.name, path.read_bytes())


def content_of(row: Mapping[str, Any], column: str, where: str) -> bytes:
    """Return the bytes of a row's text; a missing value is an empty document.

    Args:
        row: One row of a data set.
        column: The text column.
        where: The row's data set, for the error.

    Raises:
        UserError: If the row lacks the column, or holds something other than str or bytes there.
    """
    if column not in row:
        raise UserError(f"{where} has no column {column!r} but {', '.join(row)}: set data.column to one")
    value = row[column]
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise UserError(
            f"column {column!r} of {where} holds {type(value).__name__}, expected text: "
            f"set data.column to a text column of {', '.join(row)}"
        )
    try:
        return value.encode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # a lone surrogate that stands for no byte
        return value.encode("utf-8", errors="replace")


def _from_rows(rows: Dataset) -> Iterator[Document]:
    for row in rows:
        yield Document(row["name"], row["content"], row.get("gold"))


def _find_files(source: str, root: Path) -> list[Path]:
    if root.is_file():
        if not root.name.endswith(TEXT_SUFFIXES + JSON_SUFFIXES + PARQUET_SUFFIXES):
            raise UserError(f"{root} is of no known kind; expected {ACCEPTED}: rename or convert it")
        return [root]
    if not root.is_dir():
        near = difflib.get_close_matches(source, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise MissingFileError(f"data source {source!r} does not exist; {hint}expected {ACCEPTED}")
    files = sorted(path for path in root.rglob("*") if path.is_file())
    texts = [path for path in files if path.name.endswith(TEXT_SUFFIXES)]
    parquet = [path for path in files if path.name.endswith(PARQUET_SUFFIXES)]
    tables = parquet or [path for path in files if path.name.endswith(JSON_SUFFIXES)]
    # Published data sets carry a README, and often their description as .json, beside their tables.
    chosen = tables if tables and all(path.stem.upper() == "README" for path in texts) else texts
    if not chosen:
        raise UserError(f"folder {root} holds no file to read; expected {ACCEPTED}: point to another folder")
    return chosen


def _read_table(path: Path, column: str) -> Iterator[Document]:
    for number, row in enumerate(_table_rows(path)):
        yield Document(f"{path.name} row {number}", content_of(row, column, f"{path}, row {number},"))


def _table_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if not path.name.endswith(PARQUET_SUFFIXES):
        yield from json_rows(path)
        return
    # Streaming leaves no converted copy in a cache. load_dataset would report its use over the network.
    reader = partial(ParquetDatasetReader, glob.escape(str(path)), split="train", streaming=True)
    yield from iterate_rows(lambda: reader().read(), f"{path} cannot be read as parquet", "repair it or leave it out")


COLUMN, AT_A_TIME = "text", 1000


def write_documents(texts: Iterable[Any], folder: Path, *, column: str = COLUMN) -> Path:
    """Write documents as parquet; the same ones always under the same name.

    Args:
        texts: str or bytes, or rows of a data set such as ``datasets.Dataset``.
        folder: made where it is missing.
        column: of rows, the one with the text.

    Returns:
        The file, whose column is ``text``.

    Raises:
        UserError: there are no documents, or one is no text.
    """
    if isinstance(texts, str | bytes):
        raise UserError(f"texts = {texts[:40]!r}: expected several documents, such as a list of them")
    folder.mkdir(parents=True, exist_ok=True)
    digest, count = hashlib.blake2b(digest_size=16), 0
    schema = pa.schema([(COLUMN, pa.large_binary())])
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as scratch:
        written = Path(scratch) / "texts.parquet"
        with pq.ParquetWriter(written, schema) as writer:
            some: list[bytes] = []
            for count, given in enumerate(texts, start=1):
                row = given if isinstance(given, Mapping) else {column: given}
                some.append(content_of(row, column, f"texts[{count - 1}]"))
                digest.update(len(some[-1]).to_bytes(8, "big") + some[-1])
                if len(some) == AT_A_TIME:
                    writer.write_table(pa.table({COLUMN: some}, schema))
                    some = []
            writer.write_table(pa.table({COLUMN: some}, schema))
        if not count:
            raise UserError("texts is empty: expected documents to train on")
        return written.replace(folder / f"texts-{digest.hexdigest()}.parquet")
