"""What a command found, as a JSON file beside what it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tokenv.plotting.console import console
from tokenv.storage.atomic import write_atomically


def write_json_output(path: str | None, values: Any) -> None:
    """Write dictionaries, lists, arrays, numbers and texts as JSON; NaN and infinite numbers as null; None: nothing."""
    if path is not None:
        write_atomically(Path(path), json.dumps(_plain(values), allow_nan=False))
        console().print(f"json: {path}")


def _plain(values: Any) -> Any:
    if isinstance(values, dict):
        return {str(key): _plain(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain(value) for value in values]
    if isinstance(values, np.ndarray | np.generic):
        return _plain(values.tolist())
    return None if isinstance(values, float) and not math.isfinite(values) else values
