"""``tokenv evaluate``: a run's held-out loss, and that of tasks' answers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.json_output import write_json_output
from tokenv.cli.options import EvaluateOptions, check_text, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.conversion import from_dict
from tokenv.config.files import merge
from tokenv.config.hardware import prepare
from tokenv.core.errors import UserError
from tokenv.data.chunks import SequenceBatch
from tokenv.data.config import DataConfig
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.series.windows import load_series
from tokenv.evaluation.calibration import calibrate, split_for_calibration
from tokenv.evaluation.evaluator import evaluate
from tokenv.evaluation.loaded_run import LoadedRun, load_run
from tokenv.evaluation.rate_curve import RatePoint, evaluate_rates
from tokenv.evaluation.rate_curve_report import draw_rates, rates_table, write_rates
from tokenv.evaluation.requested_rate import rate_for_flops
from tokenv.evaluation.task_formats import load_questions
from tokenv.evaluation.task_scores import score
from tokenv.plotting.console import console, summary_table
from tokenv.storage import trust


def evaluate_run(options: EvaluateOptions, _record: Record) -> dict[str, Any]:
    """Held-out loss and that of tasks' answers: boundaries sampled, thresholded, and at the exact rate if asked."""
    trained = load_run(options.run, options.checkpoint)
    prepare(trained.config.hardware)
    if options.task_names:
        check_text(trained.config)
    trust.allow_named({"data": options.data})
    data = from_dict(DataConfig, merge(asdict(trained.config.data), options.data), "data.")
    tasks = {name: load_questions(name, options.files_of(name), options.limit) for name in options.task_names}
    progress = sys.stderr.isatty()
    if options.at_rates:
        return _at_rates(trained, data, options, progress)
    ways: dict[str, dict[str, Any]] = {"sampled": {"threshold": False}, "thresholded": {"threshold": True}}
    held_out, own = _held_out(data, options, progress, options.calibrate)
    if own is not None:
        ways["calibrated"] = {"logit_bias": _bias(trained, own, options)}
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
    if len(held_out.document_B.unique()) == 1:
        console().print("No standard error: all sequences are of one document, which tells nothing about others.")
    write_json_output(options.json, results)
    return results


def _at_rates(trained: LoadedRun, data: DataConfig, options: EvaluateOptions, progress: bool) -> dict[str, Any]:
    """At every rate that is asked for, all runs on the same text; a table, and files."""
    runs = {options.run: trained} | {run: load_run(run, options.checkpoint) for run in options.other_runs}
    _check_alike(runs)
    always = options.calibrate or bool(options.entropy_weight)
    calibrates = always or any(each.parts.agent.rates is None for each in runs.values())
    held_out, own = _held_out(data, options, progress, calibrates)
    how: dict[str, Any] = {"batch_size": options.batch_size, "seed": options.seed, "progress": progress}
    points: list[RatePoint] = []
    for run, each in runs.items():
        rates = options.rates or [rate_for_flops(each.parts, options.flops or 0.0)]
        used = own if always or each.parts.agent.rates is None else None
        measured = evaluate_rates(
            each.parts, each.config, rates, held_out, used, run=run, doubts=options.entropy_weight, **how
        )
        points += [point for point, _ in measured]
    unit, title = trained.parts.lm.codec.unit, f"{len(held_out)} {options.split} sequences of {data.source}"
    console(wide=140 if options.entropy_weight else 110).print(rates_table(points, unit=unit, title=title))
    if options.out is not None:
        table, picture = Path(f"{options.out}.csv"), Path(f"{options.out}.png")
        write_rates(points, table)
        draw_rates(points, picture, unit=unit, title=f"{options.run}, {title}", trained=trained.config.rate)
        console().print(f"rates: {table}, {picture}")
    result = {"unit": unit, "points": [asdict(point) for point in points]}
    write_json_output(options.json, result)
    return result


def _check_alike(runs: Mapping[str, LoadedRun]) -> None:
    """Refuse runs that cannot be measured on one text."""
    first, *_ = runs
    for run, each in runs.items():
        for key in ("kind", "seq_len"):
            one, other = (getattr(of.config.data, key) for of in (runs[first], each))
            if one != other:
                raise UserError(
                    f"other_runs: {run} has data.{key} = {other!r}, and {first} has {one!r}: expected the same"
                )


def _bias(trained: LoadedRun, own: SequenceBatch, options: EvaluateOptions) -> float:
    rate = trained.config.rate  # of a range the bias is for its mean
    bias = calibrate(trained.parts, own, rate, batch_size=options.batch_size, seed=options.seed)
    if bias is None:
        name = trained.config.agent["name"]
        raise UserError(f"calibrate = True: no logit bias brings agent {name!r} to rate = {rate:g}: leave it out")
    return bias


def _held_out(
    data: DataConfig, options: EvaluateOptions, progress: bool, calibrates: bool
) -> tuple[SequenceBatch, SequenceBatch | None]:
    """What is measured, and other sequences to calibrate on, if asked for."""
    if options.split == "validation":
        corpus = load_corpus(data, progress=progress)
        if calibrates:
            return split_for_calibration(corpus, options.sequences)
        return corpus.validation(options.sequences), None
    if data.kind != "series":
        raise UserError("split = 'test': expected validation, for a corpus of text has no test side")
    series = load_series(data)
    own = Corpus(series, data).validation(options.sequences) if calibrates else None
    return series.test(options.sequences), own


COMMAND = Command("evaluate", partial(resolve_options, EvaluateOptions), evaluate_run, EvaluateOptions)
run = COMMAND.run
