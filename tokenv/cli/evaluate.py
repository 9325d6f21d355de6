"""``tokenv evaluate``: a run's held-out loss, and that of tasks' answers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from tokenv.cli.options import EvaluateOptions, check_text, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.convert import make
from tokenv.config.files import merge
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.pieces import SequenceBatch
from tokenv.data.series.windows import load_series
from tokenv.errors import UserError
from tokenv.report.table import console, summary_table
from tokenv.run.evaluate import evaluate
from tokenv.run.hardware import prepare
from tokenv.run.stored import load_run
from tokenv.tasks.formats import load_questions
from tokenv.tasks.score import score


def evaluate_run(options: EvaluateOptions, _record: Record) -> dict[str, Any]:
    """Held-out loss and that of tasks' answers, with sampled and with thresholded boundaries."""
    trained = load_run(options.run, options.checkpoint)
    prepare(trained.config.hardware)
    if options.task_names:
        check_text(trained.config)
    data = make(DataConfig, merge(asdict(trained.config.data), options.data), "data.")
    tasks = {name: load_questions(name, options.files_of(name), options.questions) for name in options.task_names}
    progress = sys.stderr.isatty()
    held_out = _held_out(data, options, progress)
    results = {}
    for name, threshold in (("sampled", False), ("thresholded", True)):
        how: dict[str, Any] = {
            "batch_size": options.batch_size,
            "seed": options.seed,
            "threshold": threshold,
            "progress": progress,
        }
        results[name] = evaluate(trained.parts, held_out, tolerance=data.tolerance, **how).metrics()
        rows = {key: f"{value:.4f}" for key, value in results[name].items() if value is not None}
        for task, questions in tasks.items():
            scored = score(trained.parts, questions, seq_len=trained.config.data.seq_len, **how)
            results[name][task] = {key: value for key, value in asdict(scored).items() if value is not None}
            rows[f"{task}, {scored.questions:,} answers"] = str(scored)
        whence = data.validation_source or data.source
        title = f"{name} boundaries, {len(held_out)} {options.split} sequences of {whence}"
        console().print(summary_table(rows, title=title))
    return results


def _held_out(data: DataConfig, options: EvaluateOptions, progress: bool) -> SequenceBatch:
    if options.split == "validation":
        return load_corpus(data, progress=progress).validation(options.sequences)
    if data.kind != "series":
        raise UserError("split = 'test': expected validation, for a corpus of text has no test side")
    return load_series(data).test(options.sequences)


COMMAND = Command("evaluate", partial(resolve_options, EvaluateOptions), evaluate_run)
run = COMMAND.run
