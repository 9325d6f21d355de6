"""How sure a difference is: over held-out documents by a paired bootstrap, over seeds by Student's t.

Runs of one seed begin with the same parameters and read the same data in the same order, so a hard seed is hard for all
methods: where methods have seeds in common, their differences seed by seed are what is uncertain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from scipy import stats

Array: TypeAlias = np.ndarray[Any, Any]
RESAMPLES = 2000
LEVEL = 0.95


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
        document_error: its standard error over documents, by paired bootstrap.
        seed_error: its standard error over seeds; NaN where a method has one seed.
        low: lower end of the 95% interval, in which both errors are.
        high: its upper end.
    """

    mean: float
    document_error: float
    seed_error: float
    low: float
    high: float

    def __neg__(self) -> Difference:
        """The second method's loss minus the first's."""
        return replace(self, mean=-self.mean, low=-self.high, high=-self.low)

    @property
    def verdict(self) -> str:
        """``better`` (a lower loss), ``worse`` or ``not separable``: the first method, seen from the second."""
        return "better" if self.high < 0 else "worse" if self.low > 0 else "not separable"


def document_error(value_B: Array, document_B: Array) -> float:
    """Standard error of a mean over sequences, documents being the independent units; NaN for one document.

    By bootstrap (Efron 1979): whole documents are drawn anew, with replacement.
    """
    _, index_B = np.unique(document_B, return_inverse=True)
    count_C = np.bincount(index_B)
    if len(count_C) < 2:
        return math.nan

    def ratio(total: Array, count: Array, axis: int) -> Array:
        return np.asarray(total.sum(axis) / count.sum(axis))

    drawn = stats.bootstrap(
        (np.bincount(index_B, value_B), count_C),
        ratio,
        paired=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(drawn.standard_error)


def difference(first: Scores, second: Scores) -> Difference:
    """The difference of two methods' losses, with everything that blurs it.

    Methods with seeds in common are compared on these alone, paired: the seeds' error is ``s / sqrt(S)``, s the
    standard deviation of the S differences, with S - 1 degrees of freedom. Else it is Welch's (1947),
    ``sqrt(s_1^2 / S_1 + s_2^2 / S_2)``, with his degrees of freedom. The documents' error is that of the difference,
    sequence by sequence, of the means over seeds. The interval is ``mean +- t sqrt(seed_error^2 + document_error^2)``,
    t of Student's distribution with those degrees of freedom. Where there is one seed to go by, or all sequences are of
    one document, the interval lacks that error.

    Args:
        first: of S_1 seeds.
        second: of S_2 seeds, on the same sequences.
    """
    assert np.array_equal(first.document_B, second.document_B)
    common = [seed for seed in first.seeds if seed in second.seeds]
    if common:
        first, second = _only(first, common), _only(second, common)
        paired = Scores(first.loss_SB - second.loss_SB, first.document_B, first.seeds)
        seeds, degrees = paired.seed_error, len(common) - 1.0
    else:
        seeds, degrees = _welch(first, second)
    loss_B = first.loss_SB.mean(0) - second.loss_SB.mean(0)
    documents = document_error(loss_B, first.document_B)
    # Without a spread over seeds there are no degrees of freedom to speak of.
    t = stats.t.ppf((1 + LEVEL) / 2, degrees) if seeds > 0 else stats.norm.ppf((1 + LEVEL) / 2)
    half = float(t) * math.hypot(*(error for error in (documents, seeds) if not math.isnan(error)))
    mean = float(loss_B.mean())
    return Difference(mean, documents, seeds, mean - half, mean + half)


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


def sentence(first: str, second: str, difference: Difference, unit: str) -> str:
    """A difference in plain words, the unit being such as ``bits per byte``."""
    size, half = abs(difference.mean), (difference.high - difference.low) / 2
    known = " (one seed: another may say otherwise)" if math.isnan(difference.seed_error) else ""
    if difference.verdict == "not separable":
        return f"{first} and {second} are not separable: {difference.mean:+.4f} ± {half:.4f} {unit}{known}."
    return f"{first} is {difference.verdict} than {second} by {size:.4f} ± {half:.4f} {unit}{known}."
