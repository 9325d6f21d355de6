"""Files which commands write: checked before their work, and written as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tokenv.core.errors import UserError


def check_output(key: str, path: str | None, *suffixes: str) -> None:
    """Check that a file can be written, before hours of work.

    Args:
        key: key which names the file.
        path: value of the key; None for no file.
        suffixes: endings of the files which are written, where ``path`` is only the beginning of their names.

    Raises:
        UserError: it is a folder or a device, or its folder does not exist.
    """
    for suffix in suffixes or ("",) if path is not None else ():
        target = Path(f"{path}{suffix}")
        if not Path(str(path)).name or (target.exists() and not target.is_file()):
            raise UserError(f"{key} = {path!r}: expected the name of a file to write, such as {key}=result")
        if not target.parent.is_dir():
            raise UserError(f"{key} = {path!r}: there is no folder {target.parent}: make it, or name another file")


def write_json_output(path: str | None, values: Any) -> None:
    """Write dictionaries, lists, arrays, numbers and texts as JSON, NaN and infinite numbers as null.

    Args:
        path: file to write; None for none.
        values: what is written.
    """
    if path is not None:
        from tokenv.plotting.console import console  # rich and numpy, which options do not need
        from tokenv.storage.atomic import write_atomically

        write_atomically(Path(path), json.dumps(_to_json(values), allow_nan=False))
        console().print(f"json: {path}")


def _to_json(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(key): _to_json(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_to_json(value) for value in values]
    if hasattr(values, "tolist"):  # of numpy
        return _to_json(values.tolist())
    return None if isinstance(values, float) and not math.isfinite(values) else values
