"""Rates that match: shift a policy's logits until it draws the boundaries that its run asked for.

A policy is trained towards its rate and ends a little off it, and a boundary more or less is worth more than most
estimators differ by. Every decision is ``a = [l > logit(u)]`` for uniform noise u, so that logits shifted by a bias c
are noise shifted the other way, ``[l + c > logit(u)] = [l > logit(u) - c]``: no agent needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from scipy import optimize
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.core.rates import Rate, RateRange
from tokenv.core.sequences import HeldOutData, SequenceBatch
from tokenv.evaluation.evaluator import eval_mode, num_decision_sites, shift_noise
from tokenv.evaluation.loaded_run import LoadedRun, Segmentation, segment, split_text
from tokenv.evaluation.requested_rate import resolve_rate
from tokenv.plotting.characters import warn

LOWEST, HIGHEST = -12.0, 12.0  # logit biases between which the asked rate is looked for; the upper end is doubled
FARTHEST = 48.0  # up to this one, where float32 still tells shifted noise apart; near 1 it does not, so not downwards
SAMPLES = 4  # draws of every text: the rate that is looked for has a fourth of one draw's variance


def split_for_calibration(corpus: HeldOutData, sequences: int) -> tuple[SequenceBatch, SequenceBatch]:
    """Validation sequences to measure, and others to calibrate on.

    Where there are no more than are to be measured, half of them are for calibration.

    Args:
        corpus: what both are taken from.
        sequences: to measure at most, the same as without calibration; at most as many follow for calibration.

    Raises:
        UserError: there is a single sequence.
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
    parts: Components, batch: SequenceBatch, rate: Rate, *, batch_size: int, seed: int = 0, doubt: float = 0.0
) -> float | None:
    """The logit bias with which an agent draws the asked-for rate.

    Args:
        parts: model and agent; left in the mode they were in.
        batch: held-out sequences that are measured nowhere else.
        rate: boundaries per symbol that predicts another, the first ones included. An agent that is told its rate is
            told this one; with its range it is told rates of that, and the bias is for their mean.
        batch_size: sequences of one pass.
        seed: of the noise.
        doubt: beside the bias, as in ``eval_mode``.

    Returns:
        c, to be given to ``evaluate`` as ``logit_bias``; None for an agent whose boundaries are no matter of noise or
        whose number of them is fixed, so that no bias moves it there.
    """
    device = parts.lm.head.weight.device
    told = None if parts.agent.rates is None or isinstance(rate, RateRange) else rate
    with eval_mode(parts, seed=seed, rate=told) as draw, torch.no_grad():
        observed = [draw.observe(symbol_BN) for symbol_BN in batch.symbol_BN.split(batch_size)]
        generator = torch.Generator(device).manual_seed(seed)
        noises = [torch.rand(SAMPLES, *td.shape, device=device, generator=generator) for td in observed]
        if doubt:
            raised = [doubt * parts.lm.early_entropy(td[keys.ENCODING]) for td in observed]
            noises = [shift_noise(noise, more) for noise, more in zip(noises, raised, strict=True)]
        wanted = _asked(observed) if isinstance(rate, RateRange) else rate
        excess = partial(_excess, parts, observed, noises, wanted)
        highest, least, most = _bracket(excess)
        if not least < 0 < most:
            return None
        return float(optimize.brentq(excess, LOWEST, highest, xtol=3e-3))


def _bracket(excess: Callable[[float], float]) -> tuple[float, float, float]:
    """Return an upper bias, and what ``excess``, which does not fall, is at ``LOWEST`` and there.

    Its root lies between these where it has one up to ``FARTHEST``.
    """
    highest, least = HIGHEST, excess(LOWEST)
    while (most := excess(highest)) <= 0 and highest < FARTHEST:
        highest *= 2
    return highest, least, most


def calibrate_text(
    trained: LoadedRun, text: bytes, rate: float, *, seed: int = 0, threshold: bool = False
) -> float | None:
    """The logit bias with which ``segment`` draws the asked-for rate in this very text, as near as boundaries can be.

    Args:
        trained: the model.
        text: at least one byte.
        rate: boundaries per byte, the first byte's included.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.

    Returns:
        c, to be given to ``segment`` as ``logit_bias``; None where no bias changes the number of boundaries.

    Raises:
        UserError: the text is empty.
    """
    told = resolve_rate(trained.parts, trained.config, None)
    return _bias_of_text(trained, text, lambda drawn: drawn.double().mean().item() - rate, told, seed, threshold)


def _bias_of_text(
    trained: LoadedRun, text: bytes, excess: Callable[[Tensor], float], told: float | None, seed: int, threshold: bool
) -> float | None:
    """The logit bias at which boundaries [N] exceed what is asked for by nothing; None where no bias moves them."""
    parts = trained.parts
    with eval_mode(parts, seed=seed, threshold=threshold, rate=told) as draw, torch.no_grad():
        observed = [draw.observe(symbol_BN) for symbol_BN in split_text(trained, text)]
        if not any(td[keys.DECISION_MASK].any() for td in observed):
            return 0.0

        def exceeds(bias: float) -> float:
            drawn = [parts.agent.draw(td, shift_noise(td[keys.NOISE], bias))[keys.ACTION].flatten() for td in observed]
            return excess(torch.cat(drawn))

        highest, least, most = _bracket(exceeds)
        if least == most:
            return None
        if least >= 0 or most <= 0:
            return LOWEST if least >= 0 else highest
        return float(optimize.brentq(exceeds, LOWEST, highest, xtol=1e-7))


def segment_at_rate(
    trained: LoadedRun,
    text: bytes,
    rate: float | None = None,
    *,
    tokens: int | None = None,
    seed: int = 0,
    threshold: bool = False,
) -> Segmentation:
    """Draw boundaries in a text, as many as are asked for.

    Args:
        trained: the model.
        text: at least one byte.
        rate: boundaries per byte. A model that was trained for a range of rates is told it; the logits of any other are
            shifted until this text has them, as near as it can; a line on stderr says where that is more than one
            boundary off. None for the model's own.
        tokens: a budget in place of a rate: exactly so many tokens, the logits of any model being shifted until the
            text has them; a line on stderr where that cannot be, as where places of equal probability are thresholded.
        seed: of the drawn boundaries.
        threshold: draw a boundary where its probability is above 1/2, instead of sampling.

    Raises:
        UserError: the text is empty, or the rate or number none or nothing that this model can be moved to.
    """
    how: dict[str, Any] = {"seed": seed, "threshold": threshold}
    if tokens is not None:
        return _in_tokens(trained, text, tokens, **how)
    if rate is None or trained.parts.agent.rates is not None:
        return segment(trained, text, rate=rate, **how)
    if not 0 < rate <= 1:
        raise UserError(f"rate = {rate}: expected boundaries per byte in (0, 1], such as 0.2")
    bias = calibrate_text(trained, text, rate, **how)
    if bias is None:
        raise _unmoved(trained, f"rate = {rate}")
    cut = segment(trained, text, logit_bias=bias, **how)
    if abs(sum(cut.boundary_N) - rate * len(text)) > 1:
        found = sum(cut.boundary_N) / len(text)
        warn(f"rate = {rate:g}: no logit bias draws it in this text; the nearest is {found:.3g}")
    return cut


def _in_tokens(trained: LoadedRun, text: bytes, tokens: int, *, seed: int, threshold: bool) -> Segmentation:
    if not 1 <= tokens <= len(text):
        raise UserError(f"tokens = {tokens}: expected 1 to {len(text)}, the bytes of the text")
    wanted = None if trained.parts.agent.rates is None else min(tokens / len(text), 1 - 1 / (len(text) + 1))
    told = resolve_rate(trained.parts, trained.config, wanted)
    # Whether the last byte ends a token is no matter: the text ends there.
    bias = _bias_of_text(trained, text, lambda drawn: drawn[:-1].sum().item() + 1.0 - tokens, told, seed, threshold)
    if bias is None:
        raise _unmoved(trained, f"tokens = {tokens}")
    cut = segment(trained, text, logit_bias=bias, rate=told, seed=seed, threshold=threshold)
    found = sum(cut.boundary_N[:-1]) + 1
    if found != tokens:
        warn(f"tokens = {tokens}: no logit bias cuts this text into just so many; these are {found}")
    return cut


def _unmoved(trained: LoadedRun, asked: str) -> UserError:
    name = trained.config.agent["name"]
    return UserError(
        f"{asked}: the agent {name} does not draw by logits that could be shifted: expected none, which is its own"
    )


def _asked(observed: list[TensorDictBase]) -> float:
    return sum(td[keys.TARGET_RATE].sum().item() for td in observed) / sum(td.numel() for td in observed)


def _excess(parts: Components, observed: list[TensorDictBase], noises: list[Tensor], rate: float, bias: float) -> float:
    """By how much boundaries per symbol exceed a rate: not falling in the bias."""
    drawn = [
        parts.agent.draw(td, shift_noise(noise, bias))[keys.ACTION] for td, noise in zip(observed, noises, strict=True)
    ]
    each = [
        num_decision_sites(td[keys.DECISION_MASK].expand(action.shape))
        for td, action in zip(observed, drawn, strict=True)
    ]
    return sum(action.sum().item() for action in drawn) / sum(each) - rate
