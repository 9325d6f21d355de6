"""Evaluation of a finished run for a comparison: losses, boundaries and rates, measured once and stored."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from tokenv.compare.config import EvaluationRequest
from tokenv.compare.store import read_run
from tokenv.config.build import reads_ahead
from tokenv.config.components import Components, build_references
from tokenv.config.hardware import prepare
from tokenv.config.schema import Config
from tokenv.core import checkpoints
from tokenv.core.checkpoints import read_json, write_json
from tokenv.core.conversion import Figure, from_dict
from tokenv.core.errors import UserError
from tokenv.core.run_folders import DIGESTS
from tokenv.core.sequences import SequenceBatch
from tokenv.core.trust import MAX_JSON_BYTES, read_bytes
from tokenv.data.config import DataConfig
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.evaluation.boundary_metrics import draw_references
from tokenv.evaluation.boundary_stats import compute_boundary_stats
from tokenv.evaluation.calibration import calibrate, evaluate_rates, split_for_calibration
from tokenv.evaluation.evaluator import (
    EvalOptions,
    SequenceScores,
    agreement_scores,
    evaluate,
    evaluate_sequences,
    shift_noise,
)
from tokenv.evaluation.loaded_run import LoadedRun, load_run

FILE = "assessment.json"
VERSION = 5


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


@dataclass(frozen=True)
class RateEvaluation:
    """Scores of a run at a requested boundary rate: see ``evaluate_rates``.

    Attributes:
        way: how the run reaches the rate.
        target_rate: requested boundaries per symbol.
        boundary_rate: drawn boundaries per symbol.
        flops: FLOPs of reading a symbol.
        logit_bias: shift of the logits.
        loss: share of every held-out sequence in the loss; of the first half of them where no others are left to
            calibrate on.
    """

    way: str
    target_rate: Figure
    boundary_rate: Figure
    flops: Figure
    logit_bias: Figure
    loss: list[Figure]


@dataclass(frozen=True)
class DrawnBoundaries:
    """A run and the boundaries which it draws in B held-out sequences of T + 1 symbols.

    Attributes:
        trained: the run.
        corpus: source of held-out sequences.
        request: what to measure.
        options: how the run is evaluated; with the shift of its logits if it was calibrated.
        held_out: the sequences.
        prob_BT: probability of a boundary.
        action_BT: drawn boundaries, 0 or 1.
    """

    trained: LoadedRun
    corpus: Corpus
    request: EvaluationRequest
    options: EvalOptions
    held_out: SequenceBatch
    prob_BT: Tensor
    action_BT: Tensor


@dataclass(frozen=True, kw_only=True)
class RunEvaluation:
    """Scores of one run on held-out data; this class is for text, and others are derived from it.

    A kind of data names its class (``DataKind.evaluation``), whose further fields are what only that kind has.

    Attributes:
        version: version of this file's layout.
        checkpoint: name of the evaluated checkpoint.
        evaluation_request: what was to be measured.
        fingerprint: fingerprint of the data.
        unit: the codec's unit of the losses, such as ``bits_per_byte``.
        loss: share of every held-out sequence in the loss; their mean is the run's validation loss.
        document: index of every sequence's document, or of its group.
        loss_early: loss of the early exit; None where the run does not train one.
        boundary_rate: boundaries per symbol.
        calibration: scores before calibration, all others being after it; None if calibration was not requested or
            the agent's rate is fixed.
        token_lengths: entry l - 1 counts the tokens of l symbols; the last entry counts all longer ones, too.
        agreement: reference, such as ``whitespace``, ``bpe`` or ``true tokens``, to the agreement of the drawn
            boundaries with it.
        at_rates: scores at the rates of ``evaluation_request``, in that order.
        passages: first sequences of text.
        learned: boundary statistics of text.
    """

    version: int
    checkpoint: str
    evaluation_request: EvaluationRequest
    fingerprint: str
    unit: str
    loss: list[Figure]
    document: list[int]
    loss_early: Figure | None
    boundary_rate: Figure
    calibration: Calibration | None
    token_lengths: list[int]
    agreement: dict[str, Agreement]
    at_rates: list[RateEvaluation] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    learned: Learned | None = None

    def __post_init__(self) -> None:
        if not self.loss or len(self.loss) != len(self.document):
            raise UserError(
                f"{len(self.loss)} losses of {len(self.document)} sequences: expected one of each"
            )

    @classmethod
    def measure(cls, drawn: DrawnBoundaries) -> dict[str, Any]:
        """Return the fields which only runs on this kind of data have."""
        symbol_BT = drawn.held_out.symbol_BN[:, :-1]
        count = drawn.request.passages
        shown = (symbol_BT[:count], drawn.prob_BT[:count], drawn.action_BT[:count])
        passages = []
        for symbol_T, prob_T, action_T in zip(*shown, strict=True):
            text = bytes(symbol_T.tolist()).decode("latin-1")
            passages.append(Passage(text, prob_T.tolist(), action_T.tolist()))
        stats = compute_boundary_stats(symbol_BT, drawn.action_BT, drawn.prob_BT)
        tokens = [(token.decode("latin-1"), count) for token, count in stats.tokens]
        return {"passages": passages, "learned": Learned(stats.classes, tokens)}

    @classmethod
    def compare(cls, evaluations: Mapping[str, Mapping[int, Any]], reference: str) -> Any:
        """Return what only methods on this kind of data are compared by, for the report; None for nothing.

        Args:
            evaluations: method to seed to the evaluation of that run.
            reference: method whose pairs Holm's correction counts; empty for all pairs.
        """
        return None

    def figures(self) -> dict[str, float]:
        """Return the figures which only this kind of data has, by the name of their column of ``Comparison.runs``."""
        figures = {}
        if self.learned is not None:
            for name, (share, boundaries) in self.learned.classes.items():
                figures[f"share of {name}"] = share
                figures[f"boundaries after {name}"] = boundaries
        return figures

    def facts(self, data: DataConfig) -> dict[str, str]:
        """Return what a report says of how only this kind of data was measured, by topic."""
        return {}

    def reads_ahead(self, config: Config) -> bool:
        """Return whether the boundaries of the run depend on symbols which are still to be predicted."""
        return reads_ahead(config.agent)


def evaluation_class(data: DataConfig) -> type[RunEvaluation]:
    """Return the class of what is measured of runs on these data."""
    if data.options.evaluation is None:
        return RunEvaluation
    return resolve_name(data.options.evaluation)


def _owner(checkpoint: Path) -> str:
    """Return what identifies the checkpoint of an evaluation: the digests of its files, or its name without these."""
    digests = checkpoint / DIGESTS
    if not digests.is_file():
        return checkpoint.name
    return read_bytes(digests, limit=MAX_JSON_BYTES).decode()


def load_evaluation(folder: Path, evaluation_request: EvaluationRequest) -> RunEvaluation | None:
    """Read the evaluation of a run's last checkpoint; None if there is none for this request.

    Args:
        folder: folder of the run.
        evaluation_request: what to measure.
    """
    run = read_run(folder)
    if run is None:
        return None
    try:
        checkpoint = checkpoints.find(folder)
        values = read_json(folder / FILE, _owner(checkpoint))
        stored = from_dict(evaluation_class(run.config.data), values)
    except (OSError, ValueError, TypeError):
        # there is none, or it is damaged, without a digest, or another run's or version's
        return None
    expected = (VERSION, checkpoint.name, evaluation_request)
    if (stored.version, stored.checkpoint, stored.evaluation_request) == expected:
        return stored
    return None


def evaluate_run(folder: Path, evaluation_request: EvaluationRequest) -> RunEvaluation:
    """Evaluate a finished run on its held-out data, or read its stored evaluation.

    Args:
        folder: folder of the run.
        evaluation_request: what to measure.

    Raises:
        MissingFileError: the run has no checkpoint.
        UserError: there is too little held-out data to calibrate on.
    """
    evaluation = load_evaluation(folder, evaluation_request)
    if evaluation is None:
        evaluation = _measure(folder, evaluation_request)
        write_json(folder / FILE, asdict(evaluation), _owner(checkpoints.find(folder)))
    return evaluation


def _measure(folder: Path, request: EvaluationRequest) -> RunEvaluation:
    # figures of a shorter training would mislead
    trained = load_run(str(folder), "latest", fall_back=False)
    config = trained.config
    parts = trained.components
    prepare(config.hardware)
    corpus = load_corpus(config.data)
    held_out = corpus.validation(config.validation.sequences)
    options = EvalOptions(config.validation.batch_size)
    bias = None
    calibration = None
    # methods which do not learn are measured on the same sequences
    if request.calibrate:
        held_out, own = split_for_calibration(corpus, config.validation.sequences)
        if parts.agent.trainable:
            bias = calibrate(parts, own, config.rate, options)
        if bias is not None:
            plain = evaluate(parts, held_out, options)
            calibration = Calibration(bias, plain.loss, plain.boundary_rate)
            options = replace(options, logit_bias=bias)
    kind = evaluation_class(config.data)
    references = {}
    if config.data.options.references:
        validation = replace(config.validation, bpe_vocabulary=request.bpe_vocabulary)
        references = build_references(replace(config, validation=validation), corpus)

    measure = partial(draw_references, references)
    scores = evaluate_sequences(parts, held_out, options, measure=measure)
    prob_BT = shift_noise(scores.boundary_prob_BT, -options.logit_bias)
    drawn = DrawnBoundaries(trained, corpus, request, options, held_out, prob_BT, scores.action_BT)
    loss_early = None
    if scores.loss_early_B is not None:
        loss_early = scores.loss_early_B.mean().item()
    return kind(
        version=VERSION,
        checkpoint=trained.path.name,
        evaluation_request=request,
        fingerprint=corpus.fingerprint,
        unit=parts.lm.codec.unit,
        loss=scores.loss_B.tolist(),
        document=held_out.document_B.tolist(),
        loss_early=loss_early,
        boundary_rate=scores.boundary_rate,
        calibration=calibration,
        token_lengths=token_lengths(scores.action_BT, config.data.options.longest_token),
        agreement=_agreements(scores, held_out, config.data.options),
        at_rates=at_rates(parts, config, request.rates, corpus),
        **kind.measure(drawn),
    )


def _agreements(
    scores: SequenceScores, held_out: SequenceBatch, options: Any
) -> dict[str, Agreement]:
    """Return the agreement with every reference agent, and with true boundaries if there are any."""
    agreement = {
        name: _agreement(scores.action_BT, boundary_BT)
        for name, boundary_BT in scores.extra.items()
    }
    if held_out.gold_BN is not None:
        gold_BT = held_out.gold_BN[:, :-1] & scores.decision_mask_BT
        agreement[options.words.true_boundaries] = _agreement(
            scores.action_BT, gold_BT, options.boundary_tolerance
        )
    return agreement


def at_rates(
    parts: Components, config: Config, rates: Sequence[float], corpus: Corpus
) -> list[RateEvaluation]:
    """Evaluate a run at requested rates, on its held-out sequences; on half of them if there are no others.

    Args:
        parts: model and agent.
        config: configuration of the run.
        rates: requested boundary rates, in boundaries per symbol.
        corpus: source of held-out sequences to evaluate, and of others to calibrate on.

    Raises:
        UserError: there is only one held-out sequence.
    """
    if not rates:
        return []
    most = config.validation.sequences
    both = corpus.validation(2 * most)
    if len(both) < 2:
        raise UserError(
            f"rates: {corpus.name} has one validation sequence: expected two, one of them to calibrate on"
        )
    if len(both) > most:
        some = most
    else:
        some = len(both) // 2
    options = EvalOptions(config.validation.batch_size)
    measured = evaluate_rates(
        parts, config, rates, both[:some], both[some:], options, allow_native=True
    )
    return [
        RateEvaluation(
            p.way, p.target_rate, p.boundary_rate, p.flops, p.logit_bias, loss_B.tolist()
        )
        for p, loss_B in measured
    ]


def _agreement(action_BT: Tensor, reference_BT: Tensor, tolerance: int = 0) -> Agreement:
    scores = agreement_scores(action_BT, reference_BT, tolerance)
    return Agreement(**{name.removeprefix("boundary_"): value for name, value in scores.items()})


def token_lengths(action_BT: Tensor, longest: int) -> list[int]:
    """Count the tokens of 1, 2, ... symbols; the symbols after a sequence's last boundary are no token.

    Args:
        action_BT: 1 where a token ends, which it always does at the first symbol; this one is not counted.
        longest: tokens of at least so many symbols are counted together, in the last entry.
    """
    row, position = action_BT.nonzero(as_tuple=True)
    same_row = row[1:] == row[:-1]
    length = (position[1:] - position[:-1])[same_row].clamp(max=longest)
    return torch.bincount(length, minlength=longest + 1)[1:].tolist()
