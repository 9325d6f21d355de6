"""``tokenv COMMAND --help``: every key with its meaning, its default and its range, then Sacred's flags.

Only light modules are imported here, so that help and completion answer at once.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator
from typing import Any

from tokenv.cli.commands import COMMANDS
from tokenv.cli.options import (
    EvaluateOptions,
    ForecastOptions,
    GenerateOptions,
    SegmentOptions,
    ServeOptions,
    TrainOptions,
)
from tokenv.compare.config import CompareOptions
from tokenv.config.field_docs import Key, keys_of
from tokenv.config.schema import Config
from tokenv.lab.config import BenchOptions, VarianceOptions

_RUN = {"run": "runs/1"}
# Each command which takes keys: dataclass of its options, and arguments which its checks accept.
SAMPLES: dict[str, tuple[type, dict[str, Any]]] = {
    "train": (TrainOptions, {"config": Config()}),
    "segment": (SegmentOptions, _RUN | {"text": "some text"}),
    "serve": (ServeOptions, _RUN),
    "evaluate": (EvaluateOptions, _RUN),
    "generate": (GenerateOptions, _RUN | {"text": "some text"}),
    "forecast": (ForecastOptions, _RUN),
    "compare": (CompareOptions, {"methods": {"learned": {}}}),
    "variance": (VarianceOptions, {"config": Config()}),
    "bench": (BenchOptions, {"config": Config()}),
}
TRUST_CODE = Key(
    "trust_code", False, "names of your own code which a stored run may import; see SECURITY.md", "names or true"
)


def command_keys(command: str) -> list[Key]:
    """Return all keys which a command takes, the command's own first."""
    if command not in SAMPLES:
        return []
    kind, arguments = SAMPLES[command]
    keys = list(keys_of(kind(**arguments)))
    own = [key for key in keys if not key.name.startswith("config.")]
    of_run = [dataclasses.replace(key, name=key.name.removeprefix("config.")) for key in keys if key not in own]
    return [*own, TRUST_CODE, *of_run]


def print_help(command: str) -> None:
    """Print the help of a command."""
    print(f"tokenv {command}: {COMMANDS[command][1]}")
    keys = command_keys(command)
    if not keys:
        return
    from tokenv.cli.sacred import usage  # heavier than what completion may load

    print(f"\nKeys, as tokenv {command} with key=value:")
    width = max(60, min(120, shutil.get_terminal_size((120, 0)).columns))
    print("\n".join(line for key in keys for line in _lines(key, width)))
    print(f"\n{usage(command).rstrip()}")


def _lines(key: Key, width: int) -> Iterator[str]:
    default = "" if key.default is dataclasses.MISSING else f" = {format_value(key.default)}"
    begin, text = f"  {key.name}{default}", f"{key.meaning.rstrip('.')} [{key.expected}]"
    if len(begin) > 33:
        yield from textwrap.wrap(begin, width, subsequent_indent=" " * 6)
        begin = ""
    yield from textwrap.wrap(text, width, initial_indent=begin.ljust(34) + " ", subsequent_indent=" " * 35)


def format_value(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)
