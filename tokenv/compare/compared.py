"""What a report on several methods is drawn from: plain figures, which no model is needed to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenv.report.characters import Character
from tokenv.report.series import Patched
from tokenv.report.words import TEXT, Words, in_words

Curve = tuple[Sequence[float], Sequence[float]]  # training symbols and values


@dataclass(frozen=True)
class Agreement:
    """How drawn boundaries fit others, such as whitespace.

    Attributes:
        precision: share of the drawn boundaries that the others have too.
        recall: share of the others' that are drawn.
        f1: their harmonic mean.
    """

    precision: float
    recall: float
    f1: float


@dataclass(frozen=True)
class ComparedRun:
    """One finished run.

    Attributes:
        seed: of the run.
        folder: where it is stored.
        loss: on held-out data, mean over all that is predicted, in the comparison's unit.
        loss_early: the early exit's.
        boundary_rate: boundaries per symbol, as drawn on held-out data.
        flops: of the whole training.
        seconds: of the whole training.
        history: metric to curve, such as ``train/flops``, ``train/boundary_rate``, ``train/neg_log_prob`` (nats per
            decision), and under the unit's name ``train/bits_per_byte`` and ``validation/bits_per_byte``; each may be
            missing.
        token_lengths: entry l - 1 counts the held-out tokens of l symbols; the last entry, those at least so long.
        agreement: reference (``whitespace``, ``bpe``, ``change points``) to how the run's boundaries fit it.
        passages: of text: one entry a passage of the comparison, in its order.
        windows: of series: held-out windows, the same of all runs, in the same order.
        loss_test: the loss on the test split; NaN where there is none.
    """

    seed: int
    folder: str
    loss: float
    loss_early: float
    boundary_rate: float
    flops: float
    seconds: float
    history: Mapping[str, Curve]
    token_lengths: Sequence[int]
    agreement: Mapping[str, Agreement]
    passages: Sequence[Sequence[Character]] = ()
    windows: Sequence[Patched] = ()
    loss_test: float = math.nan


@dataclass(frozen=True)
class ComparedMethod:
    """The runs of one method, and what they say together.

    Attributes:
        name: of the method.
        runs: one a seed, at least one.
        settings: what distinguishes it, such as ``agent.name`` to ``uniform``.
        loss: mean over the seeds.
        seed_error: standard error of that mean over the seeds; NaN for one.
        document_error: its standard error over held-out documents.
    """

    name: str
    runs: Sequence[ComparedRun]
    settings: Mapping[str, str]
    loss: float
    seed_error: float
    document_error: float


@dataclass(frozen=True)
class Pair:
    """One method against another.

    Attributes:
        first: name of a method.
        second: name of the other.
        difference: loss of the first minus that of the second.
        interval: the 95% interval of the difference.
        verdict: ``better``, ``worse`` or ``not separable``: the first, seen from the second.
        sentence: the same in plain words.
    """

    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    verdict: str
    sentence: str


@dataclass(frozen=True)
class Comparison:
    """Everything that a report shows.

    Attributes:
        title: of the page.
        facts: name to value: data, budget, seeds, machine and so on.
        methods: at least one, of different names; their order gives them their colours, reports show the best first.
        pairs: every pair of methods.
        passages: headings of the passages.
        target_rates: boundaries per symbol that methods with a choice aim at, each once.
        failed: run to what went wrong, for runs that did not finish.
        notes: sentences on how to read it.
        unit: what losses are measured in, as metrics are named.
        words: what symbols, tokens and so on are called.
        has_test: whether losses on a test split are shown.
    """

    title: str
    facts: Mapping[str, str]
    methods: Sequence[ComparedMethod]
    pairs: Sequence[Pair]
    passages: Sequence[str]
    target_rates: Sequence[float]
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    unit: str = "bits_per_byte"
    words: Words = TEXT
    has_test: bool = False

    @property
    def unit_in_words(self) -> str:
        """Such as ``bits per byte``."""
        return in_words(self.unit)
