"""Every method gets the step that suits it: values tried on seeds that the comparison does not see."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.evaluation_request import EvaluationRequest
from tokenv.compare.run_evaluation import load_evaluation
from tokenv.compare.settings import flat
from tokenv.config.build import is_trainable
from tokenv.config.files import merge, nest_key


@dataclass(frozen=True)
class Trial:
    """One choice of values for a method.

    Attributes:
        method: whose.
        changes: nested, as a configuration's.
        tasks: its runs, one a seed.
    """

    method: str
    changes: dict[str, Any]
    tasks: list[Task]


def trials(options: CompareOptions, starts: Mapping[str, Path] | None, protocol: str = "") -> list[Trial]:
    """All choices that are to be tried.

    Args:
        options: of the comparison.
        starts: method to the folder of its shared run.
        protocol: the comparison's name among others.
    """
    found = []
    for method, changes in options.chosen.items():
        own = flat(merge(options.common, changes)) if options.tune else {}
        keys = {key: values for key, values in options.tune.items() if key not in own}
        if not keys or not is_trainable(options.task(method, options.tune_seeds[0]).config.agent):
            continue
        for values in itertools.product(*keys.values()):
            chosen = dict(zip(keys, values, strict=True))
            name = ", ".join([method, *(f"{key}={value}" for key, value in chosen.items())])
            more: dict[str, Any] = {}
            for key, value in chosen.items():
                more = merge(more, nest_key(key, value))
            start = (starts or {}).get(method)
            tasks = [options.task(method, seed, start=start, more=more) for seed in options.tune_seeds]
            found.append(Trial(method, more, [_briefly(task, name, protocol) for task in tasks]))
    return found


def _briefly(task: Task, name: str, protocol: str) -> Task:
    """The same without what only a report shows: nothing but the last loss counts."""
    config, evaluation_request = task.config, task.evaluation_request
    assert evaluation_request is not None
    validation = replace(config.validation, every_symbols=config.train.symbols, calibrate=False)
    return Task(name, replace(config, validation=validation), _loss_alone(evaluation_request), protocol)


def _loss_alone(evaluation_request: EvaluationRequest) -> EvaluationRequest:
    return replace(evaluation_request, passages=0, rates=[], forecast=None)


def choose(
    tried: Sequence[Trial], folders: Mapping[str, Path | None], options: CompareOptions
) -> dict[str, dict[str, Any]]:
    """The changes with the lowest mean loss, of every method that was tuned.

    Args:
        tried: all trials.
        folders: of their runs, by their tasks' labels; None for one that failed, whose trial is not taken.
        options: of the comparison.
    """
    best: dict[str, tuple[float, dict[str, Any]]] = {}
    for trial in tried:
        found = [folders[task.label] for task in trial.tasks]
        measured = [folder and load_evaluation(folder, _loss_alone(options.evaluation_request)) for folder in found]
        if all(measured):
            loss = float(np.mean([np.mean(each.loss) for each in measured if each]))
            if trial.method not in best or loss < best[trial.method][0]:
                best[trial.method] = (loss, trial.changes)
    return {method: changes for method, (_, changes) in best.items()}
