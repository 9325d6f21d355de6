"""Compare the scores of methods: means, intervals and corrected p-values from plain arrays.

A difference is uncertain for two reasons: other held-out documents, and other seeds. Runs of one seed begin with the
same parameters and read the same data in the same order, so a hard seed is hard for all methods: methods which have
seeds in common are compared seed by seed.

``compare_scores`` is the whole of it. It and ``robust_statistics`` import numpy, scipy and pandas only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pandas as pd
from scipy import optimize

from tokenv.compare.robust_statistics import (
    LEVEL,
    RobustTable,
    compare_robustly,
    critical_value,
    select_known,
    standard_error,
    student_interval,
)
from tokenv.core.clustered_errors import clustered_degrees_of_freedom, clustered_standard_error

Array: TypeAlias = np.ndarray[Any, Any]
Pair: TypeAlias = tuple[str, str]
Key = TypeVar("Key")
# of a difference
COLUMNS = ["difference", "seed_error", "document_error", "low", "high", "p", "p_holm", "verdict"]
SMALLEST_P = 1e-100  # smaller p-values are reported as 0


@dataclass(frozen=True)
class Scores:
    """Held-out losses of all runs of a method.

    Attributes:
        loss_SB: losses by seed and column (a held-out sequence or document), [S, B]; all methods have the same columns.
        document_B: index of the document to which each column belongs, [B]; columns of one document are dependent.
        seeds: seeds of the runs, S different ones.
        weight_B: weight of each column in means, such as its length, [B]; None for equal weights.
    """

    loss_SB: Array
    document_B: Array
    seeds: tuple[int, ...]
    weight_B: Array | None = None

    @property
    def loss_S(self) -> Array:
        """Mean loss of each seed, shape [S]."""
        return np.average(self.loss_SB, axis=1, weights=self.weight_B)

    @property
    def mean(self) -> float:
        """Mean over columns and seeds."""
        if self.weight_B is None:
            weight_SB = None
        else:
            weight_SB = np.broadcast_to(self.weight_B, self.loss_SB.shape)
        return float(np.average(self.loss_SB, weights=weight_SB))

    @property
    def seed_error(self) -> float:
        """Standard error of the mean over seeds; NaN for one seed."""
        return standard_error(self.loss_S)

    @property
    def document_error(self) -> float:
        """Standard error of the mean over documents; NaN for one document."""
        return clustered_standard_error(self.loss_SB.mean(0), self.document_B, self.weight_B)

    @property
    def document_degrees(self) -> float:
        """Degrees of freedom of ``document_error``."""
        return clustered_degrees_of_freedom(self.document_B, self.weight_B)

    @property
    def by_document(self) -> Array:
        """Mean loss of each seed on each of the C documents, shape [S, C]."""
        index_B = np.unique(self.document_B, return_inverse=True)[1]
        if self.weight_B is None:
            weight_B = np.ones(len(index_B))
        else:
            weight_B = self.weight_B
        total_SC = np.stack([np.bincount(index_B, loss_B * weight_B) for loss_B in self.loss_SB])
        result: Array = total_SC / np.bincount(index_B, weight_B)
        return result

    def select(self, seeds: Sequence[int]) -> Scores:
        """Return the scores of some of the seeds, in this order."""
        return replace(
            self,
            loss_SB=self.loss_SB[[self.seeds.index(seed) for seed in seeds]],
            seeds=tuple(seeds),
        )


@dataclass(frozen=True)
class Difference:
    """One method's mean loss minus another's.

    Attributes:
        mean: the difference.
        document_error: its standard error over documents; NaN for a single document.
        seed_error: its standard error over seeds; NaN where only one seed can be compared.
        low: lower end of the 95% interval, which accounts for both errors; for one seed, for the documents' alone.
        high: upper end of the interval.
        p: two-sided p-value of no difference; NaN for one seed.
        p_holm: p-value after Holm's correction for the number of pairs (see ``apply_holm``); NaN before it.
    """

    mean: float
    document_error: float
    seed_error: float
    low: float
    high: float
    p: float
    p_holm: float = math.nan

    def __neg__(self) -> Difference:
        """Return the second method's loss minus the first's."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)

    @property
    def one_seed(self) -> bool:
        """Whether only one seed can be compared, which never decides: another seed may say otherwise."""
        return math.isnan(self.seed_error)

    @property
    def verdict(self) -> str:
        """Whether the first method is ``better`` (a lower loss), ``worse`` or ``not separable`` from the second.

        The level is 5%, after Holm's correction where it was made.
        """
        if self.one_seed or self.p_holm >= 1 - LEVEL:
            return "not separable"
        if self.high < 0:
            return "better"
        if self.low > 0:
            return "worse"
        return "not separable"


@dataclass(frozen=True)
class Estimate:
    """Mean loss of one method.

    Attributes:
        seeds: number of its seeds; 0 for a baseline.
        mean: mean over documents and seeds.
        seed_error: its standard error over seeds; NaN for one seed.
        document_error: its standard error over documents; NaN for a single document.
        low: lower end of the 95% interval, which accounts for both errors.
        high: upper end of the interval.
    """

    seeds: int
    mean: float
    seed_error: float
    document_error: float
    low: float
    high: float


@dataclass(frozen=True)
class ScoreTable:
    """Result of ``compare_scores``.

    Attributes:
        estimates: name of a method to its mean loss.
        differences: pairs of methods, each pair once, to the first one's mean minus the second one's.
        scores: methods' scores, without baselines.
    """

    estimates: Mapping[str, Estimate]
    differences: Mapping[Pair, Difference]
    scores: Mapping[str, Scores]

    @cached_property
    def robust(self) -> RobustTable:
        """Interquartile means, probabilities of improvement and performance profiles: see ``compare_robustly``."""
        seeds = {name: sorted(each.seeds) for name, each in self.scores.items()}
        losses = {name: each.select(seeds[name]).by_document for name, each in self.scores.items()}
        return compare_robustly(
            losses, seeds, float(np.mean([each.mean for each in self.scores.values()]))
        )

    @property
    def methods(self) -> pd.DataFrame:
        """One row a method (its index) and one column for each attribute of ``Estimate``."""
        index = pd.Index(list(self.estimates), name="method", dtype=object)
        return pd.DataFrame([asdict(each) for each in self.estimates.values()], index=index)

    @property
    def pairs(self) -> pd.DataFrame:
        """One row a pair of methods (its index, ``first`` and ``second``): see ``tabulate_differences``."""
        return tabulate_differences(self.differences)


def compare_scores(
    scores: Mapping[str, Any],
    *,
    documents: Sequence[Any] | Array | None = None,
    lengths: Sequence[float] | Array | None = None,
    seeds: Mapping[str, Sequence[int]] | None = None,
    reference: str = "",
) -> ScoreTable:
    """Compare methods by their held-out scores, lower being better.

    For example::

        table = compare_scores({"ours": ours_SD, "theirs": theirs_SD}, lengths=length_D, reference="theirs")
        table.methods  # data frame: mean, standard errors over seeds and documents, 95% interval
        table.pairs  # data frame: difference, standard errors, 95% interval, p, p_holm, verdict
        table.robust.methods, table.robust.pairs  # interquartile means, probabilities of improvement

    Errors over documents are CR2 with Bell and McCaffrey's degrees of freedom; methods which share seeds are paired
    seed by seed. The intervals of differences cover 94% to 98% for any number of seeds from two on, and for 5 documents
    or more (``estimate_difference`` has the formulas, ``examples/interval_coverage.py`` measures the coverage). All
    pairs of methods are compared, and p-values are corrected for their number by Holm's method; with ``reference``, for
    the number of pairs which contain it, and the other pairs get no corrected p-value.

    Args:
        scores: name of a method to its losses, [seed, document]; of shape [document] for a baseline which has no seeds,
            and is compared with methods alone, as if each seed gave the same.
        documents: document, such as an index or a name, of every column; columns of one document are dependent. None if
            every column is a document.
        lengths: weight of each column in means, such as the number of bytes of a document; None for equal weights.
        seeds: name of a method to the seeds of its rows; None if row i of every method has the seed i.
        reference: method which all others are compared with; empty for every pair.

    Raises:
        ValueError: arrays differ in the number of columns, or have other shapes than ``documents``, ``lengths`` and
            ``seeds`` say; or ``reference`` is no method.
    """
    arrays = {name: np.asarray(values, dtype=float) for name, values in scores.items()}
    columns = next((array.shape[-1] for array in arrays.values()), 0)
    for name, array in arrays.items():
        if array.ndim not in (1, 2) or array.shape[-1] != columns or not array.size:
            raise ValueError(
                f"scores[{name!r}] has shape {array.shape}: expected [seeds, {columns}] or [{columns}]"
            )
    for name, values in (("documents", documents), ("lengths", lengths)):
        if values is not None and len(values) != columns:
            raise ValueError(
                f"{name} has {len(values)} values: expected {columns}, one for each column of the scores"
            )
    if reference and reference not in arrays:
        raise ValueError(f"reference = {reference!r}: expected one of {', '.join(arrays)}")
    if documents is None:
        document_B = np.arange(columns)
    else:
        document_B = np.unique(np.asarray(documents), return_inverse=True)[1]
    if lengths is None:
        weight_B = None
    else:
        weight_B = np.asarray(lengths, dtype=float)
    methods: dict[str, Scores] = {}
    baselines: dict[str, Scores] = {}
    for name, array in arrays.items():
        rows: tuple[int, ...] = (
            tuple((seeds or {}).get(name, range(len(array)))) if array.ndim == 2 else (0,)
        )
        own = Scores(np.atleast_2d(array), document_B, rows, weight_B)
        if not len(set(rows)) == len(rows) == len(own.loss_SB):
            raise ValueError(
                f"seeds[{name!r}] = {rows}: expected {len(own.loss_SB)} different ones, one a row"
            )
        (methods if array.ndim == 2 else baselines)[name] = own
    differences = {
        (first, second): estimate_difference(methods[first], methods[second])
        for first, second in itertools.combinations(methods, 2)
    }
    for first, own in methods.items():
        for second, other in baselines.items():
            same = replace(
                other, loss_SB=np.repeat(other.loss_SB, len(own.seeds), 0), seeds=own.seeds
            )
            differences[first, second] = estimate_difference(own, same)
    tested = {
        pair: each for pair, each in differences.items() if not reference or reference in pair
    }
    every = methods | baselines
    return ScoreTable(
        {name: _estimate_mean(every[name], name in methods) for name in arrays},
        differences | apply_holm(tested),
        methods,
    )


def _estimate_mean(scores: Scores, has_seeds: bool) -> Estimate:
    mean = scores.mean
    seed_error = scores.seed_error
    document_error = scores.document_error
    errors = [(seed_error, len(scores.seeds) - 1.0), (document_error, scores.document_degrees)]
    return Estimate(
        len(scores.seeds) * has_seeds,
        mean,
        seed_error,
        document_error,
        *student_interval(mean, errors),
    )


def add_reversed_pairs(differences: Mapping[Pair, Difference]) -> dict[Pair, Difference]:
    """Return every pair in both orders: (first, second) to the first one's mean minus the second one's."""
    return {
        **differences,
        **{(second, first): -each for (first, second), each in differences.items()},
    }


def tabulate_differences(differences: Mapping[Pair, Difference]) -> pd.DataFrame:
    """Return one row a pair, whose index is ``first`` and ``second``.

    Columns: ``difference``, ``seed_error``, ``document_error``, ``low``, ``high``, ``p``, ``p_holm``, ``verdict``.
    """
    rows = [
        {**asdict(each), "difference": each.mean, "verdict": each.verdict}
        for each in differences.values()
    ]
    index = pd.MultiIndex.from_tuples(list(differences), names=["first", "second"])
    return pd.DataFrame(rows, index=index, columns=COLUMNS)


def estimate_difference(first: Scores, second: Scores) -> Difference:
    """Estimate the difference of two methods' mean losses, its standard errors, its interval and its p-value.

    Methods with two or more seeds in common are compared on these alone, paired: the seeds' error is ``s / sqrt(S)``, s
    the standard deviation of the S differences, with S - 1 degrees of freedom. Else it is Welch's (1947),
    ``sqrt(s_1^2 / S_1 + s_2^2 / S_2)``, with his degrees of freedom. The documents' error is that of the difference,
    column by column, of the means over seeds (``clustered_standard_error``); its degrees of freedom are Satterthwaite's
    for documents of unequal length (``clustered_degrees_of_freedom``), C - 1 for C documents of one length.

    The interval is ``mean +- t sqrt(seed_error^2 + document_error^2)``, t being Cochran and Cox's (1950): the mean of
    Student's t for the seeds' and for the documents' degrees of freedom, weighted by the squared errors. It covers 94%
    to 98% for any number of seeds, and for 5 documents or more of equal or unequal length
    (``examples/interval_coverage.py`` measures it). Degrees of freedom after Welch and Satterthwaite, pooled over both
    errors, cover 88% with two seeds and 92% with three where the documents' error is a third of the seeds'. Variation
    of single documents of single seeds is in both errors, so where it outweighs all else the interval is wider than it
    needs to be.

    Args:
        first: scores of S_1 seeds.
        second: scores of S_2 seeds, for the same columns.
    """
    assert np.array_equal(first.document_B, second.document_B)
    common = [seed for seed in first.seeds if seed in second.seeds]
    if len(common) > 1 or (common and min(len(first.seeds), len(second.seeds)) == 1):
        first = first.select(common)
        second = second.select(common)
        seed_error = replace(first, loss_SB=first.loss_SB - second.loss_SB).seed_error
        degrees = len(common) - 1.0
    else:
        seed_error, degrees = _welch(first, second)
    # The documents' error is that of the difference of the means over seeds, which need not be paired.
    gap = replace(first, loss_SB=(first.loss_SB.mean(0) - second.loss_SB.mean(0))[None], seeds=(0,))
    errors = [(seed_error, degrees), (gap.document_error, gap.document_degrees)]
    low, high = student_interval(gap.mean, errors)
    if math.isnan(seed_error):
        p = math.nan
    else:
        p = _p_value(gap.mean, errors)
    return Difference(gap.mean, gap.document_error, seed_error, low, high, p)


def _p_value(mean: float, errors: Sequence[tuple[float, float]]) -> float:
    """Return the p for which ``critical_value`` is the ratio of the mean to its error."""
    square, degrees, total = select_known(errors)
    if not len(square):
        return float(mean == 0)
    ratio = abs(mean) / total
    if critical_value(square, degrees, SMALLEST_P) <= ratio:
        return 0.0
    log_p = optimize.brentq(
        lambda log_p: critical_value(square, degrees, math.exp(log_p)) - ratio,
        math.log(SMALLEST_P),
        0.0,
    )
    return math.exp(log_p)


def _welch(first: Scores, second: Scores) -> tuple[float, float]:
    """Return standard error and degrees of freedom of a difference of means; NaN where a method has one seed."""
    shares = [(scores.seed_error**2, len(scores.seeds) - 1) for scores in (first, second)]
    total = sum(share for share, _ in shares)
    if not total > 0:
        return math.sqrt(total), math.nan
    return math.sqrt(total), total**2 / sum(share**2 / degrees for share, degrees in shares)


def adjust_p_values(p: Sequence[float]) -> list[float]:
    """Correct p-values for their number (Holm 1979).

    If every hypothesis with a corrected p-value below a level is rejected, the probability that a true one is among
    them is at most that level, however they depend on one another.

    Args:
        p: p-values of all hypotheses.
    """
    ranked = pd.Series(p, dtype=float).sort_values(kind="stable")
    factor = ranked.count() - np.arange(len(ranked))
    return (factor * ranked).clip(upper=1.0).cummax().sort_index().tolist()


def apply_holm(differences: Mapping[Key, Difference]) -> dict[Key, Difference]:
    """Return the differences with ``p_holm``; those of one seed, which decide nothing, are not counted."""
    adjusted = adjust_p_values([each.p for each in differences.values()])
    return {
        key: replace(each, p_holm=p_holm)
        for (key, each), p_holm in zip(differences.items(), adjusted, strict=True)
    }


def describe_difference(first: str, second: str, difference: Difference, unit: str) -> str:
    """Describe a difference in one sentence, the unit being such as ``bits per byte``."""
    size = difference.mean
    ends = [difference.low, difference.high]
    form = "+.4f"
    if difference.one_seed:
        reason = "one seed decides nothing, for another may say otherwise"
        return f"{first} and {second} are not separable: {size:{form}} {unit}, but {reason}."
    beginning = f"{first} and {second} are not separable:"
    if difference.verdict != "not separable":
        size = abs(size)
        ends = sorted(map(abs, ends))
        form = ".4f"
        beginning = f"{first} is {difference.verdict} than {second} by"
    if math.isnan(difference.p_holm):
        holm = ""
    else:
        holm = f", after Holm's correction {difference.p_holm:.2g}"
    interval = f"95% interval {ends[0]:{form}} to {ends[1]:{form}}"
    return f"{beginning} {size:{form}} {unit} ({interval}, p = {difference.p:.2g}{holm})."
