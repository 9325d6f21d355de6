"""Evaluation of a run, stored beside it in a file which needs no model to be read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenv.compare.config import EvaluationRequest
from tokenv.config.conversion import Figure, from_dict
from tokenv.core import checkpoints
from tokenv.core.checkpoints import read_json, write_json
from tokenv.core.errors import UserError
from tokenv.core.run_folders import DIGESTS
from tokenv.core.trust import MAX_JSON_BYTES, open_regular
from tokenv.evaluation.boundary_stats import BoundaryStats, SeriesExcerpt

FILE = "assessment.json"
VERSION = 4


@dataclass(frozen=True)
class Calibration:
    """Scores of a run before its logits were shifted to its target rate.

    Attributes:
        logit_bias: shift of the logits.
        loss: loss without the shift.
        boundary_rate: boundaries per symbol without the shift.
    """

    logit_bias: Figure
    loss: Figure
    boundary_rate: Figure


@dataclass(frozen=True)
class Passage:
    """A held-out text with the boundaries which a run draws in it.

    Attributes:
        text: bytes of the text, decoded as latin-1.
        boundary_prob: probability of a boundary after every byte.
        action: drawn boundaries, 0 or 1.
    """

    text: str
    boundary_prob: list[Figure]
    action: list[int]


@dataclass(frozen=True)
class Agreement:
    """Agreement of drawn boundaries with reference boundaries, such as whitespace.

    Attributes:
        precision: share of the drawn boundaries which the reference has, too.
        recall: share of the reference's boundaries which are drawn.
        f1: harmonic mean of precision and recall.
    """

    precision: Figure
    recall: Figure
    f1: Figure


@dataclass(frozen=True)
class Learned:
    """Boundaries by class of byte and frequent tokens of a text policy: see ``tokenv.evaluation.boundary_stats``.

    Attributes:
        classes: class of byte to its share of all bytes, and the boundaries per byte of this class.
        tokens: the most frequent tokens, decoded as latin-1, and their counts.
    """

    classes: dict[str, tuple[Figure, Figure]]
    tokens: list[tuple[str, int]]

    @classmethod
    def of(cls, stats: BoundaryStats) -> Learned:
        """Return the stored part of boundary statistics."""
        return cls(stats.classes, [(token.decode("latin-1"), count) for token, count in stats.tokens])


@dataclass(frozen=True)
class RateEvaluation:
    """Scores of a run at a requested boundary rate: see ``evaluate_rates``.

    Attributes:
        way: how the run reaches the rate.
        asked: requested boundaries per symbol.
        rate: drawn boundaries per symbol.
        flops: FLOPs of reading a symbol.
        logit_bias: shift of the logits.
        loss: share of every held-out sequence in the loss; of the first half of them where no others are left to
            calibrate on.
    """

    way: str
    asked: Figure
    rate: Figure
    flops: Figure
    logit_bias: Figure
    loss: list[Figure]


@dataclass(frozen=True)
class Forecasts:
    """Errors of forecasts of test windows, for values standardised by the training steps.

    Attributes:
        horizon: steps of each forecast.
        total: number of test windows in the data.
        cluster: cluster of every window; windows of one cluster depend on one another.
        error: ``mse``, ``mae``, ``crps`` and ``inside`` (share of values within the 80% interval) of every window.
        peers: ``mse`` and ``mae`` of every window by the name of a baseline.
    """

    horizon: int
    total: int
    cluster: list[int]
    error: dict[str, list[Figure]]
    peers: dict[str, dict[str, list[Figure]]]

    def __post_init__(self) -> None:
        for figures in (self.error, *self.peers.values()):
            if any(len(each) != len(self.cluster) for each in figures.values()):
                raise UserError(f"expected {len(self.cluster)} errors of every kind, one for each forecast")


@dataclass(frozen=True)
class RunEvaluation:
    """Scores of one run on held-out data.

    Attributes:
        version: version of this file's layout.
        checkpoint: name of the evaluated checkpoint.
        evaluation_request: what was to be measured.
        fingerprint: fingerprint of the data.
        unit: the codec's unit of the losses, such as ``bits_per_byte``.
        loss: share of every held-out sequence in the loss; their mean is the run's validation loss.
        document: index of every sequence's document; for series, of its group.
        loss_early: loss of the early exit; None where the run does not train one.
        loss_test: loss on the test windows of a series; None where there are none.
        boundary_rate: boundaries per symbol.
        calibration: scores before calibration, all others being after it; None if calibration was not requested or
            the agent's rate is fixed.
        token_lengths: entry l - 1 counts the tokens of l symbols; the last entry counts all longer ones, too.
        agreement: reference (``whitespace``, ``bpe``, ``true tokens``, ``change points``) to the agreement of the drawn
            boundaries with it.
        passages: first sequences of text.
        windows: first sequences of series.
        learned: boundary statistics of text; None for series.
        at_rates: scores at the rates of ``evaluation_request``, in that order.
        forecast: forecast errors; None if they were not requested.
    """

    version: int
    checkpoint: str
    evaluation_request: EvaluationRequest
    fingerprint: str
    unit: str
    loss: list[Figure]
    document: list[int]
    loss_early: Figure | None
    loss_test: Figure | None
    boundary_rate: Figure
    calibration: Calibration | None
    token_lengths: list[int]
    agreement: dict[str, Agreement]
    passages: list[Passage]
    windows: list[SeriesExcerpt]
    learned: Learned | None = None
    at_rates: list[RateEvaluation] = field(default_factory=list)
    forecast: Forecasts | None = None

    def __post_init__(self) -> None:
        if not self.loss or len(self.loss) != len(self.document):
            raise UserError(f"{len(self.loss)} losses of {len(self.document)} sequences: expected one of each")


def save_evaluation(evaluation: RunEvaluation, folder: Path) -> None:
    """Write an evaluation beside its run.

    Args:
        evaluation: evaluation of the run.
        folder: folder of the run.
    """
    write_json(folder / FILE, asdict(evaluation), _owner(checkpoints.find(folder)))


def _owner(checkpoint: Path) -> str:
    """Return what identifies the checkpoint of an evaluation: the digests of its files, or its name without these."""
    digests = checkpoint / DIGESTS
    if not digests.is_file():
        return checkpoint.name
    with open_regular(digests) as file:
        return file.read(MAX_JSON_BYTES).decode()


def load_evaluation(folder: Path, evaluation_request: EvaluationRequest) -> RunEvaluation | None:
    """Read the evaluation of a run's last checkpoint; None if there is none for this request.

    Args:
        folder: folder of the run.
        evaluation_request: what to measure.
    """
    try:
        checkpoint = checkpoints.find(folder)
        stored = from_dict(RunEvaluation, read_json(folder / FILE, _owner(checkpoint), require_digest=True))
    except (OSError, ValueError, TypeError):
        return None  # there is none, or it is damaged, without a digest, or another run's or version's
    expected = (VERSION, checkpoint.name, evaluation_request)
    if (stored.version, stored.checkpoint, stored.evaluation_request) == expected:
        return stored
    return None
