"""Tune the methods of a comparison on seeds of its own."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenv.compare.config import CompareOptions, Task, flatten
from tokenv.compare.evaluation_request import EvaluationRequest
from tokenv.compare.run_evaluation import load_evaluation
from tokenv.config.build import is_trainable
from tokenv.config.files import merge, nest_key


@dataclass(frozen=True)
class Trial:
    """A choice of tuned values for a method.

    Attributes:
        method: name of the method.
        changes: chosen values, nested as in a configuration.
        tasks: its runs, one a seed.
    """

    method: str
    changes: dict[str, Any]
    tasks: list[Task]


def make_trials(options: CompareOptions, starts: Mapping[str, Path] | None, protocol: str = "") -> list[Trial]:
    """Return all choices of values to try.

    Args:
        options: options of the comparison.
        starts: method to the folder of its pretrained run.
        protocol: name of the comparison among others.
    """
    trials = []
    for method, changes in options.selected_methods.items():
        own = flatten(merge(options.common, changes)) if options.tune else {}
        grid = {key: values for key, values in options.tune.items() if key not in own}
        if not grid or not is_trainable(options.make_task(method, options.tune_seeds[0]).config.agent):
            continue
        for values in itertools.product(*grid.values()):
            name, tuned = method, dict[str, Any]()
            for key, value in zip(grid, values, strict=True):
                name, tuned = f"{name}, {key}={value}", merge(tuned, nest_key(key, value))
            start = (starts or {}).get(method)
            tasks = [options.make_task(method, seed, start=start, changes=tuned) for seed in options.tune_seeds]
            trials.append(Trial(method, tuned, [_simplify(task, name, protocol) for task in tasks]))
    return trials


def _simplify(task: Task, name: str, protocol: str) -> Task:
    """Return the task without what only a report shows: tuning reads nothing but the last loss."""
    config, evaluation_request = task.config, task.evaluation_request
    assert evaluation_request is not None
    validation = replace(config.validation, every_symbols=config.train.symbols, calibrate=False)
    return Task(name, replace(config, validation=validation), _loss_only(evaluation_request), protocol)


def _loss_only(evaluation_request: EvaluationRequest) -> EvaluationRequest:
    return replace(evaluation_request, passages=0, rates=[], forecast=None)


def select_best_trials(
    trials: Sequence[Trial], folders: Mapping[str, Path | None], options: CompareOptions
) -> dict[str, dict[str, Any]]:
    """Return the changes with the lowest mean loss, for every tuned method.

    Args:
        trials: all trials.
        folders: folders of their runs, by the labels of the tasks; None for a run which failed: its trial is not taken.
        options: options of the comparison.
    """
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for trial in trials:
        runs = [folders[task.label] for task in trial.tasks]
        measured = [folder and load_evaluation(folder, _loss_only(options.evaluation_request)) for folder in runs]
        if all(measured):
            loss = float(np.mean([np.mean(each.loss) for each in measured if each]))
            if trial.method not in best or loss < best[trial.method][0]:
                best[trial.method] = (loss, trial.changes)
    return {method: changes for method, (_, changes) in best.items()}
