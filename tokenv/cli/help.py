"""``tokenv COMMAND --help``: every key with its meaning, its default and what it may be, then Sacred's flags."""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tokenv.cli.main import command_module
from tokenv.config.field_docs import Key, keys_of, sentence
from tokenv.config.schema import Config

RUN = {"run": "runs/1"}
# What each command reads, as an instance that its checks let pass; the modules of these are light.
SAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "train": ("cli.options:TrainOptions", {"config": Config()}),
    "segment": ("cli.options:SegmentOptions", RUN | {"text": "some text"}),
    "serve": ("cli.options:ServeOptions", RUN),
    "evaluate": ("cli.options:EvaluateOptions", RUN),
    "generate": ("cli.options:GenerateOptions", RUN | {"text": "some text"}),
    "forecast": ("cli.options:ForecastOptions", RUN),
    "compare": ("compare.config:CompareOptions", {"methods": {"learned": {}}}),
    "variance": ("lab.variance_config:VarianceOptions", {"config": Config()}),
    "bench": ("lab.config:BenchOptions", {"config": Config()}),
}
TRUST = Key("trust_code", False, "code of your own that a run which is read may name; see SECURITY.md", "names or true")


def command_keys(command: str) -> list[Key]:
    """All keys that a command takes; the command's own come first."""
    if command not in SAMPLES:
        return []
    target, options = SAMPLES[command]
    module, _, name = target.partition(":")
    found = list(keys_of(getattr(import_module(f"tokenv.{module}"), name)(**options)))
    own = [key for key in found if not key.name.startswith("config.")]
    of_run = [dataclasses.replace(key, name=key.name.removeprefix("config.")) for key in found if key not in own]
    return [*own, TRUST, *of_run]


def show(command: str) -> None:
    """Print a command's help."""
    does = sentence(command_module(command)).partition(": ")[2]
    print(f"tokenv {command}: {does}")
    keys = command_keys(command)
    if not keys:
        return
    print(f"\nKeys, as tokenv {command} with key=value:")
    width = max(60, min(120, shutil.get_terminal_size((120, 0)).columns))
    print("\n".join(line for key in keys for line in _lines(key, width)))
    print(f"\n{import_module('tokenv.cli.sacred').usage(command).rstrip()}")  # what completes a line needs no Sacred


def _lines(key: Key, width: int) -> Iterator[str]:
    given = "" if key.default is dataclasses.MISSING else f" = {in_yaml(key.default)}"
    begin, text = f"  {key.name}{given}", f"{key.meaning.rstrip('.')} [{key.expected}]"
    if len(begin) > 33:
        yield from textwrap.wrap(begin, width, subsequent_indent=" " * 6)
        begin = ""
    yield from textwrap.wrap(text, width, initial_indent=begin.ljust(34) + " ", subsequent_indent=" " * 35)


def in_yaml(value: Any) -> str:
    """A value as it is typed."""
    words = {True: "true", False: "false", None: "null"}
    if isinstance(value, bool) or value is None:
        return words[value]
    return "[" + ", ".join(map(str, value)) + "]" if isinstance(value, list | tuple) else str(value)
