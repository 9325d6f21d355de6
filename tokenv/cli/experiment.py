"""The Sacred experiments behind the commands of ``tokenv``: configuration, storage, and what is printed."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from docopt import docopt

from tokenv.bench.measure import BenchOptions, peak_resident_memory
from tokenv.cli.commands import (
    continue_text,
    evaluate_run,
    forecast_series,
    show_bench,
    show_segments,
    write_page,
)
from tokenv.cli.options import EvaluateOptions, ForecastOptions, GenerateOptions, SegmentOptions, TrainOptions
from tokenv.compare.command import check_methods, compare_methods
from tokenv.compare.options import CompareOptions, resolve_comparison
from tokenv.compare.report.tables import print_comparison
from tokenv.compare.report.write import write_report
from tokenv.config.convert import check_keys, make
from tokenv.config.files import COMMAND_LINE, resolve
from tokenv.config.schema import MAY_CHANGE_ON_RESUME, Config
from tokenv.data.corpus import load_corpus
from tokenv.errors import nearest
from tokenv.report.curves import draw_curves
from tokenv.report.html import Passage
from tokenv.report.series import draw_patches
from tokenv.report.table import console, summary_table
from tokenv.report.terminal import coloured_text
from tokenv.report.words import WORDS, in_words
from tokenv.run.build import learns
from tokenv.run.evaluate import Evaluation
from tokenv.run.parts import check_parts
from tokenv.run.stored import Trained, check_text, held_out_patches, load_run, probability_scale, segment
from tokenv.run.train import History, train
from tokenv.storage import checkpoints
from tokenv.variance.lab import compare
from tokenv.variance.options import VarianceOptions
from tokenv.variance.report import draw_cost, draw_credit, draw_progress, print_variance, write_csv

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="pkg_resources is deprecated", category=UserWarning)
    from sacred import SETTINGS, Experiment
    from sacred.arg_parser import get_config_updates
    from sacred.observers import FileStorageObserver
    from sacred.run import Run
    from sacred.utils import apply_backspaces_and_linefeeds

SETTINGS.CAPTURE_MODE = "sys"
SETTINGS.DISCOVER_SOURCES = "none"  # ours are named below; an installed tokenv must not copy site-packages
SETTINGS.CONFIG.READ_ONLY_CONFIG = False
RUNS = "runs"
OPTIONS_FILE = "options.json"
STORAGE_FLAGS = ("--file_storage", "--mongo_db", "--sql", "--tiny_db", "--s3", "--unobserved")


@dataclass(frozen=True)
class Command:
    """One word after ``tokenv``."""

    function: Callable[[Any, Run], Any]
    resolve: Callable[[list[str], dict[str, Any]], Any]
    stored: bool = False


def run_command(name: str, arguments: list[str]) -> Any:
    """Run a command as a Sacred experiment.

    Args:
        name: such as ``train``.
        arguments: what follows on the command line, in Sacred's grammar.

    Raises:
        ValueError: unknown command, key or value.
    """
    if name not in COMMANDS:
        raise ValueError(f"unknown command {name!r}: {nearest(name, [*COMMANDS, 'configs'])}")
    command = COMMANDS[name]
    package = Path(__file__).parents[2]
    experiment = Experiment(f"tokenv-{name}", base_dir=package)
    experiment.captured_out_filter = apply_backspaces_and_linefeeds  # keep a progress bar's last state only
    for room in ("tokenv", "agents", "estimators"):
        for source in sorted((package / room).rglob("*.py")):
            experiment.add_source_file(str(source))

    @experiment.main
    def main(_config: dict[str, Any], _run: Run) -> Any:
        return command.function(holder[0], _run)

    usage = experiment.get_usage(f"tokenv-{name}")[2]
    options = docopt(usage, arguments, default_help=False)
    updates, names = get_config_updates(options["UPDATE"])
    if options["help"] or options.get("--help"):
        print(experiment.get_usage(f"tokenv {name}")[0])
        return None
    holder = [command.resolve(names, updates)]
    values = holder[0]
    experiment.add_config(values.as_dict() if hasattr(values, "as_dict") else asdict(values))
    if command.stored and not any(options.get(flag) for flag in STORAGE_FLAGS):
        experiment.observers.append(FileStorageObserver(RUNS, copy_sources=True))
    return experiment.run(options.get("COMMAND"), options=options).result


def _resolve_training(names: list[str], updates: dict[str, Any]) -> TrainOptions:
    resume = updates.pop("resume", None)
    if resume is None:
        config = resolve(names, updates)
        check_parts(config)
        return TrainOptions(config)
    if names:
        raise ValueError(f"resume={resume} brings its own configuration: drop {', '.join(names)}")
    changed = [key for key in updates if key not in MAY_CHANGE_ON_RESUME]
    check_keys(updates, COMMAND_LINE, Config)
    if changed:
        raise ValueError(
            f"{changed[0]} cannot change when a run is resumed, or it would not be the same run: "
            f"only {', '.join(MAY_CHANGE_ON_RESUME)} can"
        )
    path = checkpoints.find(str(resume))
    return TrainOptions(resolve([], updates, base=checkpoints.load_state(path)["config"]), str(path))


def _resolve_bench(names: list[str], updates: dict[str, Any]) -> BenchOptions:
    own = {key: updates.pop(key) for key in ("repeats", "stepping") if key in updates}
    config = resolve(names, updates)
    check_text(config)
    return BenchOptions(config, **own)


def _resolve_variance(names: list[str], updates: dict[str, Any]) -> VarianceOptions:
    own = {f.name: updates.pop(f.name) for f in fields(VarianceOptions) if f.name != "config" and f.name in updates}
    base = None
    if own.get("resume"):
        stored = Path(str(own["resume"])) / OPTIONS_FILE
        if not stored.is_file():
            raise FileNotFoundError(f"resume = {own['resume']!r}: expected the folder of an unfinished comparison")
        values = json.loads(stored.read_text())
        base, own = values.pop("config"), values | own
    if own.get("run"):
        if names:
            raise ValueError(f"run={own['run']} brings its own configuration: drop {', '.join(names)}")
        base = checkpoints.load_state(checkpoints.find(str(own["run"])))["config"]
    config = resolve(names, updates, base=base)
    check_text(config)
    options = make(VarianceOptions, {**own, "config": config.as_dict()})
    check_parts(config)
    if not learns(config.agent):
        raise ValueError(f"agent.name = {config.agent['name']!r} has no policy: expected an agent that learns")
    return options


def _resolve_options(kind: type) -> Callable[[list[str], dict[str, Any]], Any]:
    def resolve_options(names: list[str], updates: dict[str, Any]) -> Any:
        if names:
            raise ValueError(f"{names[0]!r} is no option: expected key=value, such as run=runs/1")
        check_keys(updates, COMMAND_LINE, kind)
        # Sacred reads text=42 as a number; what should be text stays what was typed.
        texts = {name for name, hint in get_type_hints(kind).items() if hint in (str, str | None)}
        typed = {key: str(value) if key in texts and value is not None else value for key, value in updates.items()}
        return make(kind, typed)

    return resolve_options


def _folder(run: Run) -> Path | None:
    """Where a run's files go: its FileStorage folder, or one of its own; None if the run is not stored."""
    for observer in run.observers:
        if isinstance(observer, FileStorageObserver):
            return Path(observer.dir)
    return Path(RUNS) / str(run._id) if run.observers else None


def _resolve_comparison(names: list[str], updates: dict[str, Any]) -> CompareOptions:
    options = resolve_comparison(names, updates)
    check_methods(options)
    return options


def _train(options: TrainOptions, run: Run) -> dict[str, Any]:
    """Train, then store and show what came out."""
    config, folder = options.config, _folder(run)
    progress = sys.stderr.isatty()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        keep = Path(scratch) if folder is None else folder
        resume = None if options.resume is None else checkpoints.load(Path(options.resume))
        try:
            last, history = train(config, keep / "checkpoints", run.log_scalar, resume=resume, progress=progress)
        except KeyboardInterrupt:
            saved = checkpoints.complete(keep / "checkpoints")
            where = "nothing was saved" if folder is None or not saved else "go on with: tokenv train with "
            raise KeyboardInterrupt(f"stopped; {where}" + (f"resume={folder}" if folder and saved else "")) from None
        seconds = time.perf_counter() - started
        trained = load_run(str(keep), "latest")
        pages = Path(scratch)
        if config.data.kind == "series":
            passage, picture = [], "patches.png"
            draw_patches(held_out_patches(trained), pages / picture, title=f"tokenv run {run._id}")
        else:
            passage, picture = _held_out_passage(trained), "segments.html"
            write_page(pages / picture, [Passage("held-out text", passage)], trained, {})
        draw_curves(
            history, pages / "curves.png", title=f"tokenv run {run._id}", target_rate=config.rate, unit=last.unit
        )
        for name in (picture, "curves.png"):
            run.add_artifact(pages / name, name)
    if passage:
        console().print(coloured_text(passage[:700], scale=probability_scale(passage)))
    _print_summary(config, last, history, seconds, folder, picture)
    return last.metrics()


def _held_out_passage(trained: Trained, length: int = 2048) -> list[Any]:
    held_out = load_corpus(trained.config.data).validation(max(1, length // trained.config.data.seq_len))
    return segment(trained, bytes(held_out.symbol_BN.flatten()[:length].tolist()))


def _print_summary(
    config: Config, last: Evaluation, history: History, seconds: float, folder: Path | None, picture: str
) -> None:
    symbol, unit = WORDS[config.data.kind].symbol, in_words(last.unit)
    rows = {
        "validation": f"{last.loss:.4f} ± {last.standard_error:.4f} {unit}",
        "early exit": f"{last.loss_early:.4f} {unit}",
        "boundary rate": f"{last.boundary_rate:.4f} (target {config.rate:g})",
        "policy entropy": f"{last.entropy:.4f} nats per decision",
        "training": f"{history['train/flops'][0][-1]:,} {symbol}s, {history['train/flops'][1][-1]:.3g} FLOPs",
        "time": f"{seconds:.0f} s, peak memory {peak_resident_memory():.2f} GiB",
    }
    if last.boundary_f1 is not None:
        rows["true boundaries"] = (
            f"F1 {last.boundary_f1:.3f} (precision {last.boundary_precision:.3f}, recall {last.boundary_recall:.3f})"
        )
        if config.data.tolerance:
            rows["true boundaries"] += f" within {config.data.tolerance} steps"
    if folder is not None:
        rows["stored in"] = f"{folder} (curves.png, {picture}, metrics.json, checkpoints)"
    console().print(summary_table(rows, title=f"{config.agent['name']} on {config.data.source}"))


def _variance(options: VarianceOptions, run: Run) -> dict[str, Any]:
    """Compare gradient estimators; store and show what came out."""
    progress = sys.stderr.isatty()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.resume) if options.resume else (_folder(run) or Path(scratch)) / "variance"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / OPTIONS_FILE).write_text(json.dumps(asdict(options)))
        try:
            result = compare(options, folder, progress)
        except KeyboardInterrupt:
            kept = options.resume or _folder(run) is not None
            how = f"go on with: tokenv variance with resume={folder}" if kept else "nothing was saved"
            raise KeyboardInterrupt(f"stopped; {how}") from None
        write_csv(result, folder / "variance.csv")
        draw_progress(result, folder / "progress.png")
        draw_cost(result, folder / "cost.png")
        draw_credit(result, folder / "credit.png")
        for name in ("variance.json", "variance.csv", "progress.png", "cost.png", "credit.png"):
            if (folder / name).is_file():
                run.add_artifact(folder / name, name)
        print_variance(result)
        if not options.resume and _folder(run) is not None:
            console().print(f"stored in {folder}")
    return {label: cost["flops"] for label, cost in result["costs"].items()}


def _compare(options: CompareOptions, run: Run) -> dict[str, Any]:
    """Have all runs of a comparison, then draw its report."""
    comparison = compare_methods(options, progress=sys.stderr.isatty())
    with tempfile.TemporaryDirectory() as scratch:
        for path in write_report(comparison, Path(scratch)):
            run.add_artifact(path, path.name)
    print_comparison(comparison)
    folder = _folder(run)
    if folder is not None:
        console().print(f"report: {folder / 'report.html'}")
    if comparison.failed:
        raise RuntimeError(f"{len(comparison.failed)} runs failed; the report is drawn without them")
    return {method.name: method.loss for method in comparison.methods}


COMMANDS: dict[str, Command] = {
    "train": Command(_train, _resolve_training, stored=True),
    "segment": Command(show_segments, _resolve_options(SegmentOptions)),
    "generate": Command(continue_text, _resolve_options(GenerateOptions)),
    "compare": Command(_compare, _resolve_comparison, stored=True),
    "variance": Command(_variance, _resolve_variance, stored=True),
    "evaluate": Command(evaluate_run, _resolve_options(EvaluateOptions)),
    "forecast": Command(forecast_series, _resolve_options(ForecastOptions)),
    "bench": Command(show_bench, _resolve_bench),
}
