"""A whole comparison: read its options, train and evaluate its runs, then compare them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from tokenv.compare.comparison import ComparedRun, Comparison, build_comparison, group_into_methods
from tokenv.compare.config import CompareOptions, EvaluationRequest, Task, as_lists, check_same_kind
from tokenv.compare.run_evaluation import evaluate_run, load_evaluation
from tokenv.compare.scheduler import run_all
from tokenv.compare.store import StoredRun, describe_versions, finished_run
from tokenv.config.build import is_trainable
from tokenv.config.components import check_components
from tokenv.config.files import COMMAND_LINE, config_path, flatten, load_yaml, merge, nest_key
from tokenv.config.literals import read_words
from tokenv.config.schema import Config
from tokenv.core import checkpoints
from tokenv.core.conversion import check_keys, from_dict
from tokenv.core.errors import RunFailedError, UserError
from tokenv.data.corpus import load_corpus
from tokenv.evaluation.calibration import split_for_calibration
from tokenv.evaluation.run_state import RunState
from tokenv.plotting.console import console, warn

# keys of what learns
OF_POLICY = ("agent.", "estimator.", "imitation.", "loss.", "rate_target.", "train.agent_")
StartFolders = dict[str, Path]  # method to the run which it starts from


def check_methods(options: CompareOptions) -> None:
    """Check every method, so that mistakes are reported before hours of work.

    Raises:
        UserError: a method's configuration has an unknown key, a wrong value, or components which do not fit; or
            methods are of different kinds of data.
    """
    for protocol, own in options.split_protocols().items():
        where = ""
        if protocol:
            where = f"protocols.{protocol}: "
        methods = {}
        for method in own.selected_methods:
            methods[f"{where}methods.{method}"] = own.make_task(method, own.seeds[0]).config
        starts = {
            repr(task.config.as_dict()): task for task in own.make_pretraining_tasks().values()
        }
        configs = methods | {f"{where}{task.label}": task.config for task in starts.values()}
        for name, config in configs.items():
            try:
                check_components(config)
                if own.forecast is not None:
                    config.data.options.check_forecast(config, own.forecast)
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
        check_same_kind(configs)
        check_held_out(methods, own)
        make_trials(own, None)


def check_held_out(configs: Mapping[str, Config], options: CompareOptions) -> None:
    """Check that all methods can be measured on the same held-out sequences, of which there are enough.

    Args:
        configs: name of a method to its configuration, all of one kind of data.
        options: options of the comparison.

    Raises:
        UserError: two methods have other data or another number of sequences; or files of the user's own are too small
            to calibrate on. Other data is counted only when it is measured: reading it takes long.
    """
    if not configs:  # stored runs alone are compared
        return
    (first_name, first), *others = configs.items()
    for name, config in others:
        if (config.data, config.validation.sequences) != (first.data, first.validation.sequences):
            raise UserError(
                f"{first_name} and {name} would be measured on different held-out {first.data.kind}: expected one data "
                "section and one validation.sequences; change them in base or common"
            )
    if (options.calibrate or options.rates) and Path(first.data.source).exists():
        split_for_calibration(load_corpus(first.data), first.validation.sequences)


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
        UserError: a run is not finished, or the runs cannot be compared.
    """
    if options.runs:
        return {"": _compare_stored(options, progress)}
    protocols = options.split_protocols()
    for name, own in protocols.items():
        for sentence in own.options_given_up():
            console().print(f"{name}: {sentence}".removeprefix(": "))
    starts = _train_shared(protocols, options, progress)
    tuned = _tune(protocols, starts, options, progress)
    tasks = []
    for name, own in protocols.items():
        for task in own.make_tasks(starts.get(name), tuned.get(name)):
            tasks.append(replace(task, protocol=name))
    folders, failed = run_all(tasks, options, progress=progress)
    runs = list(zip(tasks, folders, strict=True))
    comparisons = {}
    for name, own in protocols.items():
        own_runs = [run for run in runs if run[0].protocol == name]
        comparisons[name] = _compare_protocol(name, own, own_runs, failed)
    return comparisons


def load_compared_run(stored: StoredRun, evaluation_request: EvaluationRequest) -> ComparedRun:
    """Return a finished run with its evaluation, which is made unless it is stored."""
    evaluation = evaluate_run(stored.folder, evaluation_request)
    state = RunState.read(checkpoints.find(stored.folder))
    return ComparedRun(
        folder=str(stored.folder),
        config=stored.config,
        flops=state.flops,
        seconds=_training_seconds(*state.history["train/symbols_per_second"]),
        history=state.history,
        evaluation=evaluation,
    )


def _training_seconds(symbols: Sequence[int], symbols_per_second: Sequence[float]) -> float:
    steps = zip(symbols, [0, *symbols[:-1]], symbols_per_second, strict=True)
    return sum((now - before) / speed for now, before, speed in steps)


def _compare_stored(options: CompareOptions, progress: bool) -> Comparison:
    """Compare runs which are finished already."""
    stored = [finished_run(Path(folder)) for folder in options.runs]
    check_same_kind({str(run.folder): run.config for run in stored})
    shown = tqdm(stored, desc="measuring", unit=" runs", disable=not progress)
    methods = group_into_methods(
        [load_compared_run(run, options.evaluation_request) for run in shown]
    )
    facts = _facts(options, stored)
    return build_comparison(methods, f"{len(options.runs)} runs", {}, facts=facts)


def _train_shared(
    protocols: Mapping[str, CompareOptions], options: CompareOptions, progress: bool
) -> dict[str, StartFolders]:
    """Train the runs which methods start from, each once, and return their folders by protocol and method."""
    tasks = {name: own.make_pretraining_tasks() for name, own in protocols.items()}
    distinct: dict[str, Task] = {}
    for task in itertools.chain.from_iterable(
        of_protocol.values() for of_protocol in tasks.values()
    ):
        distinct.setdefault(repr(task.config.as_dict()), task)
    folders, failed = run_all(list(distinct.values()), options, progress=progress)
    if failed:
        raise RunFailedError("a run that methods start from failed: " + "; ".join(failed.values()))
    folder_of = {
        key: folder for key, folder in zip(distinct, folders, strict=True) if folder is not None
    }
    starts: dict[str, StartFolders] = {}
    for name, of_protocol in tasks.items():
        starts[name] = {
            method: folder_of[repr(task.config.as_dict())] for method, task in of_protocol.items()
        }
    return starts


def _tune(
    protocols: Mapping[str, CompareOptions],
    starts: Mapping[str, StartFolders],
    options: CompareOptions,
    progress: bool,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Train the trials of tuning, and return by protocol and method what the best one changes."""
    candidates = {name: make_trials(own, starts.get(name), name) for name, own in protocols.items()}
    tasks: list[Task] = []
    for trial in itertools.chain.from_iterable(candidates.values()):
        tasks += trial.tasks
    folders, _ = run_all(tasks, options, progress=progress)
    folder_of = {task.label: folder for task, folder in zip(tasks, folders, strict=True)}
    return {
        name: select_best_trials(candidates[name], folder_of, own)
        for name, own in protocols.items()
    }


def _compare_protocol(
    name: str,
    options: CompareOptions,
    runs: Sequence[tuple[Task, Path | None]],
    failed: Mapping[str, str],
) -> Comparison:
    """Compare the finished runs of a protocol.

    Raises:
        RunFailedError: there are none.
    """
    methods: dict[str, list[Any]] = {}
    stored = []
    for task, folder in runs:
        if folder is not None:
            stored.append(finished_run(folder))
            run = load_compared_run(stored[-1], options.evaluation_request)
            methods.setdefault(task.method, []).append(run)
    errors = {task.label: failed[task.label] for task, _ in runs if task.label in failed}
    if not methods:
        raise RunFailedError(
            "every run failed: " + "; ".join(f"{label}: {why}" for label, why in errors.items())
        )
    title = f"{name}: {len(methods)} methods".removeprefix(": ")
    return build_comparison(
        methods,
        title,
        errors,
        reference=options.reference,
        facts=_facts(options, stored),
        given_up=options.options_given_up(),
    )


def _facts(options: CompareOptions, runs: Sequence[StoredRun]) -> dict[str, str]:
    """Return what a report says of how methods were trained, by topic; warn of different versions of the source."""
    tuned = [f"{key} of {', '.join(map(str, values))}" for key, values in options.tune.items()]
    facts = {}
    if options.calibrate:
        facts["rates"] = "learned ones calibrated to the target on held-out data of their own"
    if options.rates:
        facts["requested"] = (
            f"rates {', '.join(f'{rate:g}' for rate in options.rates)}, beside each run's own"
        )
    if options.equal_decoder_passes:
        facts["passes"] = "equal through the decoder: a method of K samples reads 1/K of the texts"
    if options.pretrain:
        sizes = len(
            {repr(task.config.as_dict()) for task in options.make_pretraining_tasks().values()}
        )
        if sizes == 1:
            facts["start"] = "all from one trained model"
        else:
            facts["start"] = f"from {sizes} trained models, by model and codec"
    if tuned:
        facts["tuned"] = f"{'; '.join(tuned)}, on seeds {', '.join(map(str, options.tune_seeds))}"
    versions = describe_versions(runs)
    if versions:
        warn(versions)
        facts["versions"] = versions
    return facts


def parse_comparison_arguments(
    arguments: Sequence[str], kind: type
) -> tuple[dict[str, Any], list[str]]:
    """Parse the arguments of a command line; in ``methods.NAME.key=value``, NAME may hold dots and equals signs.

    Args:
        arguments: arguments as typed.
        kind: dataclass of a comparison's options.

    Returns:
        Nested values, and names of files, as ``read_words`` returns them.

    Raises:
        UserError: a file does not exist, or a value has no place in a configuration.
    """
    _, files = read_words(arguments, kind)
    names: list[str] = []
    for file in files:
        section = load_yaml(config_path(file)).get("methods")
        if isinstance(section, dict):
            names += map(str, section)
    names.sort(key=len, reverse=True)  # the longest name which fits, if one begins like another
    others: list[str] = []
    methods: dict[str, Any] = {}
    for argument in arguments:
        rest = {name: argument.removeprefix(f"methods.{name}.") for name in names}
        name = next((name for name in names if rest[name] != argument and "=" in rest[name]), None)
        if name is None:
            others.append(argument)
        else:
            methods = merge(methods, {name: read_words([rest[name]], Config)[0]})
    updates, files = read_words(others, kind)
    return (merge(updates, {"methods": methods}) if methods else updates), files


def resolve_comparison(
    names: list[str], updates: dict[str, Any], kind: type[Any] = CompareOptions
) -> Any:
    """Return the options of comparison files and the command line.

    Args:
        names: files or names of comparisons, later ones overriding earlier ones.
        updates: nested values of the command line, which override all files.
        kind: class of the options, ``CompareOptions`` or one derived from it.

    Raises:
        UserError: an unknown file, key or value.
    """
    config_keys = {item.name for item in fields(Config)}
    comparison_keys = {item.name for item in fields(CompareOptions)}
    values: dict[str, Any] = {}
    for name in names:
        path = config_path(name)
        section = load_yaml(path)
        if (
            "methods" not in section
            and section.keys() <= config_keys
            and not section.keys() <= comparison_keys
        ):
            raise UserError(
                f"{name} is the configuration of one run, and a comparison needs methods: write a YAML file such as "
                f"{{base: {name}, methods: {{learned: {{}}, uniform: {{agent: {{name: uniform}}}}}}}}, or take the "
                f"methods of another comparison: tokenv compare with compare-quick base={name}"
            )
        check_keys(section, str(path), CompareOptions)
        values = merge(values, _name_methods(section))
    check_keys(updates, COMMAND_LINE, CompareOptions)
    values = merge(values, _name_methods(updates))
    if isinstance(values.get("tune"), dict):  # the command line reads dotted keys as nested ones
        values["tune"] = flatten(values["tune"])
    options = from_dict(kind, as_lists(values))
    check_keys(options.common, "common", Config)
    options.split_protocols()
    return options


def _name_methods(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with names of methods as text, which YAML or the command line may have read as numbers."""
    methods = values.get("methods")
    if isinstance(methods, dict):
        return values | {"methods": {str(k): v for k, v in methods.items()}}
    return values


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


def make_trials(
    options: CompareOptions, starts: Mapping[str, Path] | None, protocol: str = ""
) -> list[Trial]:
    """Return all choices of values to try.

    Args:
        options: options of the comparison.
        starts: method to the folder of its pretrained run.
        protocol: name of the comparison among others.
    """
    trials = []
    request = _loss_only(options.evaluation_request)
    for method, changes in options.selected_methods.items():
        if options.tune:
            own = flatten(merge(options.common, changes))
        else:
            own = {}
        grid = {key: values for key, values in options.tune.items() if key not in own}
        if grid and not is_trainable(options.make_task(method, options.tune_seeds[0]).config.agent):
            grid = {key: values for key, values in grid.items() if not key.startswith(OF_POLICY)}
        if not grid:
            continue
        for values in itertools.product(*grid.values()):
            name = method
            tuned = dict[str, Any]()
            for key, value in zip(grid, values, strict=True):
                name = f"{name}, {key}={value}"
                tuned = merge(tuned, nest_key(key, value))
            start = (starts or {}).get(method)
            tasks = []
            for seed in options.tune_seeds:
                config = options.make_task(method, seed, start=start, changes=tuned).config
                tasks.append(Task(name, _loss_only_config(config), request, protocol))
            trials.append(Trial(method, tuned, tasks))
    return trials


def _loss_only_config(config: Config) -> Config:
    """Return the same run without what only a report shows: tuning reads nothing but the last loss."""
    validation = replace(config.validation, every_symbols=config.train.symbols, calibrate=False)
    return replace(config, validation=validation)


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
        measured = [
            folder and load_evaluation(folder, _loss_only(options.evaluation_request))
            for folder in runs
        ]
        if all(measured):
            loss = float(np.mean([np.mean(each.loss) for each in measured if each]))
            if trial.method not in best or loss < best[trial.method][0]:
                best[trial.method] = (loss, trial.changes)
    return {method: changes for method, (_, changes) in best.items()}
