"""``tokenv train``: train, then store and show what came out."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tokenv.cli.console_log import Heartbeat, start_line
from tokenv.cli.observers import mark_completed
from tokenv.cli.options import TrainOptions, stored_config, take_own
from tokenv.cli.sacred import Command, Record
from tokenv.cli.torchrun import run_distributed
from tokenv.config.components import build_components, check_components
from tokenv.config.conversion import check_keys
from tokenv.config.files import COMMAND_LINE, resolve
from tokenv.config.hardware import busy_warning, peak_resident_memory
from tokenv.config.schema import MAY_CHANGE_ON_RESUME, Config
from tokenv.core.distributed import LostRankError
from tokenv.core.errors import UserError
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.evaluation.boundary_stats import (
    SeriesExcerpt,
    boundary_stats_of_run,
    boundary_stats_over_training,
    make_excerpts,
)
from tokenv.evaluation.evaluator import EvalOptions, evaluate_sequences
from tokenv.evaluation.loaded_run import LoadedRun, load_run, segment
from tokenv.evaluation.report import draw_curves, draw_patches
from tokenv.evaluation.run_state import Evaluation, History, Log, RunState, off_target
from tokenv.evaluation.text_report import (
    boundary_tables,
    passage_facts,
    print_passage,
    to_passage,
    training_table,
    write_pages,
)
from tokenv.plotting.characters import Character, warn
from tokenv.plotting.console import console, summary_table
from tokenv.plotting.terminology import TERMINOLOGY, in_words
from tokenv.storage import checkpoints
from tokenv.training.checkpointing import check_checkpoint
from tokenv.training.process_group import Ranks, init_from_torchrun
from tokenv.training.trainer import train

# A disk that is full, read-only, broken or gone.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENOENT, errno.ESTALE)

DEFAULTS = (
    "no configuration is named: these are the defaults, which take about half an hour on two CPU cores (Ctrl-C stops); "
    "tokenv train with quick takes minutes, and tokenv list configs shows all"
)
LOOKED_AT = 2**17  # bytes of held-out text whose boundaries are told of: seconds, however long sequences are


def resolve_training(names: list[str], updates: dict[str, Any], world: int = 1) -> TrainOptions:
    """Options from configurations, or a run to go on with, and the command line.

    Args:
        names: of configurations.
        updates: to them.
        world: processes that train together.

    Raises:
        UserError: an unknown key or value, or one that may not change when a run is resumed.
        FileNotFoundError: there is no such run.
    """
    resume = take_own(TrainOptions, updates).get("resume")
    if resume is None:
        config = resolve(names, updates)
        check_components(config, world)
        return TrainOptions(config)
    path, base = stored_config("resume", str(resume), names)
    check_keys(updates, COMMAND_LINE, Config)
    changed = [key for key in updates if key not in MAY_CHANGE_ON_RESUME]
    if changed:
        raise UserError(
            f"{changed[0]} cannot change when a run is resumed, or it would not be the same run: "
            f"only {', '.join(MAY_CHANGE_ON_RESUME)} can"
        )
    config = resolve([], updates, base=base)
    check_checkpoint(checkpoints.load(path), config.train, build_components(config, torch.device("meta"), world=world))
    return TrainOptions(config, str(path))


def train_and_show(options: TrainOptions, record: Record, ranks: Ranks | None = None) -> dict[str, Any]:
    """Train, then store and show what came out; as the first of several ranks, if there are some."""
    config, folder, bars = options.config, record.folder, sys.stderr.isatty()
    parts = build_components(config, torch.device("meta"))
    if config == Config():
        console().print(DEFAULTS, soft_wrap=True)
    console().print(start_line(config, parts, folder, options.resume), soft_wrap=True)
    if busy := busy_warning(config.hardware):
        warn(busy)
    started = time.perf_counter()
    keep = record.scratch if folder is None else folder
    resume = None if options.resume is None else checkpoints.load(Path(options.resume))
    logs: list[Log] = [record.log]
    if not bars:
        seen = 0 if resume is None else RunState.from_dict(resume.state).symbols
        logs.append(Heartbeat(config, parts.lm.codec.unit, seen))

    def log(name: str, value: float, symbols: int) -> None:
        for each in logs:
            each(name, value, symbols)

    try:
        last, history = train(config, keep / "checkpoints", log, resume=resume, progress=bars, ranks=ranks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_how_to_go_on(folder)}") from None
    except LostRankError as error:
        raise LostRankError(f"{error}; {_how_to_go_on(folder)}") from error
    except OSError as error:
        if error.errno not in UNWRITABLE or not _within(keep, error.filename):
            raise
        raise UserError(f"{keep}: cannot be written to ({error.strerror}); {_how_to_go_on(folder)}") from error
    seconds = time.perf_counter() - started
    for picture in _show(str(keep), config, last, history, record.scratch, record.title):
        record.add(picture)
    rows = {"time": f"{seconds:.0f} s, peak memory {peak_resident_memory():.2f} GiB"}
    _print_summary(config, last, history, rows if folder is None else rows | {"stored in": _stored_in(config, folder)})
    return last.metrics()


def show_again(options: TrainOptions) -> Callable[[], dict[str, Any]] | None:
    """For a run that has seen all its symbols: makes its pictures and summary again, in its folder.

    A run that was killed before it had told what came out is completed. None for every other run.
    """
    path = None if options.resume is None else Path(options.resume)
    if path is None or path.parent.name != "checkpoints":
        return None
    state = RunState.read(path)
    total = max(options.config.train.symbols, state.config["train"]["symbols"])
    last, folder = state.validation, path.parents[1]
    if last is None or state.symbols < total:
        return None

    def show() -> dict[str, Any]:
        _show(str(path), options.config, last, state.history, folder, f"tokenv run {folder.name}")
        mark_completed(folder, last.metrics(), state.history)
        _print_summary(options.config, last, state.history, {"stored in": _stored_in(options.config, folder)})
        return last.metrics()

    return show


def _how_to_go_on(folder: Path | None) -> str:
    saved = folder is not None and checkpoints.list_complete(folder / "checkpoints")
    return f"go on with: tokenv train with resume={folder}" if saved else "nothing was saved"


def _within(folder: Path, path: str | None) -> bool:
    """Whether an error is of this folder; one while a file is being written names no path."""
    return path is None or folder.absolute() in Path(path).absolute().parents


def _show(run: str, config: Config, last: Evaluation, history: History, folder: Path, title: str) -> tuple[Path, Path]:
    """Draw what came out into a folder; a text is shown, too."""
    trained, picture, curves = (
        load_run(run, "latest", fall_back=False),
        folder / _picture(config),
        folder / "curves.png",
    )
    corpus = load_corpus(config.data)
    if config.data.kind == "series":
        draw_patches(_held_out_patches(trained, corpus), picture, title=title, context=config.data.series.context)
    else:
        passage = _held_out_passage(trained, corpus)
        sequences = max(1, min(256, LOOKED_AT // config.data.seq_len))
        tables = boundary_tables(boundary_stats_of_run(trained, corpus.validation(sequences)))
        tables |= training_table(boundary_stats_over_training(trained, corpus.validation(max(1, sequences // 4))))
        write_pages(picture, {"held-out text": passage}, passage_facts(passage, trained.step), tables)
        print_passage(passage, 700)
    draw_curves(history, curves, title=title, target_rate=config.rate, unit=last.unit)
    return picture, curves


def _picture(config: Config) -> str:
    return "patches.png" if config.data.kind == "series" else "segments.html"


def _stored_in(config: Config, folder: Path) -> str:
    return f"{folder} (curves.png, {_picture(config)}, metrics.json, checkpoints)"


def _held_out_passage(trained: LoadedRun, corpus: Corpus, length: int = 2048) -> list[Character]:
    held_out = corpus.validation(max(1, length // trained.config.data.seq_len))
    return to_passage(segment(trained, bytes(held_out.symbol_BN.flatten()[:length].tolist())))


def _held_out_patches(trained: LoadedRun, corpus: Corpus, count: int = 4) -> list[SeriesExcerpt]:
    batch = corpus.validation(count)
    scores = evaluate_sequences(trained.components, batch, EvalOptions(count))
    return make_excerpts(batch, scores.boundary_prob_BT, scores.action_BT)


def _print_summary(config: Config, last: Evaluation, history: History, more: dict[str, str]) -> None:
    rows = _summary(config, last, history) | more
    console().print(summary_table(rows, title=f"{config.agent['name']} on {config.data.source}"))


def _summary(config: Config, last: Evaluation, history: History) -> dict[str, str]:
    words, unit = TERMINOLOGY[config.data.kind], in_words(last.unit)
    missed = ", which it misses" if off_target(config, last.boundary_rate) else ""
    rows = {
        "validation": f"{last.loss:.4f} ± {last.standard_error:.4f} {unit} (± over {words.document}s; of one seed)",
        "boundary rate": f"{last.boundary_rate:.4f} (target {config.rate:g}{missed})",
        "policy entropy": f"{last.entropy:.4f} nats per decision",
        "training": f"{history['train/flops'][0][-1]:,} {words.symbol}s, {history['train/flops'][1][-1]:.3g} FLOPs",
    }
    if last.loss_early is not None:
        rows["early exit"] = f"{last.loss_early:.4f} {unit}"
    if "data/overlap" in history:
        rows["held-out text"] = f"{history['data/overlap'][1][-1]:.1%} of its 32-byte windows stand in training text"
    if last.boundary_f1 is not None:
        rows["true boundaries"] = (
            f"F1 {last.boundary_f1:.3f} (precision {last.boundary_precision:.3f}, recall {last.boundary_recall:.3f})"
        )
        if config.data.tolerance:
            rows["true boundaries"] += f" within {config.data.tolerance} steps"
    return rows


COMMAND = Command("train", resolve_training, train_and_show, TrainOptions, stored=True, instead=show_again)


def run(arguments: list[str]) -> Any:
    """Run the command, as one of the processes that torchrun started where it did.

    Args:
        arguments: what follows its name on the command line.

    Returns:
        What came out, on the first rank.
    """
    with init_from_torchrun() as ranks:
        if ranks.size == 1:
            return COMMAND.run(arguments)
        shared = partial(resolve_training, world=ranks.size), partial(train_and_show, ranks=ranks)
        return run_distributed(replace(COMMAND, resolve=shared[0], work=shared[1]), arguments, ranks)
