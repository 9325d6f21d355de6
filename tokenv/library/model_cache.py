"""Runs with all their checkpoints, and the models of those that were asked for last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenv.config.schema import Config
from tokenv.core.errors import MissingFileError, UserError
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.run_state import RunState
from tokenv.library.model import Model
from tokenv.plotting.characters import escape
from tokenv.plotting.theme import TERMINOLOGY, in_words
from tokenv.storage import run_folders

KEPT = 4  # models, beside one of each run


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint of a run.

    Attributes:
        name: of its folder.
        step: updates done.
        told: for people, how far training was and how good the model.
    """

    name: str
    step: int
    told: str


class ModelCache:
    """Runs to choose models of; the chosen checkpoint of each is loaded at once, all others when they are asked for.

    Args:
        runs: folders.
        which: checkpoint to begin with: ``best`` or ``latest``.

    Attributes:
        folders: run, as it is shown, to its folder.
        chosen: run to the name of the checkpoint to begin with.
        configs: run to its configuration.

    Raises:
        UserError: a run cannot be read: see ``tokenv.evaluation.loaded_run.load_run``.
    """

    def __init__(self, runs: Sequence[str], which: str) -> None:
        self._models: OrderedDict[Path, Model] = OrderedDict()  # the last one was asked for last
        self._kept = KEPT + len(runs)
        self.chosen: dict[str, str] = {}
        self.configs: dict[str, Config] = {}
        self.folders = {escape(run): run for run in runs}
        for run, folder in self.folders.items():
            trained = load_run(folder, which)
            self.chosen[run], self.configs[run] = trained.path.name, trained.config
            self._models[trained.path] = Model(trained)

    def checkpoints(self, run: str) -> list[CheckpointInfo]:
        """All sound checkpoints that a run has kept, oldest first; a training run that goes on adds and drops some."""
        found = []
        for path in run_folders.list_all(self.folders[run]):
            try:
                state = RunState.read(path)
            except (UserError, OSError):  # damaged, or dropped meanwhile
                continue
            words, loss = TERMINOLOGY[state.settings.data.kind], state.loss
            told = [f"{state.symbols:,} {words.symbol}s of training"]
            told += [] if loss is None else [f"{loss:.3f} {in_words(state.unit)} on held-out text"]
            found.append(CheckpointInfo(path.name, state.step, ", ".join(told)))
        return found

    def model(self, run: str, name: str | None = None) -> Model:
        """A model.

        Args:
            run: one of the runs.
            name: of the checkpoint; None for the chosen one.

        Raises:
            MissingFileError: the run has none of this name.
            UserError: it is damaged.
        """
        wanted = self.chosen[run] if name is None else name
        for path in run_folders.list_all(self.folders[run]):
            if path.name == wanted:
                return self._take(path)
        raise MissingFileError(f"{run} has no checkpoint {wanted!r} any more: reload the page to see which there are")

    def as_list(self) -> list[dict[str, Any]]:
        """All there is to choose from, for JSON."""
        return [
            {
                "run": run,
                "agent": self.configs[run].agent["name"],
                "rate": self.configs[run].rate,
                "chosen": chosen,
                "checkpoints": [vars(kept) for kept in self.checkpoints(run)],
            }
            for run, chosen in self.chosen.items()
        ]

    def _take(self, path: Path) -> Model:
        if path not in self._models:
            self._models[path] = Model(load_run(str(path), fall_back=False))
        self._models.move_to_end(path)
        while len(self._models) > self._kept:
            self._models.popitem(last=False)
        return self._models[path]
