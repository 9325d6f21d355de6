"""How sure a difference is: it may come from the held-out documents, and from the seeds.

Runs of one seed begin with the same parameters and read the same data in the same order, so a hard seed is hard for all
methods: where methods have seeds in common, their differences seed by seed are what is uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from scipy import optimize, special

from tokenv.evaluation.evaluator import clustered_degrees_of_freedom, clustered_standard_error

Array: TypeAlias = np.ndarray[Any, Any]
Pair = TypeVar("Pair")
LEVEL = 0.95
SMALLEST = 1e-100  # p-values below are 0


@dataclass(frozen=True)
class Scores:
    """Held-out losses of all runs of a method.

    Attributes:
        loss_SB: of every seed and sequence, [S, B], means over sequences being the losses; all methods have the same
            sequences in the same order.
        document_B: index of the document (of series, the group) that each sequence comes from, [B].
        seeds: of the runs, S different ones.
    """

    loss_SB: Array
    document_B: Array
    seeds: tuple[int, ...]

    @property
    def mean(self) -> float:
        """Over sequences and seeds."""
        return float(self.loss_SB.mean())

    @property
    def seed_error(self) -> float:
        """Standard error of the mean over seeds; NaN for one."""
        seeds = len(self.loss_SB)
        return float(self.loss_SB.mean(1).std(ddof=1) / math.sqrt(seeds)) if seeds > 1 else math.nan

    @property
    def document_error(self) -> float:
        """Standard error of the mean over documents."""
        return document_error(self.loss_SB.mean(0), self.document_B)


@dataclass(frozen=True)
class Difference:
    """One method's loss minus another's.

    Attributes:
        mean: the difference.
        document_error: its standard error over documents; NaN where all sequences are of one.
        seed_error: its standard error over seeds; NaN where one seed is all there is to go by.
        low: lower end of the 95% interval, in which both errors are; of one seed, the documents' alone.
        high: its upper end.
        p: two-sided probability of a difference at least so large where there is none; NaN of one seed.
        p_holm: the same, corrected for the number of pairs (see ``corrected``); NaN before that.
    """

    mean: float
    document_error: float
    seed_error: float
    low: float
    high: float
    p: float
    p_holm: float = math.nan

    def __neg__(self) -> Difference:
        """The second method's loss minus the first's."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)

    @property
    def one_seed(self) -> bool:
        """Whether a single seed is all there is to go by: it never decides, for another may say otherwise."""
        return math.isnan(self.seed_error)

    @property
    def verdict(self) -> str:
        """``better`` (a lower loss), ``worse`` or ``not separable``: the first method, seen from the second.

        At a level of 5%, after Holm's correction where it was made.
        """
        if self.one_seed or self.p_holm >= 1 - LEVEL:
            return "not separable"
        return "better" if self.high < 0 else "worse" if self.low > 0 else "not separable"


def document_error(value_B: Array, document_B: Array) -> float:
    """Standard error of a mean over sequences, documents being the independent units; NaN for one document."""
    return clustered_standard_error(torch.tensor(value_B), torch.tensor(document_B))


def difference(first: Scores, second: Scores) -> Difference:
    """The difference of two methods' losses, with everything that blurs it.

    Methods with two or more seeds in common are compared on these alone, paired: the seeds' error is ``s / sqrt(S)``, s
    the standard deviation of the S differences, with S - 1 degrees of freedom. Else it is Welch's (1947),
    ``sqrt(s_1^2 / S_1 + s_2^2 / S_2)``, with his. The documents' error is that of the difference, sequence by sequence,
    of the means over seeds; its degrees of freedom are Satterthwaite's for documents of unequal length
    (``clustered_degrees_of_freedom``), C - 1 for C documents of one length.

    The interval is ``mean +- t sqrt(seed_error^2 + document_error^2)``, t being Cochran and Cox's (1950): the mean of
    Student's t for the seeds' and for the documents' degrees of freedom, weighted by the squared errors. It covers 94%
    to 98% for any number of seeds, and for 5 documents or more of equal or unequal length (``examples/coverage.py``);
    degrees of freedom after Welch and Satterthwaite, pooled over both errors, cover 88% with two seeds and 92% with
    three where the documents' error is a third of the seeds'. What moves single
    documents of single seeds is in both errors, so where it outweighs all else the interval is wider.

    Args:
        first: of S_1 seeds.
        second: of S_2 seeds, on the same sequences.
    """
    assert np.array_equal(first.document_B, second.document_B)
    common = [seed for seed in first.seeds if seed in second.seeds]
    if len(common) > 1 or (common and min(len(first.seeds), len(second.seeds)) == 1):
        first, second = _only(first, common), _only(second, common)
        paired = Scores(first.loss_SB - second.loss_SB, first.document_B, first.seeds)
        seeds, degrees = paired.seed_error, len(common) - 1.0
    else:
        seeds, degrees = _welch(first, second)
    loss_B = first.loss_SB.mean(0) - second.loss_SB.mean(0)
    documents = document_error(loss_B, first.document_B)
    errors = [(seeds, degrees), (documents, clustered_degrees_of_freedom(torch.tensor(first.document_B)))]
    errors = [(error, freedom) for error, freedom in errors if error > 0]  # NaN, too, is none
    mean, error = float(loss_B.mean()), math.hypot(*(error for error, _ in errors))
    half = error * _critical(errors, 1 - LEVEL)
    p = math.nan if math.isnan(seeds) else _chance(errors, mean)
    return Difference(mean, documents, seeds, mean - half, mean + half, p)


def _critical(errors: Sequence[tuple[float, float]], p: float) -> float:
    """Cochran and Cox's t: what standard errors with their degrees of freedom let a ratio exceed by chance p."""
    square, degrees = np.square([error for error, _ in errors]), [freedom for _, freedom in errors]
    return -float(np.average(special.stdtrit(degrees, p / 2), weights=square)) if errors else 0.0


def _chance(errors: Sequence[tuple[float, float]], mean: float) -> float:
    """The p at which ``_critical`` is the difference's ratio to its error."""
    if not errors:
        return float(mean == 0)
    ratio = abs(mean) / math.hypot(*(error for error, _ in errors))
    if _critical(errors, SMALLEST) <= ratio:
        return 0.0
    found = optimize.brentq(lambda log_p: _critical(errors, math.exp(log_p)) - ratio, math.log(SMALLEST), 0.0)
    return math.exp(found)


def _only(scores: Scores, seeds: list[int]) -> Scores:
    rows = [scores.seeds.index(seed) for seed in seeds]
    return Scores(scores.loss_SB[rows], scores.document_B, tuple(seeds))


def _welch(first: Scores, second: Scores) -> tuple[float, float]:
    """Standard error and degrees of freedom of a difference of means; NaN where a method has one seed."""
    shares = [(scores.seed_error**2, len(scores.seeds) - 1) for scores in (first, second)]
    total = sum(share for share, _ in shares)
    if not total > 0:
        return math.sqrt(total), math.nan
    return math.sqrt(total), total**2 / sum(share**2 / degrees for share, degrees in shares)


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number (Holm 1979).

    Where every hypothesis with one below a level is given up, the chance that a true one is among them is at most that
    level, however they depend on one another.

    Args:
        p: of all hypotheses.
    """
    adjusted, least = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        least = max(least, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = least
    return adjusted


def corrected(differences: Mapping[Pair, Difference]) -> dict[Pair, Difference]:
    """The same differences with ``p_holm``; those of one seed, which decide nothing, are not counted."""
    decided = [pair for pair, found in differences.items() if not math.isnan(found.p)]
    adjusted = dict(zip(decided, holm([differences[pair].p for pair in decided]), strict=True))
    return {pair: replace(found, p_holm=adjusted.get(pair, math.nan)) for pair, found in differences.items()}


def sentence(first: str, second: str, difference: Difference, unit: str) -> str:
    """A difference in plain words, the unit being such as ``bits per byte``."""
    size, ends, form = difference.mean, [difference.low, difference.high], "+.4f"
    if difference.one_seed:
        why = "one seed decides nothing, for another may say otherwise"
        return f"{first} and {second} are not separable: {size:{form}} {unit}, but {why}."
    said = f"{first} and {second} are not separable:"
    if difference.verdict != "not separable":
        size, ends, form = abs(size), sorted(map(abs, ends)), ".4f"
        said = f"{first} is {difference.verdict} than {second} by"
    holm = "" if math.isnan(difference.p_holm) else f", after Holm's correction {difference.p_holm:.2g}"
    interval = f"95% interval {ends[0]:{form}} to {ends[1]:{form}}"
    return f"{said} {size:{form}} {unit} ({interval}, p = {difference.p:.2g}{holm})."
