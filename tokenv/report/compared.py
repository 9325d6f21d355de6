"""What a report on several methods is drawn from: plain figures, which no model is needed to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenv.report.characters import Character

Curve = tuple[Sequence[float], Sequence[float]]  # training bytes and values


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
        bits_per_byte: on held-out text, mean over all predicted bytes.
        bits_per_byte_early: the early exit's.
        boundary_rate: boundaries per byte, as drawn on held-out text.
        flops: of the whole training.
        seconds: of the whole training.
        history: metric to curve, such as ``train/bits_per_byte``, ``train/flops``, ``train/boundary_rate``,
            ``train/neg_log_prob`` (nats per decision), ``validation/bits_per_byte``; each may be missing.
        token_lengths: entry l - 1 counts the held-out tokens of l bytes; the last entry, those at least so long.
        agreement: reference (``whitespace``, ``bpe``) to how the run's boundaries fit it.
        passages: one entry a passage of the comparison, in its order.
    """

    seed: int
    folder: str
    bits_per_byte: float
    bits_per_byte_early: float
    boundary_rate: float
    flops: float
    seconds: float
    history: Mapping[str, Curve]
    token_lengths: Sequence[int]
    agreement: Mapping[str, Agreement]
    passages: Sequence[Sequence[Character]]


@dataclass(frozen=True)
class ComparedMethod:
    """The runs of one method, and what they say together.

    Attributes:
        name: of the method.
        runs: one a seed, at least one.
        settings: what distinguishes it, such as ``agent.name`` to ``uniform``.
        bits_per_byte: mean over the seeds.
        seed_error: standard error of that mean over the seeds; NaN for one.
        document_error: its standard error over held-out documents.
    """

    name: str
    runs: Sequence[ComparedRun]
    settings: Mapping[str, str]
    bits_per_byte: float
    seed_error: float
    document_error: float


@dataclass(frozen=True)
class Pair:
    """One method against another.

    Attributes:
        first: name of a method.
        second: name of the other.
        difference: bits per byte of the first minus those of the second.
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
        target_rate: boundaries per byte that methods with a choice aim at.
        failed: run to what went wrong, for runs that did not finish.
        notes: sentences on how to read it.
    """

    title: str
    facts: Mapping[str, str]
    methods: Sequence[ComparedMethod]
    pairs: Sequence[Pair]
    passages: Sequence[str]
    target_rate: float
    failed: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
