"""Read rows of JSON files and of data sets; every failure is one message for the user."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
from pyarrow import parquet

from tokenv.core import trust
from tokenv.core.errors import UserError
from tokenv.data.packed import DAMAGED, open_unpacked

# its logs of a broken file are in our message
datasets.logging.set_verbosity(datasets.logging.CRITICAL)
Row = Mapping[str, Any]
HUB_ADVICE = "expected a connection, and a data set of this name, configuration and split"


def iterate_rows(
    open_rows: Callable[[], Iterable[Row]], failure: str, advice: str
) -> Iterator[Row]:
    """Yield the rows of a source.

    Args:
        open_rows: function which opens the source.
        failure: description of a failure, for the message.
        advice: remedy, for the message.

    Raises:
        UserError: the source cannot be opened, or read to its end.
    """
    try:
        yield from open_rows()
    except UserError:
        raise
    except Exception as error:  # of many packages, whose errors do not name the source
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{failure}: {reason}: {advice}") from error


def open_hub(name: str, hub_config: str | None, split: str) -> datasets.IterableDataset:
    """Open a data set of the Hugging Face hub, or a local folder with the same layout, for streaming.

    Its README may name data files anywhere, even on this machine: the user must allow those outside of the data set.

    Args:
        name: ``owner/name``, or the path of a folder.
        hub_config: configuration of the data set; None for its default.
        split: split of the data set, such as ``train``.

    Raises:
        UserError: it names a file outside of the hub, or of the folder, which the user has not allowed.
    """
    builder = datasets.load_dataset_builder(name, hub_config)
    is_folder = os.path.isdir(name)
    folder = os.path.join(trust.local_path(name), "")
    for file in chain.from_iterable((builder.config.data_files or {}).values()):
        path = os.path.abspath(file)
        inside = file.startswith("hf://")
        if is_folder:
            inside = "://" not in file and path.startswith(folder)
        if not inside and not trust.is_named(path):
            raise UserError(
                f"hub data set {name!r} names {file}, which is no file of its own and would be read: if it is meant "
                f"to be, add trust_code={file} (trust_code=True for all that it names)"
            )
    return builder.as_streaming_dataset(split=split)


def parquet_rows(path: Path, advice: str) -> Iterator[Row]:
    """Read the rows of a parquet file, a thousand at a time.

    Raises:
        UserError: the file is broken.
    """
    return iterate_rows(lambda: _parquet_rows(path), f"{path} cannot be read as parquet", advice)


def _parquet_rows(path: Path) -> Iterator[Row]:
    with parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise UserError(f"{path} has a column twice: {', '.join(names)}: rename one")
        for batch in file.iter_batches(1000):
            yield from batch.to_pylist()


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a file: one per line, or a list of all.

    Args:
        path: .json or .jsonl file, with .gz, .xz or .zst added if it is compressed.

    Raises:
        UserError: a line is no object, or the file is damaged or truncated; the message names the line.
    """
    number = 0
    try:
        with open_unpacked(path) as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.lstrip().startswith(b"["):
                    whole = line + file.read()
                    yield from (_object(row, path, number) for row in json.loads(whole))
                elif line.strip():
                    yield _object(json.loads(line), path, number)
    except UserError:
        raise
    except (RecursionError, ValueError, *DAMAGED) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = str(error)
        if isinstance(error, RecursionError):
            reason = "it is nested too deeply"
        raise UserError(
            f"{path} cannot be read as json: line {number or 1}: {reason}: repair it or leave it out"
        ) from error


def _object(row: Any, path: Path, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        shown = str(row)[:80]
        raise UserError(
            f'{path} line {number} holds {shown!r}; expected an object such as {{"text": "..."}}'
        )
    return row
