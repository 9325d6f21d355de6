"""Commands as Sacred experiments for programs: to attach observers, or to train on texts which are in memory.

::

    from tokenv.cli.experiment import experiment

    ex = experiment("train", "quick", "seed=3")  # the words after ``with``; a sacred.Experiment
    ex.observers.append(my_observer)
    ex.run()
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenv.cli.command_registry import load_command
from tokenv.cli.sacred import RUNS, build_experiment, read_command, run_folder
from tokenv.cli.train_command import Train
from tokenv.config.files import merge
from tokenv.config.schema import Config
from tokenv.data.documents import COLUMN, write_documents
from tokenv.library.model import Model, load


def experiment(command: str, *words: str, store: str | Path | None = None) -> Any:
    """Build the Sacred experiment of a command.

    Args:
        command: name of the command, such as ``train``.
        words: words after ``with`` on the command line: names of configurations, and ``key=value``.
        store: folder in which the run is stored, such as ``runs``; None for no observer but those which you append.

    Returns:
        A ``sacred.Experiment``; ``run()`` runs it. Without any observer nothing is stored.

    Raises:
        UserError: unknown command, configuration, key or value.
    """
    return build_experiment(command, read_command(load_command(command), list(words)), store)


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
        config: name or file of a configuration, or its values; keys which are missing have their defaults.
        texts: documents to train on, str or bytes, or a ``datasets.Dataset``; they are written into ``store``, so that
            the run can be resumed. None for the data of the configuration.
        column: column of a data set which holds the text.
        store: folder of runs; checkpoints, metrics and pictures are written into a folder in it.
        observers: further observers of Sacred's.
        updates: sections and keys which override the configuration: ``train={"symbols": 1e6}, seed=3``.

    Returns:
        The model with the best validation loss. ``tokenv train with resume=`` its folder resumes the run.

    Raises:
        UserError: an unknown key or value, or texts which cannot be trained on.
    """
    names: list[str] = []
    values: dict[str, Any] = {}
    if isinstance(config, str | Path):
        names = [str(config)]
    elif isinstance(config, Config):
        values = config.as_dict()
    else:
        values = dict(config)
    values = merge(values, updates)
    if texts is not None:
        path = write_documents(texts, Path(store) / "_texts", column=column)
        values = merge(
            values, {"data": {"kind": "text", "source": str(path.resolve()), "column": COLUMN}}
        )
    ex = build_experiment("train", Train.resolve(names, values), store)
    ex.observers.extend(observers)
    run = ex.run(options={"--loglevel": "WARNING"})
    return load(run_folder(run) or Path(store))
