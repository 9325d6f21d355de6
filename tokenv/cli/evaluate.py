"""``tokenv evaluate``: evaluate a run on held-out data and on downstream tasks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.options import EvaluateOptions, check_text, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.files import merge
from tokenv.config.hardware import prepare
from tokenv.core import trust
from tokenv.core.conversion import from_dict
from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.evaluation.calibration import RatePoint, calibrate, evaluate_rates, split_for_calibration
from tokenv.evaluation.evaluator import EvalOptions, evaluate
from tokenv.evaluation.loaded_run import LoadedRun, load_run, rate_for_flops
from tokenv.evaluation.report import draw_rates, rates_table, write_rates
from tokenv.evaluation.task_formats import load_questions
from tokenv.evaluation.task_scores import score_task
from tokenv.plotting.console import console, summary_table, write_json_output


def evaluate_run(options: EvaluateOptions, _record: Record) -> dict[str, Any]:
    """Evaluate with sampled boundaries, with thresholded ones and, on request, at exactly the target rate."""
    trained = load_run(options.run, options.checkpoint)
    prepare(trained.config.hardware)
    if options.task_names:
        check_text(trained.config)
    trust.allow_named({"data": options.data})
    data = from_dict(DataConfig, merge(asdict(trained.config.data), options.data), "data.")
    tasks = {name: load_questions(name, options.files_of(name), options.limit) for name in options.task_names}
    progress = sys.stderr.isatty()
    how = EvalOptions(options.batch_size, options.seed, tolerance=data.options.boundary_tolerance, progress=progress)
    if options.at_rates:
        return _evaluate_at_rates(trained, data, options, how)
    held_out, calibration = _load_held_out(data, options, options.calibrate)
    ways = {"sampled": how, "thresholded": replace(how, threshold=True)}
    if calibration is not None:
        ways["calibrated"] = replace(how, logit_bias=_find_bias(trained, calibration, how))
    results: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        result = evaluate(trained.components, held_out, way).metrics()
        results[name] = result
        if name == "calibrated":
            result["logit_bias"] = way.logit_bias
        rows = {key: f"{value:.4f}" for key, value in result.items() if value is not None and not math.isnan(value)}
        for task, questions in tasks.items():
            score = score_task(trained.components, questions, way, seq_len=trained.config.data.seq_len)
            result[task] = {key: value for key, value in asdict(score).items() if value is not None}
            rows[f"{task}, {score.questions:,} answers"] = str(score)
        source = data.validation_source or data.source
        title = f"{name} boundaries, {len(held_out)} {options.split} sequences of {source}"
        console().print(summary_table(rows, title=title))
    if len(held_out.document_B.unique()) == 1:
        console().print("No standard error: all sequences are of one document, which tells nothing about others.")
    write_json_output(options.json, results)
    return results


def _evaluate_at_rates(
    trained: LoadedRun, data: DataConfig, options: EvaluateOptions, how: EvalOptions
) -> dict[str, Any]:
    """Evaluate all runs at the requested rates on the same sequences; print a table and write the files."""
    runs = {options.run: trained} | {run: load_run(run, options.checkpoint) for run in options.other_runs}
    _check_same_data(runs)
    weights = options.entropy_weight
    calibrate_all = options.calibrate or bool(weights)
    calibrated = {run for run, each in runs.items() if calibrate_all or each.components.agent.rates is None}
    held_out, calibration = _load_held_out(data, options, bool(calibrated))
    points: list[RatePoint] = []
    for run, each in runs.items():
        rates = options.rates
        if options.flops is not None:
            rates = [rate_for_flops(each.components, options.flops, each.config.data.seq_len)]
        shifted_on = None
        if run in calibrated:
            shifted_on = calibration
        measured = evaluate_rates(
            each.components, each.config, rates, held_out, shifted_on, how, run=run, entropy_weights=weights
        )
        points.extend(point for point, _ in measured)
    unit = trained.components.lm.codec.unit
    title = f"{len(held_out)} {options.split} sequences of {data.source}"
    wide = 110
    if weights:
        wide = 140
    console(wide=wide).print(rates_table(points, unit=unit, title=title))
    if options.out is not None:
        table = Path(f"{options.out}.csv")
        picture = table.with_suffix(".png")
        write_rates(points, table)
        above = f"{options.run}, {title}"
        if options.title is not None:
            above = options.title
        draw_rates(points, picture, unit=unit, title=above, trained=trained.config.rate)
        console().print(f"rates: {table}, {picture}")
    result = {"unit": unit, "points": [asdict(point) for point in points]}
    write_json_output(options.json, result)
    return result


def _check_same_data(runs: Mapping[str, LoadedRun]) -> None:
    """Raise an error unless all runs can be evaluated on the same sequences."""
    first, *_ = runs
    for run, each in runs.items():
        for key in ("kind", "seq_len"):
            one = getattr(runs[first].config.data, key)
            other = getattr(each.config.data, key)
            if one != other:
                raise UserError(
                    f"other_runs: {run} has data.{key} = {other!r}, and {first} has {one!r}: expected the same"
                )


def _find_bias(trained: LoadedRun, calibration: SequenceBatch, how: EvalOptions) -> float:
    rate = trained.config.rate  # for a range the bias is for its mean
    bias = calibrate(trained.components, calibration, rate, how)
    if bias is None:
        name = trained.config.agent["name"]
        raise UserError(f"calibrate = True: no logit bias brings agent {name!r} to rate = {rate:g}: leave it out")
    return bias


def _load_held_out(
    data: DataConfig, options: EvaluateOptions, calibrates: bool
) -> tuple[SequenceBatch, SequenceBatch | None]:
    """Load the sequences to evaluate and, if ``calibrates``, others to calibrate on."""
    corpus = load_corpus(data, progress=sys.stderr.isatty())
    if options.split == "validation":
        if calibrates:
            return split_for_calibration(corpus, options.sequences)
        return corpus.validation(options.sequences), None
    test = corpus.test(options.sequences)
    calibration = None
    if calibrates:
        calibration = corpus.validation(options.sequences)
    return test, calibration


COMMAND = Command("evaluate", partial(resolve_options, EvaluateOptions), evaluate_run, EvaluateOptions)
