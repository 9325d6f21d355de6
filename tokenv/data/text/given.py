"""Documents that a program gives, kept as a file that runs can read, now and when they go on."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenv.data.text.documents import content_of
from tokenv.errors import UserError
from tokenv.storage.atomic import PARTIAL

COLUMN, AT_A_TIME = "text", 1000


def keep_documents(texts: Iterable[Any], folder: Path, *, column: str = COLUMN) -> Path:
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
