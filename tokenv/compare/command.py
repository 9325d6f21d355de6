"""All of ``tokenv compare``: have the runs, read them, compare them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenv.compare.comparison import Comparison
from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.forecast_comparison import check_wish
from tokenv.compare.plan import build_comparison, compared_run
from tokenv.compare.scheduler import run_all
from tokenv.compare.settings import check_same_kind, group_into_methods
from tokenv.compare.store import finished_run
from tokenv.compare.tuning import choose, trials
from tokenv.config.components import check_components
from tokenv.core.errors import RunFailedError, UserError

Starts = dict[str, Path]  # of methods


def check_methods(options: CompareOptions) -> None:
    """Check every method, so that a mistake shows before hours of work.

    Raises:
        UserError: a method's configuration has an unknown key, a wrong value, or parts that do not fit; or methods
            are of different kinds of data.
    """
    for protocol, part in options.parts().items():
        where = f"protocols.{protocol}: " if protocol else ""
        firsts = {f"{where}methods.{task.method}": task.config for task in _firsts(part)}
        starts = {repr(task.config.as_dict()): task for task in part.shared_tasks().values()}
        firsts |= {f"{where}{task.label}": task.config for task in starts.values()}
        for name, config in firsts.items():
            try:
                check_components(config)
                if part.forecast is not None and name != f"{where}shared":
                    check_wish(config, part.forecast)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
        check_same_kind(firsts)
        trials(part, None)


def _firsts(options: CompareOptions) -> list[Task]:
    return [options.task(method, seed) for method in options.chosen for seed in options.seeds[:1]]


def compare_methods(options: CompareOptions, *, progress: bool) -> dict[str, Comparison]:
    """Train what is missing, and compare everything.

    Args:
        options: what to compare.
        progress: show bars.

    Returns:
        A comparison for every protocol, by its name; under an empty name where there are none.

    Raises:
        FailedError: every run of a protocol failed, or a shared one.
        UserError: a run is not finished, or the runs cannot be compared: see ``tokenv.compare.plan``.
        KeyboardInterrupt: Ctrl-C.
    """
    if options.runs:
        stored = [finished_run(Path(folder)) for folder in options.runs]
        check_same_kind({str(run.folder): run.config for run in stored})
        shown = tqdm(stored, desc="measuring", unit=" runs", disable=not progress)
        methods = group_into_methods([compared_run(run, options.evaluation_request) for run in shown])
        return {"": build_comparison(methods, f"{len(options.runs)} runs", {})}
    parts = options.parts()
    starts = _shared_runs(parts, options, progress)
    chosen = _tuned(parts, starts, options, progress)
    tasks = {
        name: [replace(task, protocol=name) for task in part.tasks(starts.get(name), chosen.get(name))]
        for name, part in parts.items()
    }
    folders, failed = run_all([task for of in tasks.values() for task in of], options, progress=progress)
    left = iter(folders)
    found = {name: [(task, next(left)) for task in of] for name, of in tasks.items()}
    return {name: _comparison(name, part, found[name], failed) for name, part in parts.items()}


def _shared_runs(parts: Mapping[str, CompareOptions], options: CompareOptions, progress: bool) -> dict[str, Starts]:
    """Protocols and methods to the runs that these start from; one that several share is trained once."""
    wanted = {name: part.shared_tasks() for name, part in parts.items()}
    each: dict[str, Task] = {}
    for task in itertools.chain.from_iterable(tasks.values() for tasks in wanted.values()):
        each.setdefault(repr(task.config.as_dict()), task)
    folders, failed = run_all(list(each.values()), options, progress=progress) if each else ([], {})
    if failed:
        raise RunFailedError("a run that methods start from failed: " + "; ".join(failed.values()))
    of = dict(zip(each, folders, strict=True))
    found: dict[str, Starts] = {name: {} for name in wanted}
    for name, tasks in wanted.items():
        for method, task in tasks.items():
            if (folder := of[repr(task.config.as_dict())]) is not None:
                found[name][method] = folder
    return found


def _tuned(
    parts: Mapping[str, CompareOptions], starts: Mapping[str, Starts], options: CompareOptions, progress: bool
) -> dict[str, dict[str, dict[str, Any]]]:
    """Protocol and method to what tuning changes of it."""
    tried = {name: trials(part, starts.get(name), name) for name, part in parts.items()}
    tasks = [task for of in tried.values() for trial in of for task in trial.tasks]
    folders, _ = run_all(tasks, options, progress=progress) if tasks else ([], {})
    found = {task.label: folder for task, folder in zip(tasks, folders, strict=True)}
    return {name: choose(tried[name], found, part) for name, part in parts.items()}


def _comparison(
    name: str, options: CompareOptions, found: Sequence[tuple[Task, Path | None]], failed: Mapping[str, str]
) -> Comparison:
    methods: dict[str, list[Any]] = {}
    for task, folder in found:
        if folder is not None:
            methods.setdefault(task.method, []).append(compared_run(finished_run(folder), options.evaluation_request))
    labels = [task.label for task, _ in found]
    own = {label: why for label, why in failed.items() if label in labels}
    if not methods:
        raise RunFailedError("every run failed: " + "; ".join(f"{label}: {why}" for label, why in own.items()))
    title = f"{name}: {len(methods)} methods".removeprefix(": ")
    return build_comparison(methods, title, own, against=options.reference, facts=_facts(options))


def _facts(options: CompareOptions) -> dict[str, str]:
    tuned = [f"{key} of {', '.join(map(str, values))}" for key, values in options.tune.items()]
    found = {}
    if options.calibrate:
        found["rates"] = "learned ones calibrated to the target on held-out data of their own"
    if options.rates:
        found["asked for"] = f"rates {', '.join(f'{rate:g}' for rate in options.rates)}, beside each run's own"
    if options.equal_compute:
        found["passes"] = "equal through the decoder: a method of K samples reads 1/K of the texts"
    if options.pretrain:
        sizes = len({repr(task.config.as_dict()) for task in options.shared_tasks().values()})
        found["start"] = (
            "all from one trained model" if sizes == 1 else f"from {sizes} trained models, by model and codec"
        )
    if tuned:
        found["tuned"] = f"{'; '.join(tuned)}, on seeds {', '.join(map(str, options.tune_seeds))}"
    return found
