"""Rows from readers that raise errors of their own: whatever is wrong is one message."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import datasets

from tokenv.errors import UserError
from tokenv.storage import trust

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
                f"to be, add trust={file} (trust=True for all that it names)"
            )
    return builder.as_streaming_dataset(split=split)
