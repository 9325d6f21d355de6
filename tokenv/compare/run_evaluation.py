"""Store what was measured of a run beside it, in a file which needs no model to be read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenv.compare.evaluation_request import EvaluationRequest
from tokenv.config.conversion import Figure, from_dict
from tokenv.core.errors import UserError
from tokenv.evaluation.boundary_stats import BoundaryStats, SeriesExcerpt
from tokenv.storage import checkpoints
from tokenv.storage.checksummed import read_json, write_json
from tokenv.storage.run_folders import DIGESTS
from tokenv.storage.trust import MAX_JSON_BYTES, open_regular

FILE = "assessment.json"
VERSION = 3


@dataclass(frozen=True)
class Calibration:
    """What a run was before its logits were shifted to its target rate.

    Attributes:
        logit_bias: the shift.
        loss: without it.
        boundary_rate: without it.
    """

    logit_bias: Figure
    loss: Figure
    boundary_rate: Figure


@dataclass(frozen=True)
class Passage:
    """A held-out text with the boundaries that a run draws in it.

    Attributes:
        text: its bytes, as latin-1.
        boundary_prob: of every byte.
        action: drawn boundaries, 0 or 1.
    """

    text: str
    boundary_prob: list[Figure]
    action: list[int]


@dataclass(frozen=True)
class Agreement:
    """How drawn boundaries fit others, such as whitespace.

    Attributes:
        precision: share of the drawn boundaries that the others have too.
        recall: share of the others' that are drawn.
        f1: their harmonic mean.
    """

    precision: Figure
    recall: Figure
    f1: Figure


@dataclass(frozen=True)
class Learned:
    """What a policy has learned about text: see ``tokenv.evaluation.boundary_stats``.

    Attributes:
        classes: class of byte to its share of all bytes, and the boundaries per byte of it.
        tokens: the most frequent tokens, as latin-1, and their number.
    """

    classes: dict[str, tuple[Figure, Figure]]
    tokens: list[tuple[str, int]]

    @classmethod
    def of(cls, found: BoundaryStats) -> Learned:
        """What is kept of these habits."""
        return cls(found.classes, [(token.decode("latin-1"), count) for token, count in found.tokens])


@dataclass(frozen=True)
class RateEvaluation:
    """A run at a rate that it was asked for: see ``tokenv.evaluation.calibration``.

    Attributes:
        way: how it was asked.
        asked: boundaries per symbol.
        rate: as drawn.
        flops: of reading a symbol.
        logit_bias: by which logits were shifted.
        loss: every held-out sequence's share; where there are no others to calibrate on, of the first half of them.
    """

    way: str
    asked: Figure
    rate: Figure
    flops: Figure
    logit_bias: Figure
    loss: list[Figure]


@dataclass(frozen=True)
class Forecasts:
    """Errors of forecasts of test windows, of values standardised by the training steps.

    Attributes:
        horizon: steps of each.
        total: test windows that there are.
        cluster: of every window; those of one cluster depend on one another.
        error: ``mse``, ``mae``, ``crps`` and ``inside`` (the share of values within the 80% interval) of every window.
        peers: ``mse`` and ``mae`` of every window by the name of a yardstick or peer.
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
    """Figures of one run on held-out data.

    Attributes:
        version: of this file's layout.
        checkpoint: name of the checkpoint.
        evaluation_request: what was asked for.
        fingerprint: of the data.
        unit: of the losses: the codec's, such as ``bits_per_byte``.
        loss: every held-out sequence's share; their mean is the run's validation loss.
        document: index of the document that each comes from; of series, of its group.
        loss_early: the early exit's loss; None where the run has no use for one.
        loss_test: on the test windows of a series; None where there is none.
        boundary_rate: boundaries per symbol.
        calibration: what was before calibration, all else being after it; None where there was none, be it that nobody
            asked for it or that the agent has no such choice.
        token_lengths: entry l - 1 counts the tokens of l symbols; the last one, those at least so long.
        agreement: reference (``whitespace``, ``bpe``, ``true tokens``, ``change points``) to how the drawn boundaries
            fit its own.
        passages: the first sequences, of text.
        windows: the first sequences, of series.
        learned: of text; None of series, and where an earlier version measured.
        at_rates: at the rates of ``evaluation_request``, in that order.
        forecast: None where nobody asked for it.
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


def save_evaluation(made: RunEvaluation, folder: Path) -> None:
    """Write an assessment beside its run.

    Args:
        made: the assessment.
        folder: of the run.
    """
    write_json(folder / FILE, asdict(made), _owner(checkpoints.find(folder)))


def _owner(checkpoint: Path) -> str:
    """What an assessment belongs to: the very files of the checkpoint, where these have digests."""
    told = checkpoint / DIGESTS
    if not told.is_file():
        return checkpoint.name
    with open_regular(told) as file:
        return file.read(MAX_JSON_BYTES).decode()


def load_evaluation(folder: Path, evaluation_request: EvaluationRequest) -> RunEvaluation | None:
    """What was measured of the run's last checkpoint with these wishes before; None if nothing was.

    Args:
        folder: of the run.
        evaluation_request: what is to be measured.
    """
    try:
        checkpoint = checkpoints.find(folder)
        known = from_dict(RunEvaluation, read_json(folder / FILE, _owner(checkpoint), require_digest=True))
    except (OSError, ValueError, TypeError):
        return None  # there is none, or it is damaged, without a digest, or another run's or version's
    wanted = (VERSION, checkpoint.name, evaluation_request)
    return known if (known.version, known.checkpoint, known.evaluation_request) == wanted else None
