"""``tokenv train``: train, then store and show the results; in one process, or in those which torchrun started."""

import errno
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from tokenv.cli.observers import mark_completed
from tokenv.cli.sacred import source_files
from tokenv.compare.locks import holding_if_free
from tokenv.config.commands import Record
from tokenv.config.components import Components, build_components
from tokenv.config.files import flatten
from tokenv.config.hardware import (
    busy_warning,
    peak_resident_memory,
    resolve_device,
    resolve_precision,
)
from tokenv.config.registry import plugins
from tokenv.config.schema import Config
from tokenv.core import checkpoints
from tokenv.core.distributed import LostRankError
from tokenv.core.errors import RunFailedError, UserError
from tokenv.data.corpus import Corpus, load_corpus, reading_once
from tokenv.evaluation.boundary_stats import boundary_stats_of_run, boundary_stats_over_training
from tokenv.evaluation.loaded_run import LoadedRun, load_run, segment
from tokenv.evaluation.report import draw_curves
from tokenv.evaluation.run_state import Evaluation, History, RunState, off_target
from tokenv.evaluation.text_report import (
    boundary_tables,
    passage_facts,
    print_passage,
    to_passage,
    training_table,
    write_pages,
)
from tokenv.plotting.characters import Character
from tokenv.plotting.console import console, summary_table, warn
from tokenv.plotting.theme import in_words, with_error
from tokenv.training.process_group import Ranks, RanksError
from tokenv.training.trainer import train

# The disk is full, read-only, broken or gone.
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES),
    *(errno.EPERM, errno.EIO, errno.ENOENT, errno.ESTALE),
)
DEFAULTS = (
    "no configuration is named: these are the defaults, which take about half an hour on two CPU cores (Ctrl-C stops); "
    "tokenv train with quick takes minutes, and tokenv list configs shows all"
)
# bytes of held-out text in the boundary statistics: seconds of work for any sequence length
STATS_BYTES = 2**17


def train_and_show(
    config: Config,
    resume: str | None,
    title: str | None,
    record: Record,
    ranks: Ranks | None = None,
) -> dict[str, Any]:
    """Train, then store and show the results, and let comparisons wait for the run.

    Args:
        config: configuration of the run.
        resume: checkpoint to resume from; None for a new run.
        title: title of the run's pictures; None for the record's.
        record: record of the run.
        ranks: processes which train together, if several do.
    """
    if record.folder is None:
        return _train_and_show(config, resume, title, record, ranks)
    with holding_if_free(config, record.folder.parent):
        return _train_and_show(config, resume, title, record, ranks)


@reading_once()
def _train_and_show(
    config: Config, resumed: str | None, title: str | None, record: Record, ranks: Ranks | None
) -> dict[str, Any]:
    folder = record.folder
    components = build_components(config, torch.device("meta"), read_files=resumed is None)
    if config == Config():
        console().print(DEFAULTS, soft_wrap=True)
    console().print(describe_run(config, components, folder, resumed), soft_wrap=True)
    if busy := busy_warning(config.hardware):
        warn(busy)
    started = time.perf_counter()
    work_folder = folder or record.scratch
    resume = load_resumed(resumed)
    try:
        last, history = train(
            config,
            work_folder / "checkpoints",
            record.log,
            resume=resume,
            progress=True,
            ranks=ranks,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_resume_hint(folder)}") from None
    except LostRankError as error:
        raise LostRankError(f"{error}; {_resume_hint(folder)}") from error
    except OSError as error:
        if error.errno not in DISK_ERRORS or not _is_within(work_folder, error.filename):
            raise
        message = f"{work_folder}: cannot be written to ({error.strerror}); {_resume_hint(folder)}"
        raise UserError(message) from error
    seconds = time.perf_counter() - started
    if title is None:
        title = record.title
    for picture in _show(str(work_folder), config, last, history, record.scratch, title):
        record.add(picture)
    rows = {"time": f"{seconds:.0f} s, peak memory {peak_resident_memory():.2f} GiB"}
    if folder is not None:
        rows["stored in"] = _stored_in(config, folder)
    _print_summary(config, last, history, rows)
    return last.metrics()


def load_resumed(resume: str | None) -> checkpoints.Checkpoint | None:
    """Return the checkpoint from which a run is resumed; None for a new run."""
    if resume is None:
        return None
    return checkpoints.load(Path(resume))


def show_again(config: Config, resume: str | None) -> Callable[[], dict[str, Any]] | None:
    """Return a function which draws and prints the results of a finished run again; None for an unfinished run.

    It also completes the files of a run which was killed between its last step and the end of its report.
    """
    if resume is None:
        return None
    path = Path(resume)
    if path.parent.name != "checkpoints":
        return None
    state = RunState.read(path)
    total = max(config.train.symbols, state.config["train"]["symbols"])
    last = state.validation
    folder = path.parents[1]
    if last is None or state.symbols < total:
        return None

    def show() -> dict[str, Any]:
        _show(str(path), config, last, state.history, folder, f"tokenv run {folder.name}")
        mark_completed(folder, last.metrics(), state.history)
        rows = {"stored in": _stored_in(config, folder)}
        _print_summary(config, last, state.history, rows)
        return last.metrics()

    return show


def _resume_hint(folder: Path | None) -> str:
    if folder is None or not checkpoints.list_complete(folder / "checkpoints"):
        return "nothing was saved"
    return f"resume it with: tokenv train with resume={folder}"


def _is_within(folder: Path, path: str | None) -> bool:
    """Return whether an error is about a file in this folder; an error while a file is being written has no path."""
    return path is None or folder.absolute() in Path(path).absolute().parents


def _show(
    run: str, config: Config, last: Evaluation, history: History, folder: Path, title: str
) -> tuple[Path, Path]:
    """Draw the results into a folder, and print a passage of text with its boundaries."""
    trained = load_run(run, "latest", fall_back=False)
    kind = config.data.options
    picture = folder / kind.picture
    curves = folder / "curves.png"
    corpus = load_corpus(config.data)
    if kind.draw_picture is not None:
        draw = resolve_name(kind.draw_picture)
        draw(trained, corpus, picture, title=title)
    else:
        passage = _held_out_passage(trained, corpus)
        sequences = max(
            1, min(256, config.validation.sequences, STATS_BYTES // config.data.seq_len)
        )
        stats = boundary_stats_of_run(trained, corpus.validation(sequences))
        fewer = corpus.validation(max(1, sequences // 4))
        stats_over_training = boundary_stats_over_training(trained, fewer)
        tables = boundary_tables(stats) | training_table(stats_over_training)
        facts = passage_facts(passage, trained.state.step)
        write_pages(picture, {"held-out text": passage}, facts, tables)
        print_passage(passage, 700)
    draw_curves(history, curves, title=title, target_rate=config.rate, unit=last.unit)
    return picture, curves


def _stored_in(config: Config, folder: Path) -> str:
    return f"{folder} (curves.png, {config.data.options.picture}, metrics.json, checkpoints)"


def _held_out_passage(trained: LoadedRun, corpus: Corpus, length: int = 2048) -> list[Character]:
    sequences = max(1, length // trained.config.data.seq_len)
    symbol_N = corpus.validation(sequences).symbol_BN.flatten()[:length]
    text = bytes(symbol_N.tolist())
    return to_passage(segment(trained, text))


def _print_summary(
    config: Config, last: Evaluation, history: History, more: dict[str, str]
) -> None:
    rows = _summary(config, last, history) | more
    console().print(summary_table(rows, title=f"{config.agent['name']} on {config.data.source}"))


def _summary(config: Config, last: Evaluation, history: History) -> dict[str, str]:
    words = config.data.options.words
    unit = in_words(last.unit)
    missed = ", which it misses" * off_target(config, last.boundary_rate)
    symbols, flops = (values[-1] for values in history["train/flops"])
    linear = history["train/flops_linear"][1][-1]
    spread = f"± over {words.document}s; of one seed"
    if math.isnan(last.standard_error):
        spread = f"of one seed and one {words.document}, without a standard error"
    rows = {
        "validation": f"{with_error(last.loss, last.standard_error)} {unit} ({spread})",
        "boundary rate": f"{last.boundary_rate:.4f} (target {config.rate:g}{missed})",
        "policy entropy": f"{last.entropy:.4f} nats per decision",
        "training": f"{symbols:,} {words.symbol}s, {flops:.3g} FLOPs ({linear:.3g} without attention)",
    }
    if last.imitation_bits is not None:
        rows["imitation"] = f"{last.imitation_bits:.4f} bits per {words.symbol}"
    if last.loss_early is not None:
        rows["early exit"] = f"{last.loss_early:.4f} {unit}"
    if "data/overlap" in history:
        rows["held-out text"] = (
            f"{history['data/overlap'][1][-1]:.1%} of its 32-byte windows stand in training text"
        )
    if last.boundary_f1 is not None:
        rows["true boundaries"] = (
            f"F1 {last.boundary_f1:.3f} (precision {last.boundary_precision:.3f}, recall {last.boundary_recall:.3f})"
        )
        if config.data.options.boundary_tolerance:
            rows["true boundaries"] += f" within {config.data.options.boundary_tolerance} steps"
    return rows


def describe_run(
    config: Config, components: Components, folder: Path | None, resume: str | None = None
) -> str:
    """Return one line on a run: its folder, data, size, agent and estimator, hardware and seed.

    Args:
        config: configuration of the run.
        components: its model and agent, on any device.
        folder: folder in which the run is stored; None if it is not stored.
        resume: checkpoint from which the run is resumed.
    """
    device = resolve_device(config.hardware.device)
    precision = str(resolve_precision(config.hardware.precision, device)).removeprefix("torch.")
    learner = "which does not learn"
    if components.agent.trainable:
        learner = f"estimator {config.estimator['name']}"
    place = "not stored"
    if folder is not None:
        place = str(folder)
    if resume is not None:
        place += f" (from {resume})"
    data = config.data
    symbols = data.options.words.symbol
    facts = [
        place,
        f"{config.train.symbols:,} {symbols}s of {data.source}, {data.seq_len} a sequence",
        f"{_count_parameters(components.lm):,} parameters, {_count_parameters(components.agent):,} of the agent",
        f"agent {config.agent['name']}, {learner}, rate {config.rate:g}",
        f"{device}, {precision}, seed {config.seed}",
    ]
    return " · ".join(facts)


def _count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def train_only(config: Config, resume: str | None, ranks: Ranks) -> None:
    """Train as a rank which is not the first one: it stores and shows nothing."""
    train(config, Path(), lambda *_: None, resume=load_resumed(resume), ranks=ranks)


def shared_facts(config: Config, resume: str | None) -> dict[str, Any]:
    """Return what must be equal on all ranks, by name."""
    values = config.as_dict()
    files = source_files()
    for plugin in plugins(values):
        files += plugin.files()
    code = hashlib.sha256()
    for path in files:
        code.update(path.read_bytes())
    return flatten(values) | {
        "resume": resume and Path(resume).name,
        "the digest of the code": code.hexdigest()[:16],
        "torch": torch.__version__,
    }


@contextmanager
def report_errors_once(ranks: Ranks) -> Iterator[None]:
    """Let only the first rank report an error which all ranks raise, or which it has received from another rank.

    The others end with status 0, since torchrun ends all as soon as one fails, and the first may still be writing.
    """
    try:
        yield
    except LostRankError:
        if ranks.is_first:
            raise
        raise SystemExit(1) from None
    except (KeyboardInterrupt, RunFailedError, RanksError):
        if ranks.is_first:
            raise
        raise SystemExit(0) from None
