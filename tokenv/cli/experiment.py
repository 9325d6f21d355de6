"""Commands as Sacred experiments, for programs: to attach observers of their own, or to train on texts they have.

::

    from tokenv.cli.experiment import experiment

    ex = experiment("train", "quick", "seed=3")  # the words after ``with``; a sacred.Experiment
    ex.observers.append(my_observer)
    ex.run()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tokenv.cli.sacred import RUNS, folder_of
from tokenv.config.files import merge
from tokenv.config.schema import Config
from tokenv.core.errors import UserError, suggest
from tokenv.data.text.documents import COLUMN, write_documents
from tokenv.library.model import Model, load

COMMANDS = ("train", "segment", "evaluate", "generate", "forecast", "compare", "variance", "bench")


def experiment(command: str, *words: str, store: str | Path | None = None) -> Any:
    """A command as a ``sacred.Experiment`` that is ready to run.

    Args:
        command: such as ``train``.
        words: what stands after ``with`` on the command line: names of configurations, and ``key=value``.
        store: a folder such as ``runs``, where its run is kept; None for no observer but those that you append.

    Returns:
        The experiment; ``run()`` runs it. Without any observer nothing is kept.

    Raises:
        UserError: unknown command, configuration, key or value.
    """
    if command not in COMMANDS:
        raise UserError(f"no experiment {command!r}: {suggest(command, COMMANDS)}")
    found = import_module(f"tokenv.cli.{command}").COMMAND
    return found.experiment(found.options(list(words)), store)


def train(
    config: str | Path | Mapping[str, Any] | Config = "quick",
    *,
    texts: Iterable[Any] | None = None,
    column: str = COLUMN,
    store: str | Path = RUNS,
    observers: Sequence[Any] = (),
    **updates: Any,
) -> Model:
    """Train a model, as ``tokenv train`` does.

    Args:
        config: name or file of a configuration, or its values; what is not named there has its default.
        texts: documents to train on, str or bytes, or a ``datasets.Dataset``; kept in ``store``, so that the run can
            go on. None for what the configuration reads.
        column: of a data set, the one with the text.
        store: folder of runs: checkpoints, metrics and pictures lie in a folder of its own in it.
        observers: further observers of Sacred's.
        updates: sections and keys that override the configuration: ``train={"symbols": 1e6}, seed=3``.

    Returns:
        The model with the best validation loss. ``tokenv train with resume=`` its folder goes on.

    Raises:
        UserError: an unknown key or value, or texts that cannot be trained on.
    """
    names = [str(config)] if isinstance(config, str | Path) else []
    values = config.as_dict() if isinstance(config, Config) else {} if names else dict(config)  # type: ignore[arg-type]
    values = merge(values, updates)
    if texts is not None:
        kept = write_documents(texts, Path(store) / "_texts", column=column)
        values = merge(values, {"data": {"kind": "text", "source": str(kept.resolve()), "column": COLUMN}})
    command = import_module("tokenv.cli.train").COMMAND
    ex = command.experiment(command.resolve(names, values), store)
    ex.observers.extend(observers)
    run = ex.run(options={"--loglevel": "WARNING"})
    return load(folder_of(run) or Path(store))
