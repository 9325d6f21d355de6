"""Evaluation of a finished run for a comparison: losses, boundaries, rates and forecasts, measured once and stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.compare.config import EvaluationRequest
from tokenv.config import registry
from tokenv.config.components import Components
from tokenv.config.hardware import prepare
from tokenv.config.schema import Config
from tokenv.core import checkpoints, keys
from tokenv.core.checkpoints import read_json, write_json
from tokenv.core.conversion import Figure, from_dict
from tokenv.core.errors import UserError
from tokenv.core.rates import mean_rate
from tokenv.core.run_folders import DIGESTS
from tokenv.core.sequences import SequenceBatch
from tokenv.core.trust import MAX_JSON_BYTES, open_regular
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.tokenizer import train_bpe
from tokenv.evaluation.boundary_stats import BoundaryStats, compute_boundary_stats
from tokenv.evaluation.calibration import calibrate, evaluate_rates, split_for_calibration
from tokenv.evaluation.evaluator import (
    EvalOptions,
    SequenceScores,
    boundary_scores,
    evaluate,
    evaluate_sequences,
    shift_noise,
)
from tokenv.evaluation.loaded_run import load_run
from tokenv.series.baseline_models import find_season, fit_peers, naive_baselines
from tokenv.series.config import DirectHeadConfig, ForecastRequest
from tokenv.series.contexts import held_out_windows
from tokenv.series.forecaster import check_forecast, make_forecasts
from tokenv.series.patches import SeriesExcerpt, make_excerpts
from tokenv.series.scores import ScoreAccumulator
from tokenv.series.windows import SeriesData

FILE = "assessment.json"
VERSION = 4
QUANTILES = (0.1, 0.5, 0.9)  # the outermost ones bound the interval whose coverage is reported


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
        return cls(
            stats.classes, [(token.decode("latin-1"), count) for token, count in stats.tokens]
        )


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
                raise UserError(
                    f"expected {len(self.cluster)} errors of every kind, one for each forecast"
                )


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
            raise UserError(
                f"{len(self.loss)} losses of {len(self.document)} sequences: expected one of each"
            )


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
        stored = from_dict(RunEvaluation, read_json(folder / FILE, _owner(checkpoint)))
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
        save_evaluation(evaluation, folder)
    return evaluation


def _measure(folder: Path, evaluation_request: EvaluationRequest) -> RunEvaluation:
    # figures of a shorter training would mislead
    trained = load_run(str(folder), "latest", fall_back=False)
    config = trained.config
    parts = trained.components
    prepare(config.hardware)
    corpus = load_corpus(config.data)
    series = _series_of(corpus)
    held_out = corpus.validation(config.validation.sequences)
    bias = None
    # methods which do not learn are measured on the same sequences
    if evaluation_request.calibrate:
        held_out, own = split_for_calibration(corpus, config.validation.sequences)
        if parts.agent.trainable:
            bias = calibrate(parts, own, config.rate, EvalOptions(config.validation.batch_size))
    references = {}
    if series is None:
        references = _reference_agents(config, corpus, evaluation_request.bpe_vocabulary)
    options = EvalOptions(config.validation.batch_size, logit_bias=bias or 0.0)

    def draw_references(td: TensorDictBase) -> dict[str, Tensor]:
        noise_BT = torch.zeros(td.shape, device=td.device)
        return {name: agent.draw(td, noise_BT)[keys.ACTION] for name, agent in references.items()}

    scores = evaluate_sequences(parts, held_out, options, measure=draw_references)
    action_BT = scores.action_BT
    prob_BT = shift_noise(scores.boundary_prob_BT, -options.logit_bias)
    calibration = None
    if bias is not None:
        plain = evaluate(parts, held_out, EvalOptions(config.validation.batch_size))
        calibration = Calibration(bias, plain.loss, plain.boundary_rate)
    passages = evaluation_request.passages
    shown = (held_out, prob_BT[:passages], action_BT[:passages])
    of_kind: dict[str, Any] = {"passages": [], "windows": [], "loss_test": None}
    if series is None:
        of_kind["passages"] = _passages(*shown)
        of_kind["learned"] = Learned.of(
            compute_boundary_stats(held_out.symbol_BN[:, :-1], action_BT, prob_BT)
        )
    else:
        of_kind["windows"] = make_excerpts(*shown)
        of_kind["loss_test"] = _test_loss(parts, series, config, options)
        if (forecast := evaluation_request.forecast) is not None:
            of_kind["forecast"] = _score_forecasts(
                config, parts, series, forecast, options.logit_bias
            )
    return RunEvaluation(
        version=VERSION,
        checkpoint=trained.path.name,
        evaluation_request=evaluation_request,
        fingerprint=corpus.fingerprint,
        unit=parts.lm.codec.unit,
        loss=scores.loss_B.tolist(),
        document=held_out.document_B.tolist(),
        loss_early=None if scores.loss_early_B is None else scores.loss_early_B.mean().item(),
        boundary_rate=scores.boundary_rate,
        calibration=calibration,
        token_lengths=token_lengths(action_BT, config.data.options.longest_token),
        agreement=_agreements(scores, held_out, config.data.options),
        at_rates=at_rates(parts, config, evaluation_request.rates, corpus),
        **of_kind,
    )


def _agreements(
    scores: SequenceScores, held_out: SequenceBatch, options: Any
) -> dict[str, Agreement]:
    """Return the agreement with every reference agent, and with true boundaries if there are any."""
    agreement = {}
    for name, boundary_BT in scores.extra.items():
        agreement[name] = _agreement(scores.action_BT, boundary_BT)
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


def _series_of(corpus: Corpus) -> SeriesData | None:
    """Return the series of a corpus; None if it is of another kind."""
    if isinstance(corpus.dataset, SeriesData):
        return corpus.dataset
    return None


def _test_loss(
    parts: Components, series: SeriesData, config: Config, options: EvalOptions
) -> float | None:
    try:
        test = series.test(config.validation.sequences)
    except ValueError:  # too short for a window
        return None
    return evaluate(parts, test, options).loss


def _passages(held_out: SequenceBatch, prob_BT: Tensor, action_BT: Tensor) -> list[Passage]:
    return [
        Passage(bytes(symbol_N[:-1].tolist()).decode("latin-1"), prob_T.tolist(), action_T.tolist())
        for symbol_N, prob_T, action_T in zip(held_out.symbol_BN, prob_BT, action_BT, strict=False)
    ]


def _reference_agents(config: Config, corpus: Corpus, bpe_vocabulary: int) -> dict[str, Any]:
    """Return agents by name which draw familiar boundaries in text."""
    sections = {"whitespace": {}, "bpe": {"tokenizer": str(train_bpe(corpus, bpe_vocabulary))}}
    context = {"rate": mean_rate(config.rate), "seq_len": config.data.seq_len}
    return {
        name: registry.build("agent", {"name": name} | options, registry.AGENTS, **context)
        for name, options in sections.items()
    }


def _agreement(action_BT: Tensor, reference_BT: Tensor, tolerance: int = 0) -> Agreement:
    """Compare boundaries without the first symbol, where every agent draws one."""
    scores = boundary_scores(action_BT[:, 1:].bool(), reference_BT[:, 1:].bool(), tolerance)
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


def check_forecast_request(config: Config, request: ForecastRequest) -> tuple[int, int]:
    """Return the steps of history which forecasts continue, and those to forecast, if a run can make the forecasts.

    Raises:
        UserError: the data are text, the direct head predicts fewer steps, the sequences or the memory are too short,
            or the season is longer than a history.
    """
    if config.data.kind != "series":
        raise UserError(
            f"forecast with data.kind = {config.data.kind!r}: expected series, or leave forecast out"
        )
    predicted = DirectHeadConfig.of(config.codec).horizon
    if request.horizon is None and not predicted:
        raise UserError(
            "forecast.horizon is null and codec.horizon = 0: expected one of them, the steps to forecast or those that "
            "a direct head predicts"
        )
    horizon = request.horizon or predicted
    history = check_forecast(
        config, horizon, samples=request.samples, direct=request.direct, season=request.season
    )
    return history, horizon


def _score_forecasts(
    config: Config, parts: Components, data: SeriesData, request: ForecastRequest, logit_bias: float
) -> Forecasts:
    """Forecast test windows, with logits shifted by ``logit_bias``, and return the errors."""
    history, horizon = check_forecast_request(config, request)
    season = request.season or find_season(data.series, history)
    contexts = held_out_windows(data, horizon, request.windows)
    points = naive_baselines(horizon, season)
    points |= fit_peers(request.peers, data, horizon)
    scores = ScoreAccumulator(QUANTILES)
    how = EvalOptions(logit_bias=logit_bias)
    samples = request.samples
    direct = request.direct
    for batch in make_forecasts(
        parts, contexts, points, QUANTILES, how, samples=samples, direct=direct
    ):
        scores.add(batch.forecast.distribution, batch.quantile_BQHC, batch.batch, batch.point_BHC)
    error, cluster_W = scores.each()
    peers: dict[str, dict[str, list[float]]] = {}
    for peer in points:
        peers[peer] = {name: error[f"{name} {peer}"].tolist() for name in ("mse", "mae")}
    return Forecasts(
        horizon=horizon,
        total=contexts.total,
        cluster=cluster_W.tolist(),
        error={name: error[name].tolist() for name in ("mse", "mae", "crps", "inside")},
        peers=peers,
    )
