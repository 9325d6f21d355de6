"""``tokenv evaluate``: evaluate a run on held-out data and on downstream tasks."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenv.config.commands import Record, check_kind
from tokenv.config.files import COMMAND_LINE, merge
from tokenv.core import trust
from tokenv.core.atomic import output
from tokenv.core.conversion import check_keys, from_dict
from tokenv.core.errors import COUNT, COUNT_OR_NULL, UserError, bounds, choice
from tokenv.core.rates import FLOPS, check_rates
from tokenv.data.config import DataConfig
from tokenv.evaluation.run_command import RunCommand
from tokenv.evaluation.task_formats import check_tasks, load_questions
from tokenv.plotting.console import console, summary_table, write_json_output

if TYPE_CHECKING:
    from tokenv.core.sequences import SequenceBatch
    from tokenv.evaluation.evaluator import EvalOptions
    from tokenv.evaluation.loaded_run import LoadedRun

# Larger ones outweigh the policy.
ENTROPY_WEIGHTS = bounds(
    "logits per nat, from -4 to 4", lambda weights: all(abs(each) <= 4 for each in weights)
)


@dataclass(frozen=True)
class Evaluate(RunCommand):
    """Measure bits per byte on held-out text: ``with run=runs/7``; and answers, with ``tasks=piqa,lambada``.

    Args:
        json: file for all results, in addition to what is printed; null for none.
        data: changes of the run's data section, such as ``data.validation_source=PATH``.
        split: ``validation`` or, for series, ``test``.
        sequences: maximum number of sequences.
        batch_size: sequences per forward pass.
        tasks: downstream tasks to score in addition, separated by commas: piqa, hellaswag, arc_easy, lambada.
        task_files: local files of tasks, in place of the Hugging Face Hub: ``task_files.lambada=PATH``, or
            ``"task_files.piqa=['ROWS', 'LABELS']"``.
        limit: maximum number of questions of each task; null for all.
        calibrate: evaluate a third time, with the policy's logits shifted to exactly the run's target rate on as many
            further validation sequences.
        rates: evaluate at each of these boundaries per symbol instead, such as [0.05, 0.1, 0.2]. A run which was
            trained for a range of rates is given them; with calibrate=True, and always for a run of one rate, the
            logits are shifted to them.
        flops: evaluate at the rate with this budget of floating-point operations per symbol; null for none.
        entropy_weight: evaluate at these rates again, with logits raised by each of these numbers per nat of the early
            exit's entropy and calibrated to the same rate: as many tokens, but more of them where it is uncertain.
        other_runs: further runs to evaluate at these rates, on the same sequences and in the same picture.
        out: name of the files with the results at rates, without their endings .csv and .png; null for none.
        title: title of the picture; empty for none, null for one which names the run.
    """

    json: str | None = field(default=None, metadata=output())
    data: dict[str, Any] = field(default_factory=dict, metadata={"holds": DataConfig})
    split: str = field(default="validation", metadata=choice("validation", "test"))
    sequences: int = field(default=2048, metadata=COUNT)
    batch_size: int = field(default=64, metadata=COUNT)
    tasks: str = ""
    task_files: dict[str, Any] = field(default_factory=dict, metadata={"each": list[str] | str})
    limit: int | None = field(default=None, metadata=COUNT_OR_NULL)
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    flops: float | None = field(default=None, metadata=FLOPS)
    entropy_weight: list[float] = field(default_factory=list, metadata=ENTROPY_WEIGHTS)
    other_runs: list[str] = field(default_factory=list)
    out: str | None = field(default="rates", metadata=output(".csv", ".png"))
    title: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rates(self.rates)
        if self.flops is not None and self.rates:
            raise UserError(
                f"flops = {self.flops:g} and rates = {self.rates!r}: expected one of them"
            )
        if self.other_runs and not self.at_rates:
            raise UserError(
                f"other_runs = {self.other_runs!r}: expected rates or flops beside it, at which runs are compared"
            )
        if self.entropy_weight and not self.at_rates:
            raise UserError(
                f"entropy_weight = {self.entropy_weight!r}: expected rates or flops beside it, what is spent by it"
            )
        if self.tasks and self.at_rates:
            raise UserError(
                "tasks are scored at a run's own rate: leave out rates and flops, or tasks"
            )
        if self.calibrate and self.split != "validation":
            raise UserError(
                f"calibrate = True with split = {self.split!r}: expected split=validation, half of it to calibrate"
            )
        check_keys(self.data, COMMAND_LINE, DataConfig, "data.")
        check_tasks([*self.task_names, *self.task_files])
        for name, files in self.task_files.items():
            if not files:
                raise UserError(
                    f"task_files.{name} = {files!r}: expected a path, or a list of paths"
                )
            if name not in self.task_names:
                raise UserError(
                    f"task_files.{name} is given, but tasks = {self.tasks!r}: name the task there, too"
                )

    @property
    def at_rates(self) -> bool:
        """Whether the run is evaluated at requested rates."""
        return bool(self.rates) or self.flops is not None

    @property
    def task_names(self) -> list[str]:
        """Names of the tasks."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]

    def files_of(self, task: str) -> list[str]:
        """Return the local files of a task; none if it is read from the Hub."""
        files = self.task_files.get(task, [])
        return [files] if isinstance(files, str) else list(files)

    def work(self, _record: Record) -> dict[str, Any]:
        """Evaluate with sampled boundaries, with thresholded ones and, on request, at exactly the target rate."""
        from tokenv.evaluation import calibration, evaluator, task_scores

        trained = self.load(kind=None)
        if self.task_names:
            check_kind(trained.config, "text")
        trust.allow_named({"data": self.data})
        data = from_dict(DataConfig, merge(asdict(trained.config.data), self.data), "data.")
        if self.split == "test" and data.kind == "text":  # before the corpus is read
            raise UserError(
                "split = 'test': expected validation, for a corpus of text has no test side"
            )
        tasks = {
            name: load_questions(name, self.files_of(name), self.limit) for name in self.task_names
        }
        how = evaluator.EvalOptions(
            self.batch_size,
            self.seed,
            tolerance=data.options.boundary_tolerance,
            progress=sys.stderr.isatty(),
        )
        if self.at_rates:
            return _evaluate_at_rates(trained, data, self, how)
        held_out, others = _load_held_out(data, self, self.calibrate)
        ways = {"sampled": how, "thresholded": replace(how, threshold=True)}
        if others is not None and self.calibrate:
            rate = trained.config.rate  # for a range the bias is for its mean
            bias = calibration.calibrate(trained.components, others, rate, how)
            if bias is None:
                agent = trained.config.agent["name"]
                raise UserError(
                    f"calibrate = True: no logit bias brings {agent!r} to rate = {rate:g}: leave it out"
                )
            ways["calibrated"] = replace(how, logit_bias=bias)
        results: dict[str, dict[str, Any]] = {}
        for name, way in ways.items():
            result = evaluator.evaluate(trained.components, held_out, way).metrics()
            results[name] = result
            if name == "calibrated":
                result["logit_bias"] = way.logit_bias
            rows = _format_known(result)
            for task, questions in tasks.items():
                score = task_scores.score_task(
                    trained.components, questions, way, seq_len=trained.config.data.seq_len
                )
                result[task] = {
                    key: value for key, value in asdict(score).items() if value is not None
                }
                rows[f"{task}, {score.questions:,} answers"] = str(score)
            source = data.validation_source or data.source
            title = f"{name} boundaries, {len(held_out)} {self.split} sequences of {source}"
            console().print(summary_table(rows, title=title))
        if len(held_out.document_B.unique()) == 1:
            console().print(
                "No standard error: all sequences are of one document, which tells nothing about others."
            )
        write_json_output(self.json, results)
        return results


def _format_known(result: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{value:.4f}"
        for key, value in result.items()
        if value is not None and not math.isnan(value)
    }


def _evaluate_at_rates(
    trained: LoadedRun, data: DataConfig, options: Evaluate, how: EvalOptions
) -> dict[str, Any]:
    """Evaluate all runs at the requested rates on the same sequences; print a table and write the files."""
    from tokenv.evaluation import calibration, loaded_run, report

    runs = {options.run: trained} | {
        run: options.load(run, kind=None) for run in options.other_runs
    }
    _check_same_data(runs)
    weights = options.entropy_weight
    calibrate_all = options.calibrate or bool(weights)
    calibrated = {
        run for run, each in runs.items() if calibrate_all or each.components.agent.rates is None
    }
    held_out, others = _load_held_out(data, options, bool(calibrated))
    points: list[calibration.RatePoint] = []
    for run, each in runs.items():
        rates = options.rates
        if options.flops is not None:
            length = each.config.data.seq_len
            rates = [loaded_run.rate_for_flops(each.components, options.flops, length)]
        shifted_on = None
        if run in calibrated:
            shifted_on = others
        measured = calibration.evaluate_rates(
            each.components,
            each.config,
            rates,
            held_out,
            shifted_on,
            how,
            run=run,
            entropy_weights=weights,
        )
        points.extend(point for point, _ in measured)
    unit = trained.components.lm.codec.unit
    title = f"{len(held_out)} {options.split} sequences of {data.source}"
    wide = 110
    if weights:
        wide = 140
    console(wide=wide).print(report.rates_table(points, unit=unit, title=title))
    if options.out is not None:
        table = Path(f"{options.out}.csv")
        picture = table.with_suffix(".png")
        report.write_rates(points, table)
        above = f"{options.run}, {title}"
        if options.title is not None:
            above = options.title
        report.draw_rates(points, picture, unit=unit, title=above, trained=trained.config.rate)
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


def _load_held_out(
    data: DataConfig, options: Evaluate, calibrates: bool
) -> tuple[SequenceBatch, SequenceBatch | None]:
    """Load the sequences to evaluate and, if ``calibrates``, others to calibrate on."""
    from tokenv.data.corpus import load_corpus
    from tokenv.evaluation.calibration import split_for_calibration

    corpus = load_corpus(data, progress=sys.stderr.isatty())
    if options.split == "test":
        return corpus.test(options.sequences), corpus.validation(options.sequences)
    if calibrates:
        return split_for_calibration(corpus, options.sequences)
    return corpus.validation(options.sequences), None
