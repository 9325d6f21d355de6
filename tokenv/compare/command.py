"""Run a whole comparison: train and evaluate its runs, then compare them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenv.compare.comparison import (
    Comparison,
    build_comparison,
    check_same_kind,
    group_into_methods,
    load_compared_run,
)
from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.forecast_comparison import check_forecast_request
from tokenv.compare.scheduler import run_all
from tokenv.compare.store import finished_run
from tokenv.compare.tuning import make_trials, select_best_trials
from tokenv.config.components import check_components
from tokenv.core.errors import RunFailedError, UserError

StartFolders = dict[str, Path]  # method to the run which it starts from


def check_methods(options: CompareOptions) -> None:
    """Check every method, so that mistakes are reported before hours of work.

    Raises:
        UserError: a method's configuration has an unknown key, a wrong value, or components which do not fit; or
            methods are of different kinds of data.
    """
    for protocol, own in options.split_protocols().items():
        where = f"protocols.{protocol}: " if protocol else ""
        first = [own.make_task(method, seed) for method in own.selected_methods for seed in own.seeds[:1]]
        configs = {f"{where}methods.{task.method}": task.config for task in first}
        starts = {repr(task.config.as_dict()): task for task in own.make_pretraining_tasks().values()}
        configs |= {f"{where}{task.label}": task.config for task in starts.values()}
        for name, config in configs.items():
            try:
                check_components(config)
                if own.forecast is not None and name != f"{where}shared":
                    check_forecast_request(config, own.forecast)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
        check_same_kind(configs)
        make_trials(own, None)


def compare_methods(options: CompareOptions, *, progress: bool) -> dict[str, Comparison]:
    """Train and evaluate the runs which are missing, and compare all.

    Args:
        options: options of the comparison.
        progress: show progress bars.

    Returns:
        The comparison of every protocol by its name; the name is empty where there are no protocols.

    Raises:
        KeyboardInterrupt: Ctrl-C.
        RunFailedError: every run of a protocol failed, or a shared one.
        UserError: a run is not finished, or the runs cannot be compared: see ``tokenv.compare.plan``.
    """
    if options.runs:
        return {"": _compare_stored(options, progress)}
    protocols = options.split_protocols()
    starts = _train_shared(protocols, options, progress)
    tuned = _tune(protocols, starts, options, progress)
    tasks = {
        name: [replace(task, protocol=name) for task in own.make_tasks(starts.get(name), tuned.get(name))]
        for name, own in protocols.items()
    }
    folders, failed = run_all(list(itertools.chain(*tasks.values())), options, progress=progress)
    remaining = iter(folders)
    return {
        name: _compare_protocol(name, own, [(task, next(remaining)) for task in tasks[name]], failed)
        for name, own in protocols.items()
    }


def _compare_stored(options: CompareOptions, progress: bool) -> Comparison:
    """Compare runs which are finished already."""
    stored = [finished_run(Path(folder)) for folder in options.runs]
    check_same_kind({str(run.folder): run.config for run in stored})
    shown = tqdm(stored, desc="measuring", unit=" runs", disable=not progress)
    methods = group_into_methods([load_compared_run(run, options.evaluation_request) for run in shown])
    return build_comparison(methods, f"{len(options.runs)} runs", {})


def _train_shared(
    protocols: Mapping[str, CompareOptions], options: CompareOptions, progress: bool
) -> dict[str, StartFolders]:
    """Train the runs which methods start from, each once, and return their folders by protocol and method."""
    tasks = {name: own.make_pretraining_tasks() for name, own in protocols.items()}
    distinct: dict[str, Task] = {}
    for task in itertools.chain.from_iterable(of_protocol.values() for of_protocol in tasks.values()):
        distinct.setdefault(repr(task.config.as_dict()), task)
    folders, failed = run_all(list(distinct.values()), options, progress=progress) if distinct else ([], {})
    if failed:
        raise RunFailedError("a run that methods start from failed: " + "; ".join(failed.values()))
    folder_of = {key: folder for key, folder in zip(distinct, folders, strict=True) if folder is not None}
    return {
        name: {method: folder_of[repr(task.config.as_dict())] for method, task in of_protocol.items()}
        for name, of_protocol in tasks.items()
    }


def _tune(
    protocols: Mapping[str, CompareOptions],
    starts: Mapping[str, StartFolders],
    options: CompareOptions,
    progress: bool,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Train the trials of tuning, and return by protocol and method what the best one changes."""
    candidates = {name: make_trials(own, starts.get(name), name) for name, own in protocols.items()}
    tasks = [task for of_protocol in candidates.values() for trial in of_protocol for task in trial.tasks]
    folders, _ = run_all(tasks, options, progress=progress) if tasks else ([], {})
    folder_of = {task.label: folder for task, folder in zip(tasks, folders, strict=True)}
    return {name: select_best_trials(candidates[name], folder_of, own) for name, own in protocols.items()}


def _compare_protocol(
    name: str, options: CompareOptions, runs: Sequence[tuple[Task, Path | None]], failed: Mapping[str, str]
) -> Comparison:
    """Compare the finished runs of a protocol.

    Raises:
        RunFailedError: there are none.
    """
    methods: dict[str, list[Any]] = {}
    for task, folder in runs:
        if folder is not None:
            run = load_compared_run(finished_run(folder), options.evaluation_request)
            methods.setdefault(task.method, []).append(run)
    errors = {task.label: failed[task.label] for task, _ in runs if task.label in failed}
    if not methods:
        raise RunFailedError("every run failed: " + "; ".join(f"{label}: {why}" for label, why in errors.items()))
    title = f"{name}: {len(methods)} methods".removeprefix(": ")
    return build_comparison(methods, title, errors, reference=options.reference, facts=_facts(options))


def _facts(options: CompareOptions) -> dict[str, str]:
    """Return what a report says of how methods were trained, by topic."""
    tuned = [f"{key} of {', '.join(map(str, values))}" for key, values in options.tune.items()]
    facts = {}
    if options.calibrate:
        facts["rates"] = "learned ones calibrated to the target on held-out data of their own"
    if options.rates:
        facts["requested"] = f"rates {', '.join(f'{rate:g}' for rate in options.rates)}, beside each run's own"
    if options.equal_compute:
        facts["passes"] = "equal through the decoder: a method of K samples reads 1/K of the texts"
    if options.pretrain:
        sizes = len({repr(task.config.as_dict()) for task in options.make_pretraining_tasks().values()})
        facts["start"] = (
            "all from one trained model" if sizes == 1 else f"from {sizes} trained models, by model and codec"
        )
    if tuned:
        facts["tuned"] = f"{'; '.join(tuned)}, on seeds {', '.join(map(str, options.tune_seeds))}"
    return facts
