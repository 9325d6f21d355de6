"""What all commands share which load a run: the options which name it. Nothing here imports torch for help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tokenv.config.commands import Command, check_kind
from tokenv.core import run_folders
from tokenv.core.errors import SEED, MissingFileError, UserError, bounds, choice

if TYPE_CHECKING:
    from tokenv.evaluation.loaded_run import LoadedRun


def check_input(key: str, path: str | None, accepted: str | None = None) -> None:
    """Raise an error unless the file in the option ``key`` exists, or it names none or what is ``accepted``.

    Raises:
        MissingFileError: there is no such file.
        UserError: it is a folder.
    """
    if path is None or path == accepted or Path(path).is_file():
        return
    if Path(path).is_dir():
        raise UserError(
            f"{key} = {path!r} is a folder: expected one file, such as one of those in it"
        )
    raise MissingFileError(
        f"{key} = {path!r}: there is no such file: expected a path from the current folder"
    )


@dataclass(frozen=True)
class RunCommand(Command):
    """Command which loads a run.

    Args:
        run: run folder, such as ``runs/7``.
        checkpoint: ``best`` by validation bits per byte, or ``latest``.
        seed: seed of the sampled boundaries and symbols.
    """

    run: str = field(metadata=bounds("a run folder, such as runs/1", bool))
    checkpoint: str = field(default="best", metadata=choice("best", "latest"))
    seed: int = field(default=0, metadata=SEED)

    def __post_init__(self) -> None:
        super().__post_init__()
        others = getattr(self, "other_runs", [])  # some commands take further ones
        for run in (self.run, *others):
            run_folders.find(run, self.checkpoint)  # before anything is stored
        if len({self.run, *others}) <= len(others):
            raise UserError(
                f"other_runs = {others!r}: expected other runs than run = {self.run!r}, each once"
            )

    def load(self, run: str = "", *, kind: str | None = "text") -> LoadedRun:
        """Load the run, or another one, and prepare this process for its hardware.

        Args:
            run: folder of the other one.
            kind: kind of data of which it has to be; None for any.

        Raises:
            UserError: it is of another kind.
        """
        from tokenv.config.hardware import prepare
        from tokenv.evaluation.loaded_run import load_run

        loaded = load_run(run or self.run, self.checkpoint)
        if kind is not None:
            check_kind(loaded.config, kind)
        prepare(loaded.config.hardware)
        return loaded
