"""Forecasting a series: many possible continuations, boundaries drawn on the way, or a density of every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.env.generation import generate
from tokenv.env.rollout import observe
from tokenv.evaluation.evaluator import DEFAULTS, EvalOptions, shift_noise
from tokenv.forecasting.contexts import Array, ContextBatch
from tokenv.forecasting.distributions import ParametricForecast, PredictiveDistribution, SampleForecast
from tokenv.lm.codecs.series import LOCATION, SCALE, VALUE, SeriesCodec
from tokenv.lm.config import UNetConfig

MAX_BATCH = 512  # continuations written at once
MAX_BATCH_DIRECT = 64  # histories read at once


@dataclass(frozen=True)
class Forecast:
    """What follows B histories.

    Attributes:
        law: what may follow.
        boundary_BL: where patches end in the histories, bool.
        probability_BL: of a boundary there.
    """

    law: PredictiveDistribution
    boundary_BL: Array
    probability_BL: Array


def check_horizon(model: UNetConfig, horizon: int, *, direct: bool) -> None:
    """Refuse to ask a direct head for more steps than it predicts, or a model that has nothing else for others.

    Args:
        model: which is asked.
        horizon: steps.
        direct: whether its direct head is.

    Raises:
        UserError: the model's direct head does not reach so far, or is missing; not ``direct``, and the model predicts
            nothing else.
    """
    reach = model.horizon
    if direct and reach < horizon:
        has = f"reaches {reach} steps" if reach else "is missing"
        raise UserError(
            f"horizon = {horizon} with direct=True: the model's direct head {has}: train one with "
            f"model.horizon={horizon}, or let it write value by value (direct=False)"
        )
    if model.direct and not direct:
        raise UserError("direct = False: this model, with model.direct=True, predicts its horizon at once: direct=True")


def histories_together(samples: int, *, direct: bool) -> int:
    """How many histories are best continued in one batch."""
    return MAX_BATCH_DIRECT if direct else max(1, MAX_BATCH // samples)


@torch.no_grad()
def forecast(
    parts: Components,
    batch: ContextBatch,
    horizon: int,
    options: EvalOptions = DEFAULTS,
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
    direct: bool = False,
) -> Forecast:
    """Continue histories, value by value, as the model's own density and policy draw them; or all values at once.

    Args:
        parts: model and agent, in evaluation mode.
        batch: the histories.
        horizon: steps H to write.
        options: seed, rate and, only with ``direct``, logit bias.
        samples: continuations S of every history, which is read once; nothing to ``direct``.
        generator: of values and boundaries, on the model's device; None for one with the options' seed.
        direct: ask the direct head: a density per step, and nothing of how steps hang together.

    Raises:
        UserError: ``samples`` below 2; see ``check_horizon``.
    """
    assert direct or not options.logit_bias
    if samples < 2:
        raise UserError(f"samples = {samples}: expected at least 2, to tell a spread")
    check_horizon(parts.lm.config, horizon, direct=direct)
    lm, history_BL = parts.lm, batch.symbol_BL
    generator = generator or torch.Generator(lm.head.weight.device).manual_seed(options.seed)
    assert isinstance(lm.codec, SeriesCodec)
    location_BC, scale_BC = history_BL[:, 0, :, LOCATION], history_BL[:, 0, :, SCALE]
    if direct:
        # Nothing is decided at the last symbol, nor at those that are predicted at once: so many more are put there.
        more = [history_BL[:, -1:]] * (lm.config.horizon if lm.config.direct else 1)
        symbol_BN = torch.cat([history_BL, *more], 1).to(generator.device)
        observed = observe(lm, parts.agent, symbol_BN, options.rate)[:, : history_BL.shape[1]]
        noise_BL = torch.rand(observed.shape, device=generator.device, generator=generator)
        noise_BL = shift_noise(noise_BL, options.logit_bias) if options.logit_bias else noise_BL
        drawn = parts.agent.draw(observed, noise_BL)
        action_BL, probability_BL = drawn[keys.ACTION], drawn[keys.BOUNDARY_PROB]
        y_BLD = lm.decode_hidden(observed[keys.ENCODING], action_BL, drawn.get(keys.BOUNDARY, None))
        parameters_BHP = lm.direct(y_BLD[:, -1])[:, :horizon].double().cpu()
        base_BC = lm.codec.base(history_BL[:, -1])
        law: PredictiveDistribution = ParametricForecast(
            lm.codec, parameters_BHP, location_BC + scale_BC * base_BC, scale_BC
        )
    else:
        there = history_BL.to(generator.device)
        written = generate(lm, parts.agent, there, horizon, samples=samples, generator=generator, rate=options.rate)
        known = history_BL.shape[1]
        value_BSHC = written.symbol_BN[:, known:, :, VALUE].unflatten(0, (-1, samples)).cpu()
        law = SampleForecast((value_BSHC * scale_BC[:, None, None] + location_BC[:, None, None]).numpy())
        action_BL, probability_BL = (x[::samples, :known] for x in (written.action_BN, written.boundary_prob_BN))
    return Forecast(law, action_BL.bool().cpu().numpy(), probability_BL.float().cpu().numpy())
