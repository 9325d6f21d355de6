"""``tokenv evaluate``: a run's held-out loss, and that of tasks' answers."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from tokenv.cli.options import RunOptions, check_text, resolve_options
from tokenv.cli.sacred import Record, run_experiment
from tokenv.config.convert import check_keys, make
from tokenv.config.files import COMMAND_LINE, merge
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.pieces import SequenceBatch
from tokenv.data.series.windows import load_series
from tokenv.errors import UserError
from tokenv.report.table import console, summary_table
from tokenv.run.calibrate import calibrate, split_for_calibration
from tokenv.run.evaluate import evaluate
from tokenv.run.hardware import prepare
from tokenv.run.stored import Trained, load_run
from tokenv.tasks.formats import check_tasks, load_questions
from tokenv.tasks.score import score


@dataclass(frozen=True)
class EvaluateOptions(RunOptions):
    """Options of ``tokenv evaluate``.

    Args:
        data: overrides of the run's data section, such as ``data.validation_source=PATH``.
        split: ``validation`` or, of series, ``test``.
        sequences: at most so many.
        batch_size: sequences of one pass.
        tasks: downstream tasks to score as well, with commas between: piqa, hellaswag, arc_easy, lambada.
        task_files: local files of tasks that are not to come from the hub: ``task_files.lambada=PATH``, or
            ``"task_files.piqa=['ROWS', 'LABELS']"``.
        questions: at most so many of each task; null for all.
        calibrate: measure a third time, with the policy's logits shifted to exactly its run's target rate on further
            validation sequences, as many again.
    """

    data: dict[str, Any] = field(default_factory=dict)
    split: str = "validation"
    sequences: int = 2048
    batch_size: int = 64
    tasks: str = ""
    task_files: dict[str, Any] = field(default_factory=dict)
    questions: int | None = None
    calibrate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in ("validation", "test"):
            raise UserError(f"split = {self.split!r}: expected validation or test")
        check_keys(self.data, COMMAND_LINE, DataConfig, "data.")
        check_tasks([*self.task_names, *self.task_files])
        for name in ("sequences", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: expected at least 1")
        if self.questions is not None and not (isinstance(self.questions, int) and self.questions >= 1):
            raise UserError(f"questions = {self.questions!r}: expected a whole number of at least 1, or null for all")
        if self.calibrate and self.split != "validation":
            raise UserError(
                f"calibrate = True with split = {self.split!r}: expected split=validation, half of it to calibrate"
            )
        for name, files in self.task_files.items():
            several = isinstance(files, list | tuple) and all(isinstance(file, str) for file in files)
            if not files or not (several or isinstance(files, str)):
                raise UserError(f"task_files.{name} = {files!r}: expected a path, or a list of paths")
            if name not in self.task_names:
                raise UserError(f"task_files.{name} is given, but tasks = {self.tasks!r}: name the task there, too")

    @property
    def task_names(self) -> list[str]:
        """The tasks, one by one."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def files_of(self, task: str) -> list[str]:
        """A task's local files; none where it comes from the hub."""
        files = self.task_files.get(task, [])
        return [files] if isinstance(files, str) else list(files)


def run(arguments: list[str]) -> Any:
    """Run the command: see ``tokenv.cli.main``."""
    return run_experiment("evaluate", arguments, partial(resolve_options, EvaluateOptions), evaluate_run)


def evaluate_run(options: EvaluateOptions, _record: Record) -> dict[str, Any]:
    """Held-out loss and that of tasks' answers: boundaries sampled, thresholded, and at the exact rate if asked."""
    trained = load_run(options.run, options.checkpoint)
    prepare(trained.config.hardware)
    if options.task_names:
        check_text(trained.config)
    data = make(DataConfig, merge(asdict(trained.config.data), options.data), "data.")
    tasks = {name: load_questions(name, options.files_of(name), options.questions) for name in options.task_names}
    progress = sys.stderr.isatty()
    ways: dict[str, dict[str, Any]] = {"sampled": {"threshold": False}, "thresholded": {"threshold": True}}
    if options.calibrate:
        held_out, own = split_for_calibration(load_corpus(data, progress=progress), options.sequences)
        ways["calibrated"] = {"logit_bias": _bias(trained, own, options)}
    else:
        held_out = _held_out(data, options, progress)
    results = {}
    for name, way in ways.items():
        how: dict[str, Any] = {"batch_size": options.batch_size, "seed": options.seed, "progress": progress} | way
        results[name] = evaluate(trained.parts, held_out, tolerance=data.tolerance, **how).metrics()
        results[name] |= {key: value for key, value in way.items() if key == "logit_bias"}
        rows = {key: f"{value:.4f}" for key, value in results[name].items() if value is not None}
        for task, questions in tasks.items():
            scored = score(trained.parts, questions, seq_len=trained.config.data.seq_len, **how)
            results[name][task] = {key: value for key, value in asdict(scored).items() if value is not None}
            rows[f"{task}, {scored.questions:,} answers"] = str(scored)
        whence = data.validation_source or data.source
        title = f"{name} boundaries, {len(held_out)} {options.split} sequences of {whence}"
        console().print(summary_table(rows, title=title))
    return results


def _bias(trained: Trained, own: SequenceBatch, options: EvaluateOptions) -> float:
    rate = trained.config.rate
    bias = calibrate(trained.parts, own, rate, batch_size=options.batch_size, seed=options.seed)
    if bias is None:
        name = trained.config.agent["name"]
        raise UserError(f"calibrate = True: no logit bias brings agent {name!r} to rate = {rate:g}: leave it out")
    return bias


def _held_out(data: DataConfig, options: EvaluateOptions, progress: bool) -> SequenceBatch:
    if options.split == "validation":
        return load_corpus(data, progress=progress).validation(options.sequences)
    if data.kind != "series":
        raise UserError("split = 'test': expected validation, for a corpus of text has no test side")
    return load_series(data).test(options.sequences)
