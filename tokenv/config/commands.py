"""Commands of the command line, built in and of other packages: a dataclass of options, and the work which they do."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from tokenv.config.files import COMMAND_LINE
from tokenv.config.literals import read_words
from tokenv.config.schema import Config
from tokenv.core import run_folders
from tokenv.core.conversion import check_keys, from_dict
from tokenv.core.errors import UserError, check_bounds


@dataclass(frozen=True)
class Record:
    """Record of one run of a command.

    Attributes:
        scratch: temporary folder for files which ``add`` stores.
        folder: folder of the run's files; None if it is not stored.
        title: title of the run's pictures.
        log: function which stores a value of a metric: its name, the value, and the step.
        add: function which stores a copy of a file.
    """

    scratch: Path
    folder: Path | None
    title: str
    log: Callable[[str, float, int], None]
    add: Callable[[Path], None]


@dataclass(frozen=True)
class Command:
    """Command, to be subclassed: a frozen dataclass, whose fields are the options ``key=value``.

    A package registers it under the entry point group ``tokenv.commands``. The first paragraph of its docstring is
    its line in ``tokenv --help``, and ``Args:`` describes the options. Help and completion import its module, which
    therefore imports torch inside of methods.

    Attributes:
        stored: whether a run of it is stored under ``runs`` if no flag says otherwise.
    """

    stored = False  # without annotation, or it would be an option

    def __post_init__(self) -> None:
        check_bounds(self)

    @classmethod
    def read(cls, words: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the nested values, and the names of configurations, in the words after ``with``."""
        return read_words(words, cls)

    @classmethod
    def resolve(cls, names: list[str], updates: dict[str, Any]) -> Self:
        """Return the command for names of configurations, and nested values; this one reads no configuration.

        Raises:
            UserError: for a word without ``=``, an unknown key, or a wrong value.
        """
        if names:
            raise UserError(f"{names[0]!r} is no option: expected key=value, such as run=runs/1")
        check_keys(updates, COMMAND_LINE, cls)
        return from_dict(cls, updates)

    @classmethod
    def take_own(cls, updates: dict[str, Any]) -> dict[str, Any]:
        """Remove the command's own keys from the updates and return them; keys of the run's configuration remain.

        Raises:
            UserError: a key is neither, and nearly one of the command's own.
        """
        own = [item.name for item in fields(cls) if item.name != "config"]
        known = [item.name for item in fields(Config)]
        for key in sorted(updates.keys() - {*own, *known}):
            near = difflib.get_close_matches(key, [*own, *known], n=1)
            if near and near[0] in own:
                raise UserError(f"{COMMAND_LINE}: unknown key {key}: did you mean {near[0]!r}?")
        return {name: updates.pop(name) for name in own if name in updates}

    @classmethod
    def launch(cls, start: Callable[[type[Command]], Any]) -> Any:
        """Call ``start``, which runs the command line, with this class."""
        return start(cls)

    def shortcut(self) -> Callable[[], Any] | None:
        """Return a function which replaces the work, and its record; None for the work."""
        return None

    def work(self, record: Record) -> Any:
        """Do what the command does, print what the user is to read, and return the result, which a stored run holds."""
        raise NotImplementedError


def stored_config(key: str, run: str, names: list[str]) -> tuple[Path, dict[str, Any]]:
    """Return the newest checkpoint of the run in the option ``key``, and its configuration.

    Raises:
        DamagedError: if a file of the checkpoint is damaged; the message names the newest intact checkpoint.
        UserError: if configurations are named, too, or the run names code which the user does not trust.
        MissingFileError: if the run does not exist or has no checkpoint.
    """
    if names:
        raise UserError(f"{key}={run} brings its own configuration: drop {', '.join(names)}")
    path = run_folders.find(run)
    run_folders.verify(path)
    return path, run_folders.load_state(path)["config"]


def check_kind(config: Config, kind: str) -> None:
    """Raise an error unless a run is of this kind of data.

    Raises:
        UserError: if it is of another one.
    """
    if config.data.kind != kind:
        raise UserError(
            f"data.kind = {config.data.kind!r}: expected a run of {kind}, for this command can use no other"
        )
