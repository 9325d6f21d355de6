"""The rate that a trained model is asked for where it is used, and the one that meets a budget."""

from __future__ import annotations

from tokenv.config.components import Components
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.lm.flops import rate_of_flops, reading_flops
from tokenv.plotting.characters import warn


def resolve_rate(parts: Components, config: Config, rate: float | None) -> float | None:
    """The rate that a model's agent is told.

    A rate outside the range that it was trained for is told, too; a line on stderr says so.

    Args:
        parts: of the model.
        config: of its run.
        rate: boundaries per symbol that are asked for; None for the mean of its range.

    Returns:
        None for an agent that is not told a rate.

    Raises:
        UserError: it is not in (0, 1), or the agent knows one rate.
    """
    rates = parts.agent.rates
    if rate is None:
        return None if rates is None else rates.mean
    if not 0 < rate < 1:
        raise UserError(f"rate = {rate:g}: expected boundaries per symbol in (0, 1), such as 0.2")
    if rates is None:
        raise UserError(
            f"rate = {rate:g}: this run was trained for one rate, {config.rate:g}: leave it out, or take a run whose "
            "rate is a range (docs/rates.md)"
        )
    if not rates.covers(rate):
        warn(f"rate = {rate:g} is outside the range that this run was trained for, {rates:g}")
    return rate


def rate_for_flops(parts: Components, flops: float) -> float:
    """The rate at which reading or writing a symbol costs so much: see ``tokenv.lm.flops.reading_flops``.

    Args:
        parts: of the model.
        flops: floating-point operations per symbol.

    Raises:
        UserError: no rate in (0, 1) costs that.
    """
    rate = rate_of_flops(parts.lm, flops, parts.agent)
    if not 0 < rate < 1:
        least, most = (reading_flops(parts.lm, at, parts.agent) for at in (0, 1))
        raise UserError(
            f"flops = {flops:g}: expected more than {least:.4g} a symbol, which this model costs without tokens, and "
            f"less than {most:.4g}, where every symbol is one"
        )
    return rate
