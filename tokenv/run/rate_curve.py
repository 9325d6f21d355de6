"""What a model is worth at several rates: its loss against what reading costs, asked rates against realised ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenv.config.schema import Config
from tokenv.data.pieces import SequenceBatch
from tokenv.errors import UserError
from tokenv.lm.flops import reading_flops
from tokenv.run.asked import rate_to_tell
from tokenv.run.calibrate import calibrate
from tokenv.run.evaluate import evaluate
from tokenv.run.parts import Parts

TOLD, CALIBRATED = "told", "calibrated"


@dataclass(frozen=True)
class RatePoint:
    """A model at one rate.

    Attributes:
        way: how it was asked: ``told`` the rate; or ``calibrated``: logits shifted until held-out text has that rate.
        asked: boundaries per symbol.
        rate: as drawn.
        loss: in the codec's unit.
        standard_error: of the loss.
        flops: of reading a symbol at the drawn rate: ``tokenv.lm.flops.reading_flops``.
        logit_bias: the shift; 0 where none was.
        run: whose model it is, for people.
    """

    way: str
    asked: float
    rate: float
    loss: float
    standard_error: float
    flops: float
    logit_bias: float = 0.0
    run: str = ""


def rate_curve(
    parts: Parts,
    config: Config,
    rates: Sequence[float],
    held_out: SequenceBatch,
    own: SequenceBatch | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    progress: bool = False,
    run: str = "",
) -> list[RatePoint]:
    """Measure a model at several rates, all on the same text.

    Args:
        parts: model and agent; left in the mode they were in.
        config: of its run.
        rates: boundaries per symbol, in (0, 1).
        held_out: what is measured.
        own: what is calibrated on and measured nowhere; None to only tell rates.
        batch_size: sequences of one pass.
        seed: of the drawn boundaries.
        progress: show bars.
        run: name of the model.

    Returns:
        Of every rate, a model that is told it at what it makes of that, and with ``own`` any model calibrated to it. An
        agent whose number of boundaries is the asked for one anyway has nothing to calibrate.

    Raises:
        UserError: an agent knows one rate, and nothing moves it.
    """
    found: list[RatePoint] = []
    told = parts.agent.rates is not None
    for asked in rates:
        rate = rate_to_tell(parts, config, asked) if told else None
        ways = {TOLD: 0.0} if told else {}
        if own is not None:
            bias = calibrate(parts, own, asked, batch_size=batch_size, seed=seed)
            if bias is not None:
                ways[CALIBRATED] = bias
            elif not told:
                raise UserError(
                    f"rates: no logit bias brings agent {config.agent['name']!r}, whose run has one rate, to "
                    f"{asked:g}: expected a run whose rate is a range, or rates within its reach"
                )
        for way, bias in ways.items():
            of = evaluate(
                parts, held_out, batch_size=batch_size, seed=seed, logit_bias=bias, rate=rate, progress=progress
            )
            flops = reading_flops(parts.lm, of.boundary_rate, parts.agent)
            found.append(RatePoint(way, asked, of.boundary_rate, of.loss, of.standard_error, flops, bias, run))
    return found
