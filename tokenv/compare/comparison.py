"""Compare methods: their runs, what distinguishes them, and the tables from which a report is made."""

import itertools
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from tokenv.compare.robust_statistics import RobustTable
from tokenv.compare.run_evaluation import RunEvaluation
from tokenv.compare.score_statistics import (
    Difference,
    Pair,
    ScoreTable,
    add_reversed_pairs,
    compare_scores,
)
from tokenv.compare.score_tables import tabulate_rates
from tokenv.config.build import can_imitate, is_trainable
from tokenv.config.class_options import with_class_defaults
from tokenv.config.files import flatten
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange, mean_rate
from tokenv.core.terminology import Terminology
from tokenv.plotting.theme import in_words

AGREEMENT = ("precision", "recall", "f1")
LEARNERS_SETTINGS = ("estimator.", "rate_target.", "loss.policy", "loss.rate")  # key prefixes
LONGEST_NAME = 40
UNEQUAL = 0.05  # relative difference in FLOPs from which methods are not compared at equal compute


@dataclass(frozen=True)
class ComparedRun:
    """A finished run and its evaluation.

    Attributes:
        folder: folder in which it is stored.
        config: its configuration.
        flops: FLOPs of the whole training.
        seconds: seconds of the whole training.
        history: metric to training symbols and values, such as ``train/flops``, ``train/boundary_rate``,
            ``train/neg_log_prob`` (nats per decision), and under the unit's name ``train/bits_per_byte`` and
            ``validation/bits_per_byte``; each may be missing.
        evaluation: figures on held-out data.
    """

    folder: str
    config: Config
    flops: float
    seconds: float
    history: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    evaluation: RunEvaluation

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config.seed

    @property
    def loss(self) -> float:
        """Loss on held-out data, mean over all predicted symbols."""
        return float(np.mean(self.evaluation.loss))

    def final(self, metric: str) -> float:
        """Return the last value of a metric; NaN if it was not logged."""
        _, values = self.history.get(metric, ((), ()))
        return next(reversed(values), math.nan)

    @property
    def area(self) -> float:
        """Mean held-out loss over training: the area under the curve of the validations, calibrated if they were.

        NaN with fewer than two validations.
        """
        unit = self.evaluation.unit
        symbols, losses = self.history.get(f"calibrated/{unit}") or self.history.get(
            f"validation/{unit}", ((), ())
        )
        if len(symbols) < 2:
            return math.nan
        return float(np.trapezoid(losses, symbols) / (symbols[-1] - symbols[0]))


@dataclass(frozen=True)
class ComparedMethod:
    """Runs of one method, and their mean loss.

    Attributes:
        name: name of the method.
        runs: one run a seed, at least one.
        settings: settings which distinguish it, such as ``agent.name`` to ``uniform``.
        loss: mean loss over the seeds.
        seed_error: standard error of that mean over the seeds; NaN for one.
        document_error: standard error of that mean over held-out documents.
    """

    name: str
    runs: Sequence[ComparedRun]
    settings: Mapping[str, str]
    loss: float
    seed_error: float
    document_error: float

    @property
    def reads_ahead(self) -> bool:
        """Whether its boundaries depend on symbols which are still to be predicted."""
        first = self.runs[0]
        return first.evaluation.reads_ahead(first.config)

    def imitation_bits(self, agent: Mapping[str, Any]) -> float:
        """Return the bits per symbol at which its policy predicts an agent's boundaries from the past, mean over runs.

        Returns:
            NaN unless it imitates this agent throughout, with a law by which boundaries have a log-probability.
        """
        config = self.runs[0].config
        if (
            config.imitation.fraction < 1
            or config.imitation.teacher != agent
            or not can_imitate(config.agent)
        ):
            return math.nan
        return finite_mean(run.final("validation/imitation_bits") for run in self.runs)


class JointLoss(NamedTuple):
    """Loss of symbols and boundaries, and the method whose policy predicts the boundaries; empty if they cost none."""

    loss: float
    imitator: str


@dataclass(frozen=True)
class Comparison:
    """Everything which a report shows.

    Attributes:
        title: title of the page.
        facts: name to value: data, budget, seeds, machine and so on.
        methods: at least one, of different names, all of one kind of data, measured in one unit; their order gives them
            their colours, reports show the best first.
        differences: every pair of methods, once, to the first one's loss minus the second one's.
        failed: run to the reason of its failure, for runs which did not finish.
        rates: results at the requested rates: see ``tokenv.compare.score_tables.tabulate_rates``.
        rates_reference: method with which ``rates`` are compared; empty for none.
        of_kind: what only this kind of data is compared by: see ``RunEvaluation.compare``; None for nothing.
        given_up: sentences on options of the base which methods lose by naming another class.
    """

    title: str
    facts: Mapping[str, str]
    methods: Sequence[ComparedMethod]
    differences: Mapping[Pair, Difference]
    failed: Mapping[str, str] = field(default_factory=dict)
    rates: pd.DataFrame = field(default_factory=pd.DataFrame)
    rates_reference: str = ""
    of_kind: Any = None
    given_up: Sequence[str] = ()

    @property
    def unit(self) -> str:
        """Unit of the losses, as metrics are named."""
        return self.methods[0].runs[0].evaluation.unit

    @property
    def unit_in_words(self) -> str:
        """Unit of the losses for people, such as ``bits per byte``."""
        return in_words(self.unit)

    @property
    def words(self) -> Terminology:
        """Names of symbols, tokens and so on."""
        return self.methods[0].runs[0].config.data.options.words

    @property
    def all_runs(self) -> list[ComparedRun]:
        """Runs of all methods."""
        return list(itertools.chain.from_iterable(method.runs for method in self.methods))

    @property
    def target_rates(self) -> list[float]:
        """Target rates of the methods, boundaries per symbol, each once."""
        return sorted({mean_rate(run.config.rate) for run in self.all_runs})

    @property
    def both_ways(self) -> dict[Pair, Difference]:
        """Differences of every pair in both orders."""
        return add_reversed_pairs(self.differences)

    @property
    def references(self) -> list[str]:
        """Names of the boundaries with which drawn ones were compared, in the order of the first run which has them."""
        names = itertools.chain.from_iterable(run.evaluation.agreement for run in self.all_runs)
        return list(dict.fromkeys(names))

    def joint_loss(self, method: ComparedMethod) -> JointLoss:
        """Return the mean loss of symbols and boundaries, both predicted from the past.

        It is the loss of a causal method. To that of a method which reads ahead it adds the bits of its boundaries by
        the best method which imitates it throughout; NaN without any.
        """
        if not method.reads_ahead:
            return JointLoss(method.loss, "")
        best = JointLoss(math.nan, "")
        for other in self.methods:
            loss = method.loss + other.imitation_bits(method.runs[0].config.agent)
            if not loss >= best.loss and math.isfinite(loss):
                best = JointLoss(loss, other.name)
        return best

    @cached_property
    def options(self) -> dict[str, dict[str, str]]:
        """Options in which methods differ, defaults of their classes included: method to dotted key to value."""
        configs = {method.name: method.runs[0].config for method in self.methods}
        return differing_settings(configs, with_class_defaults)

    @property
    def equal_flops(self) -> bool:
        """Whether the FLOPs of the methods' trainings differ by at most ``UNEQUAL``, or are unknown."""
        flops = self.means.flops
        return not flops.max() > (1 + UNEQUAL) * flops.min()

    @cached_property
    def robust(self) -> RobustTable:
        """Interquartile means, probabilities of improvement and performance profiles of the methods."""
        return _compare_runs({method.name: method.runs for method in self.methods}).robust

    @cached_property
    def runs(self) -> pd.DataFrame:
        """One row a run and one column a variable; all tables, pictures and CSV files read it.

        Columns: ``method``, ``seed``, ``folder``; ``loss``, ``loss_early`` (the early exit's), ``area``,
        ``boundary_rate``, ``loss_raw`` and ``boundary_rate_raw`` (before calibration), ``in_context_score``, ``flops``,
        ``seconds``; ``REFERENCE precision``, ``REFERENCE recall`` and ``REFERENCE f1`` of the drawn boundaries; what
        only this kind of data has, as ``share of CLASS`` and ``boundaries after CLASS`` of bytes; ``length L``, share
        of tokens of L symbols, the last for longer ones, too. Values which were not measured are NaN.
        """
        rows = []
        for method in self.methods:
            rows += [_tabulate_run(method.name, run) for run in method.runs]
        table = pd.DataFrame(rows)
        # As objects: a folder's name may be no valid Unicode, which pandas' type for text does not accept.
        table.insert(2, "folder", pd.Series([run.folder for run in self.all_runs], dtype=object))
        return table

    @cached_property
    def means(self) -> pd.DataFrame:
        """Means of the columns of ``runs`` over the seeds which have a value, one row a method (its index)."""
        columns = [name for name in self.runs.columns if name not in ("method", "seed", "folder")]
        return self.runs.groupby("method", sort=False)[columns].agg(finite_mean)

    def mean(self, method: str, column: str) -> float:
        """Return the mean of a column of ``runs`` over the seeds of a method; NaN if it was not measured."""
        return float(self.means.reindex(columns=[column]).at[method, column])


def finite_mean(values: Iterable[float]) -> float:
    """Return the mean of the finite values; NaN without any."""
    known = [value for value in values if math.isfinite(value)]
    if known:
        return sum(known) / len(known)
    return math.nan


def _tabulate_run(method: str, run: ComparedRun) -> dict[str, Any]:
    evaluation = run.evaluation
    raw = evaluation.calibration
    row: dict[str, Any] = {
        "method": method,
        "seed": run.seed,
        "loss": run.loss,
        "loss_early": math.nan if evaluation.loss_early is None else evaluation.loss_early,
        "area": run.area,
        "boundary_rate": evaluation.boundary_rate,
        "loss_raw": math.nan if raw is None else raw.loss,
        "boundary_rate_raw": math.nan if raw is None else raw.boundary_rate,
        "in_context_score": run.final("validation/in_context_score"),
        "flops": run.flops,
        "seconds": run.seconds,
    }
    for reference, agreement in evaluation.agreement.items():
        row |= {f"{reference} {score}": getattr(agreement, score) for score in AGREEMENT}
    row |= evaluation.figures()
    total = sum(evaluation.token_lengths)
    row |= {
        f"length {n}": count / total for n, count in enumerate(evaluation.token_lengths, 1) if total
    }
    return row


def build_comparison(
    methods: Mapping[str, Sequence[ComparedRun]],
    title: str,
    failed: Mapping[str, str],
    *,
    reference: str = "",
    facts: Mapping[str, str] | None = None,
    given_up: Sequence[str] = (),
) -> Comparison:
    """Compare methods.

    Args:
        methods: name to its runs, one a seed and at least one.
        title: title of the report.
        failed: runs which did not finish, and why.
        reference: method whose pairs Holm's correction counts, and with which others are compared at requested rates;
            empty, or of no run, for all pairs and the first method with a range of rates.
        facts: facts to show besides those of the runs.
        given_up: see ``Comparison``.

    Raises:
        UserError: runs were measured on different data, or in different units.
    """
    runs = list(itertools.chain.from_iterable(methods.values()))
    for run in runs[1:]:
        _check_comparable(run, runs[0])
    if reference not in methods:
        reference = ""
    table = _compare_runs(methods, reference)
    settings = differing_settings({name: group[0].config for name, group in methods.items()})
    ranged = (
        name for name, group in methods.items() if isinstance(group[0].config.rate, RateRange)
    )
    rates_reference = reference or next(ranged, "")
    evaluations = {}
    compared = []
    for name, group in methods.items():
        evaluations[name] = {run.seed: run.evaluation for run in group}
        own = table.estimates[name]
        compared.append(
            ComparedMethod(
                name, group, settings[name], own.mean, own.seed_error, own.document_error
            )
        )
    return Comparison(
        title=title,
        facts={**_collect_facts(runs), **(facts or {})},
        methods=compared,
        differences=table.differences,
        failed=failed,
        rates=tabulate_rates(evaluations, rates_reference),
        rates_reference=rates_reference,
        of_kind=runs[0].evaluation.compare(evaluations, reference),
        given_up=given_up,
    )


def _compare_runs(methods: Mapping[str, Sequence[ComparedRun]], reference: str = "") -> ScoreTable:
    losses = {}
    seeds = {}
    for name, group in methods.items():
        losses[name] = [run.evaluation.loss for run in group]
        seeds[name] = [run.seed for run in group]
    documents = next(iter(methods.values()))[0].evaluation.document
    return compare_scores(losses, documents=documents, seeds=seeds, reference=reference)


def _check_comparable(run: ComparedRun, first: ComparedRun) -> None:
    own = run.evaluation
    wanted = first.evaluation
    if own.unit != wanted.unit:
        raise UserError(
            f"{run.folder} is measured in {in_words(own.unit)} and {first.folder} in {in_words(wanted.unit)}: "
            "expected runs whose codec has the same unit"
        )
    if (own.fingerprint, own.document) != (wanted.fingerprint, wanted.document):
        raise UserError(
            f"{run.folder} and {first.folder} were measured on different held-out {run.config.data.kind}: expected "
            "runs of the same data section and the same validation.sequences"
        )


def _collect_facts(runs: Sequence[ComparedRun]) -> dict[str, str]:
    data = runs[0].config.data
    evaluation = runs[0].evaluation
    words = data.options.words
    budgets = sorted({f"{run.config.train.symbols:,}" for run in runs})
    return {
        "data": f"{Path(data.source).name}, sequences of {data.seq_len} {words.symbol}s",
        f"training {words.symbol}s": " or ".join(budgets),
        "held out": f"{len(evaluation.loss):,} sequences of {len(set(evaluation.document)):,} {words.document}s",
        **evaluation.facts(data),
        "seeds": ", ".join(map(str, sorted({run.config.seed for run in runs}))),
        "drawn on": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }


def differing_settings(
    configs: Mapping[str, Config], complete: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> dict[str, dict[str, str]]:
    """Return the settings in which each configuration differs from some other: key to value, as text.

    Args:
        configs: configurations by name.
        complete: function which adds values which are not given: ``with_class_defaults``.
    """
    every = {
        name: _comparable_settings(config, complete(config.method_settings()))
        for name, config in configs.items()
    }
    differing: dict[str, dict[str, str]] = {name: {} for name in every}
    for key in dict.fromkeys(itertools.chain.from_iterable(every.values())):
        if len({repr(values.get(key)) for values in every.values()}) > 1:
            for name, values in every.items():
                if key in values:
                    differing[name][key] = str(values[key])
    return differing


def _comparable_settings(config: Config, all_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings which have an effect, with dotted keys; an agent which does not learn has no estimator."""
    values = flatten(all_values)
    if is_trainable(config.agent):
        return values
    return {key: value for key, value in values.items() if not key.startswith(LEARNERS_SETTINGS)}


def group_into_methods(runs: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Group runs which differ in nothing but the seed into methods, named by the settings which distinguish them.

    Instead of a name which is too long for a table, a method is named by the folder of its first run; the settings
    which distinguish it are shown beside.

    Raises:
        UserError: two runs are the same, seed included.
    """
    groups: dict[str, list[ComparedRun]] = {}
    for run in runs:
        key = repr(run.config.method_settings())
        same = [other for other in groups.get(key, []) if other.config.seed == run.config.seed]
        if same:
            raise UserError(
                f"runs: {run.folder} and {same[0].folder} are the same run, seed included: drop one"
            )
        groups.setdefault(key, []).append(run)
    settings = differing_settings({key: group[0].config for key, group in groups.items()})
    agents = [group[0].config.agent["name"] for group in groups.values()]
    brief = _shorten_keys(itertools.chain.from_iterable(settings.values()))
    folders = {key: Path(group[0].folder) for key, group in groups.items()}
    short = {key: "/".join(folder.parts[-2:]) for key, folder in folders.items()}
    names = {}
    for key, group in groups.items():
        name = group[0].config.agent["name"]
        others = [f"{brief[k]}={v}" for k, v in settings[key].items() if k != "agent.name"]
        if agents.count(name) == 1:
            names[key] = name
        else:
            names[key] = ", ".join([name, *others])
        if len(names[key]) > LONGEST_NAME:
            folder = short[key]
            if list(short.values()).count(folder) > 1:
                folder = str(folders[key])
            names[key] = f"{name}, {folder}"
    return {names[key]: group for key, group in groups.items()}


def _shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return dotted keys to their last components, or to themselves where others end alike."""
    ends = {key: key.rpartition(".")[2] for key in keys}
    every = list(ends.values())
    unique = {key: end for key, end in ends.items() if every.count(end) == 1}
    return {key: unique.get(key, key) for key in ends}
