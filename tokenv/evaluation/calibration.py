"""Shift a policy's logits to a boundary rate, and evaluate a model at several rates.

A policy is trained towards its rate and ends a little off it, and one boundary more or less matters more than most
estimators differ. Every decision is ``a = [l > logit(u)]`` with uniform noise u. Logits shifted by a bias c are
therefore noise shifted the other way, ``[l + c > logit(u)] = [l > logit(u) - c]``, and no agent needs to know the bias.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tokenv.config.components import Components
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.clustered_errors import clustered_standard_error
from tokenv.core.errors import UserError
from tokenv.core.rates import Rate, RateRange
from tokenv.core.sequences import HeldOutData, SequenceBatch
from tokenv.evaluation.evaluator import (
    DEFAULTS,
    EvalOptions,
    eval_mode,
    evaluate_sequences,
    num_boundary_sites,
    shift_noise,
)
from tokenv.evaluation.loaded_run import (
    LoadedRun,
    Segmentation,
    iterate_batches,
    resolve_rate,
    segment,
    split_text,
)
from tokenv.lm.flops import reading_flops
from tokenv.plotting.console import warn

# initial interval of logit biases; its upper end is doubled up to MAX_BIAS
LOWEST, HIGHEST = -12.0, 12.0
# float32 resolves noise shifted this far up; near 1 it does not, so the lower end is fixed
MAX_BIAS = 48.0
SAMPLES = 4  # noise samples per text: the calibrated rate has a fourth of one sample's variance


def split_for_calibration(
    corpus: HeldOutData, sequences: int
) -> tuple[SequenceBatch, SequenceBatch]:
    """Return validation sequences to evaluate, and others to calibrate on.

    If the corpus has at most ``sequences`` validation sequences, half of them are for calibration.

    Args:
        corpus: source of both.
        sequences: maximum number to evaluate, the same ones as without calibration; at most as many are returned for
            calibration.

    Raises:
        UserError: if there is a single sequence.
    """
    both = corpus.validation(2 * sequences)
    if len(both) <= sequences:
        sequences = len(both) // 2
    if not sequences:
        raise UserError(
            f"calibrating takes validation sequences of its own, and {corpus.name} has {len(both)}: expected two or "
            "more: raise data.validation, lower data.seq_len or give more data"
        )
    return both[:sequences], both[sequences:]


def calibrate(
    components: Components, batch: SequenceBatch, rate: Rate, options: EvalOptions = DEFAULTS
) -> float | None:
    """Return the logit bias with which an agent draws boundaries at a rate.

    Args:
        components: model and agent; they keep their mode.
        batch: held-out sequences which are not evaluated.
        rate: boundaries per position which may have one. A rate-conditioned agent is given this rate; for a range it is
            given rates sampled from its own range, and the bias is for their mean.
        options: seed of the noise, batch size and entropy weight.

    Returns:
        The bias, for ``EvalOptions.logit_bias``; None if no bias reaches the rate, since the agent's boundaries do not
        depend on the noise or have a fixed number.
    """
    device = components.lm.head.weight.device
    target_rate = None if components.agent.rates is None or isinstance(rate, RateRange) else rate
    with (
        eval_mode(components, EvalOptions(seed=options.seed, rate=target_rate)) as draw,
        torch.no_grad(),
    ):
        size = options.sequences_per_pass(batch.symbol_BN.shape[1])
        observed = [draw.observe(symbol_BN) for symbol_BN in batch.symbol_BN.split(size)]
        generator = torch.Generator(device).manual_seed(options.seed)
        noises = [
            torch.rand(SAMPLES, *td.shape, device=device, generator=generator) for td in observed
        ]
        if options.entropy_weight:
            entropies = [components.lm.early_entropy(td[keys.ENCODING]) for td in observed]
            noises = [
                shift_noise(u, options.entropy_weight * h)
                for u, h in zip(noises, entropies, strict=True)
            ]
        mean = rate
        if isinstance(mean, RateRange):  # the mean of the sampled rates
            mean = sum(td[keys.TARGET_RATE].sum().item() for td in observed) / sum(
                td.numel() for td in observed
            )

        def excess(bias: float) -> float:
            boundaries = sites = 0
            for td, noise in zip(observed, noises, strict=True):
                action = components.agent.draw(td, shift_noise(noise, bias))[keys.ACTION]
                boundaries += action.sum().item()
                sites += num_boundary_sites(td[keys.DECISION_MASK].expand(action.shape))
            return boundaries / sites - mean

        highest, least, most = _bracket(excess)
        return _find_root(excess, highest, 3e-3) if least < 0 < most else None


def _bracket(excess: Callable[[float], float]) -> tuple[float, float, float]:
    """Return an upper bias, and the values of a non-decreasing function at ``LOWEST`` and at this bias.

    If the function has a root up to ``MAX_BIAS``, it lies between these.
    """
    highest = HIGHEST
    least = excess(LOWEST)
    while (most := excess(highest)) <= 0 and highest < MAX_BIAS:
        highest *= 2
    return highest, least, most


def segment_at_rate(
    trained: LoadedRun, text: bytes, options: EvalOptions = DEFAULTS, *, tokens: int | None = None
) -> Segmentation:
    """Draw boundaries in a text with ``options_for_text``."""
    return segment(trained, text, options_for_text(trained, text, options, tokens=tokens))


def options_for_text(
    trained: LoadedRun, text: bytes, options: EvalOptions = DEFAULTS, *, tokens: int | None = None
) -> EvalOptions:
    """Return the options which draw a text's boundaries at their rate, or as many as make ``tokens`` tokens.

    A rate-conditioned model is given the rate. The logits of any other model are shifted until this text has the rate;
    a warning says so if it stays more than one boundary off.

    Args:
        trained: model of a run.
        text: text of at least one byte.
        options: how to draw; a rate of None is the model's own.
        tokens: exact number of tokens, in place of a rate. The logits of any model are shifted to it; a warning says so
            if it cannot be reached, for instance if positions with equal probability are thresholded.

    Raises:
        UserError: if the text is empty, or the rate or the number of tokens is out of range or cannot be reached.
    """
    rate = options.rate
    if tokens is not None:
        return _options_for_tokens(trained, text, options, tokens)
    if rate is None or trained.components.agent.rates is not None:
        return options
    if not 0 < rate <= 1:
        raise UserError(f"rate = {rate}: expected boundaries per byte in (0, 1], such as 0.2")

    def boundary_rate(action_N: Tensor) -> float:
        return action_N.double().mean().item()

    return _shift_logits(
        trained,
        text,
        replace(options, rate=None),
        "rate",
        rate,
        boundary_rate,
        (1 + 1e-9) / max(1, len(text)),  # one boundary, rounded
    )


def _options_for_tokens(
    trained: LoadedRun, text: bytes, options: EvalOptions, tokens: int
) -> EvalOptions:
    if not 1 <= tokens <= len(text):
        raise UserError(f"tokens = {tokens}: expected 1 to {len(text)}, the bytes of the text")
    conditioned = trained.components.agent.rates is not None
    rate = min(tokens / len(text), 1 - 1 / (len(text) + 1)) if conditioned else None
    options = replace(options, rate=resolve_rate(trained.components, trained.config, rate))

    def count(action_N: Tensor) -> float:
        return action_N[:-1].sum().item() + 1.0  # the last byte always ends a token

    return _shift_logits(trained, text, options, "tokens", tokens, count, 0)


def _shift_logits(
    trained: LoadedRun,
    text: bytes,
    options: EvalOptions,
    name: str,
    requested: float,
    measure: Callable[[Tensor], float],
    tolerance: float,
) -> EvalOptions:
    """Return the options with the logit bias at which a measure of the drawn boundaries is as requested.

    Args:
        trained: model of a run.
        text: text.
        options: how to draw.
        name: name of the measure.
        requested: its value.
        measure: function from boundaries [N] to the measure, which increases with the bias.
        tolerance: difference from the requested value above which a warning says what was reached.

    Raises:
        UserError: the agent's boundaries do not depend on logits.
    """
    found = _find_text_bias(trained, text, options, lambda action_N: measure(action_N) - requested)
    if found is None:
        raise UserError(
            f"{name} = {requested}: the agent {trained.config.agent['name']} does not draw by logits that could be "
            "shifted: expected none, which is its own"
        )
    bias, excess = found
    if abs(excess) > tolerance:
        nearest = requested + excess
        warn(
            f"{name} = {requested}: no logit bias draws it in this text; the nearest is {nearest:.7g}"
        )
    return replace(options, logit_bias=bias)


def _find_text_bias(
    trained: LoadedRun, text: bytes, options: EvalOptions, excess: Callable[[Tensor], float]
) -> tuple[float, float] | None:
    """Return the logit bias at which ``excess`` of the drawn boundaries [N] is zero or least, and the excess there.

    Returns:
        None if no bias changes the boundaries.
    """
    agent = trained.components.agent
    size = options.sequences_per_pass(trained.config.data.seq_len)
    with eval_mode(trained.components, options) as draw, torch.no_grad():
        batches = iterate_batches(draw, [split_text(trained, text)], size)  # in the text's order
        observed = [
            draw.observe(symbol_BN, noise_BT=noise_BT) for _, symbol_BN, noise_BT in batches
        ]

        def excess_at(bias: float) -> float:
            drawn = [
                agent.draw(td, shift_noise(td[keys.NOISE], bias))[keys.ACTION].flatten()
                for td in observed
            ]
            return excess(torch.cat(drawn))

        bias = 0.0
        if any(td[keys.DECISION_MASK].any() for td in observed):
            highest, least, most = _bracket(excess_at)
            if least == most:
                return None
            if least >= 0:
                bias = LOWEST
            elif most <= 0:
                bias = highest
            else:
                bias = _find_root(excess_at, highest, 1e-7)
        return bias, excess_at(bias)


# How a rate was set; stored in the evaluations of comparisons.
CONDITIONED = "conditioned"
CALIBRATED = "calibrated"
ENTROPY_WEIGHTED = "entropy-weighted"
NATIVE = "own"


@dataclass(frozen=True)
class RatePoint:
    """Figures of a model at one rate.

    Attributes:
        way: how the rate was set. ``conditioned``: the agent is rate-conditioned. ``calibrated``: by shifted logits.
            ``entropy-weighted``: the same with logits raised where the early exit is uncertain. ``own``: not at all,
            since the agent can be neither conditioned nor calibrated.
        target_rate: requested boundaries per symbol; the drawn ones for ``own``.
        boundary_rate: drawn boundaries per symbol.
        loss: loss in the codec's unit.
        standard_error: standard error of the loss.
        flops: floating-point operations to read a symbol at the drawn rate: ``tokenv.lm.flops.reading_flops``.
        logit_bias: number which was added to all logits.
        run: name of the run.
        entropy_weight: number which was added to a logit for each nat of the early exit's entropy.
        difference: with an entropy weight, the loss minus that of the same model ``calibrated`` to the same rate.
        difference_error: standard error of the difference, with documents as the independent units.
    """

    way: str
    target_rate: float
    boundary_rate: float
    loss: float
    standard_error: float
    flops: float
    logit_bias: float = 0.0
    run: str = ""
    entropy_weight: float = 0.0
    difference: float | None = None
    difference_error: float | None = None


def evaluate_rates(
    components: Components,
    config: Config,
    rates: Sequence[float],
    held_out: SequenceBatch,
    calibration: SequenceBatch | None = None,
    options: EvalOptions = DEFAULTS,
    *,
    run: str = "",
    entropy_weights: Sequence[float] = (),
    allow_native: bool = False,
) -> Iterator[tuple[RatePoint, Tensor]]:
    """Evaluate a model at several rates on the same sequences.

    Args:
        components: model and agent; they keep their mode.
        config: configuration of their run.
        rates: boundaries per symbol, in (0, 1).
        held_out: sequences to evaluate.
        calibration: other sequences to calibrate on; None to only condition the agent on the rates.
        options: batch size, seed and progress bars.
        run: name of the run.
        entropy_weights: weights to evaluate in addition, calibrated to the same rates.
        allow_native: evaluate an agent which can be neither conditioned nor calibrated once, at its own rate, instead
            of raising an error.

    Yields:
        A point, and each sequence's contribution to its loss, float64 [B]. There is a point for each rate if the agent
        is rate-conditioned, and further ones, calibrated, if ``calibration`` is given and logits move the agent.

    Raises:
        UserError: if a rate cannot be reached without ``allow_native`` or with ``entropy_weights``.
    """
    conditioned = components.agent.rates is not None
    calibrated = False
    measure = partial(_measure_point, components, held_out, run=run)
    for rate in rates:
        if conditioned:
            resolve_rate(components, config, rate)
            yield measure(CONDITIONED, rate, replace(options, rate=rate))
        if calibration is None:
            continue
        baseline_B: Tensor | None = None
        conditioned_rate = rate if conditioned else None
        for weight in dict.fromkeys((0.0, *entropy_weights)):
            shifted = replace(options, rate=conditioned_rate, entropy_weight=weight)
            bias = calibrate(components, calibration, rate, shifted)
            if bias is None and (entropy_weights or not (conditioned or allow_native)):
                raise UserError(
                    f"rates: no logit bias brings agent {config.agent['name']!r} to {rate:g}: expected a run whose "
                    "rate is a range (without an entropy weight), or rates within its reach"
                )
            if bias is None:
                continue
            calibrated = True
            way = ENTROPY_WEIGHTED if weight else CALIBRATED
            point, loss_B = measure(way, rate, replace(shifted, logit_bias=bias))
            if baseline_B is None:
                baseline_B = loss_B
            else:
                error = clustered_standard_error(loss_B - baseline_B, held_out.document_B)
                difference = (loss_B - baseline_B).mean().item()
                point = replace(point, difference=difference, difference_error=error)
            yield point, loss_B
    if rates and allow_native and not (conditioned or calibrated):
        yield measure(NATIVE, None, options)


def _measure_point(
    components: Components,
    held_out: SequenceBatch,
    way: str,
    rate: float | None,
    options: EvalOptions,
    *,
    run: str,
) -> tuple[RatePoint, Tensor]:
    scores = evaluate_sequences(components, held_out, options)
    target_rate = scores.boundary_rate if rate is None else rate
    point = RatePoint(
        way,
        target_rate=target_rate,
        boundary_rate=scores.boundary_rate,
        loss=scores.loss,
        standard_error=clustered_standard_error(scores.loss_B, held_out.document_B),
        flops=reading_flops(
            components.lm, scores.boundary_rate, components.agent, held_out.symbol_BN.shape[1]
        ),
        logit_bias=options.logit_bias,
        run=run,
        entropy_weight=options.entropy_weight,
    )
    return point, scores.loss_B


def _find_root(excess: Callable[[float], float], highest: float, tolerance: float) -> float:
    # its import takes longer than most commands which load this module need
    from scipy import optimize

    return float(optimize.brentq(excess, LOWEST, highest, xtol=tolerance))
