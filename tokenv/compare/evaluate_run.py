"""Evaluate a finished run for a comparison, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.compare.config import EvaluationRequest
from tokenv.compare.forecast_comparison import score_forecasts
from tokenv.compare.run_evaluation import (
    VERSION,
    Agreement,
    Calibration,
    Forecasts,
    Learned,
    Passage,
    RateEvaluation,
    RunEvaluation,
    load_evaluation,
    save_evaluation,
)
from tokenv.config import registry
from tokenv.config.components import Components
from tokenv.config.hardware import prepare
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.core.rates import mean_rate
from tokenv.core.sequences import SequenceBatch
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.tokenizer import train_bpe
from tokenv.data.windows import SeriesData, load_series
from tokenv.evaluation.boundary_stats import compute_boundary_stats, make_excerpts
from tokenv.evaluation.calibration import calibrate, evaluate_rates, split_for_calibration
from tokenv.evaluation.evaluator import EvalOptions, boundary_scores, evaluate, evaluate_sequences, shift_noise
from tokenv.evaluation.loaded_run import load_run

LONGEST = {"text": 24, "series": 64}  # tokens at least so long are counted together


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
    trained = load_run(str(folder), "latest", fall_back=False)  # figures of a shorter training would mislead
    config, parts = trained.config, trained.components
    prepare(config.hardware)
    series = load_series(config.data) if config.data.kind == "series" else None
    corpus = load_corpus(config.data) if series is None else Corpus(series, config.data)
    held_out, bias = corpus.validation(config.validation.sequences), None
    if evaluation_request.calibrate and parts.agent.learns:
        held_out, own = split_for_calibration(corpus, config.validation.sequences)
        bias = calibrate(parts, own, config.rate, EvalOptions(config.validation.batch_size))
    references = _references(config, corpus, evaluation_request.bpe_vocabulary) if series is None else {}
    options = EvalOptions(config.validation.batch_size, logit_bias=bias or 0.0)

    def draw_references(td: TensorDictBase) -> dict[str, Tensor]:
        return {name: reference(td) for name, reference in references.items()}

    scores = evaluate_sequences(parts, held_out, options, measure=draw_references)
    action_BT, early_B = scores.action_BT, scores.loss_early_B
    prob_BT = shift_noise(scores.boundary_prob_BT, -options.logit_bias)
    agreement = {name: _agreement(action_BT, boundary_BT) for name, boundary_BT in scores.extra.items()}
    if held_out.gold_BN is not None:
        truth = "true tokens" if series is None else "change points"
        agreement[truth] = _agreement(
            action_BT, held_out.gold_BN[:, :-1] & scores.decision_mask_BT, config.data.tolerance
        )
    shown = (held_out, prob_BT[: evaluation_request.passages], action_BT[: evaluation_request.passages])
    return RunEvaluation(
        version=VERSION,
        checkpoint=trained.path.name,
        evaluation_request=evaluation_request,
        fingerprint=corpus.fingerprint,
        unit=parts.lm.codec.unit,
        loss=scores.loss_B.tolist(),
        document=held_out.document_B.tolist(),
        loss_early=None if early_B is None else early_B.mean().item(),
        loss_test=None if series is None else _test_loss(parts, series, config, options),
        boundary_rate=scores.boundary_rate,
        calibration=None if bias is None else _before(parts, held_out, config, bias),
        token_lengths=token_lengths(action_BT, LONGEST[config.data.kind]),
        agreement=agreement,
        passages=_passages(*shown) if series is None else [],
        windows=[] if series is None else make_excerpts(*shown),
        learned=Learned.of(compute_boundary_stats(held_out.symbol_BN[:, :-1], action_BT, prob_BT))
        if series is None
        else None,
        at_rates=at_rates(parts, config, evaluation_request.rates, corpus),
        forecast=_forecasts(config, parts, series, evaluation_request, options.logit_bias),
    )


def at_rates(parts: Components, config: Config, rates: Sequence[float], corpus: Corpus) -> list[RateEvaluation]:
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
        raise UserError(f"rates: {corpus.name} has one validation sequence: expected two, one of them to calibrate on")
    some = most if len(both) > most else len(both) // 2
    options = EvalOptions(config.validation.batch_size)
    measured = evaluate_rates(parts, config, rates, both[:some], both[some:], options, allow_native=True)
    return [
        RateEvaluation(p.way, p.target_rate, p.boundary_rate, p.flops, p.logit_bias, loss_B.tolist())
        for p, loss_B in measured
    ]


def _forecasts(
    config: Config,
    parts: Components,
    series: SeriesData | None,
    evaluation_request: EvaluationRequest,
    logit_bias: float,
) -> Forecasts | None:
    if evaluation_request.forecast is None or series is None:
        return None
    return score_forecasts(config, parts, series, evaluation_request.forecast, logit_bias)


def _before(parts: Components, held_out: SequenceBatch, config: Config, bias: float) -> Calibration:
    """Evaluate the run without the bias."""
    plain = evaluate(parts, held_out, EvalOptions(config.validation.batch_size))
    return Calibration(bias, plain.loss, plain.boundary_rate)


def _test_loss(parts: Components, series: SeriesData, config: Config, options: EvalOptions) -> float | None:
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


def _references(config: Config, corpus: Corpus, bpe_vocabulary: int) -> dict[str, Callable[[TensorDictBase], Tensor]]:
    """Return functions by name which draw familiar boundaries in the text of a rollout, shape [B, T]."""
    agents: dict[str, dict[str, Any]] = {
        "whitespace": {},
        "bpe": {"tokenizer": str(train_bpe(corpus, bpe_vocabulary))},
    }

    def draw_with(agent: Any) -> Callable[[TensorDictBase], Tensor]:
        return lambda td: agent.draw(td, torch.zeros(td.shape, device=td.device))[keys.ACTION]

    context = {"rate": mean_rate(config.rate), "seq_len": config.data.seq_len}
    return {
        name: draw_with(registry.build("agent", {"name": name} | options, registry.AGENTS, **context))
        for name, options in agents.items()
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
