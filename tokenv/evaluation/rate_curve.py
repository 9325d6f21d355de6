"""What a model is worth at several rates: its loss against what reading costs, asked rates against realised ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tokenv.config.components import Components
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.evaluation.calibration import calibrate
from tokenv.evaluation.evaluator import (
    clustered_standard_error,
    concat_columns,
    held_out_rollouts,
    realised_rate,
    sequence_losses,
    sequence_sums,
)
from tokenv.evaluation.requested_rate import resolve_rate
from tokenv.lm.flops import reading_flops

TOLD, CALIBRATED, DOUBT, OWN = "told", "calibrated", "by doubt", "own"


@dataclass(frozen=True)
class RatePoint:
    """A model at one rate.

    Attributes:
        way: how it was asked: ``told`` the rate; ``calibrated``: logits shifted until held-out text has that rate; ``by
            doubt``: the same, of logits that were raised where the early exit is unsure; ``own``: nothing moves it.
        asked: boundaries per symbol; the drawn ones where nobody can ask.
        rate: as drawn.
        loss: in the codec's unit.
        standard_error: of the loss.
        flops: of reading a symbol at the drawn rate: ``tokenv.lm.flops.reading_flops``.
        logit_bias: the shift; 0 where none was.
        run: whose model it is, for people.
        doubt: by how much logits were raised for each nat of the early exit's entropy.
        difference: the loss minus that of the same model ``calibrated`` to the same rate, where doubt counts; None
            elsewhere.
        difference_error: its standard error, documents being the independent units.
    """

    way: str
    asked: float
    rate: float
    loss: float
    standard_error: float
    flops: float
    logit_bias: float = 0.0
    run: str = ""
    doubt: float = 0.0
    difference: float | None = None
    difference_error: float | None = None


def evaluate_rates(
    parts: Components,
    config: Config,
    rates: Sequence[float],
    held_out: SequenceBatch,
    own: SequenceBatch | None = None,
    *,
    batch_size: int,
    seed: int = 0,
    progress: bool = False,
    run: str = "",
    doubts: Sequence[float] = (),
    unmoved: bool = False,
) -> Iterator[tuple[RatePoint, Tensor]]:
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
        doubts: with ``own``, measure again with logits raised by so much for each nat of the early exit's entropy, and
            calibrated to the same rate.
        unmoved: measure an agent that knows one rate, and that nothing moves, at its own, once; or else refuse it.

    Yields:
        A point, and every sequence's share of its loss, float64 [B]. Of every rate, a model that is told it at what it
        makes of that, and with ``own`` any model calibrated to it. An agent whose number of boundaries is the asked for
        one anyway has nothing to calibrate.

    Raises:
        UserError: not ``unmoved``, an agent knows one rate, and nothing moves it; or nothing moves it, and ``doubts``
            are given.
    """
    told, reached = parts.agent.rates is not None, False
    how: dict[str, Any] = {"batch_size": batch_size, "seed": seed}

    def measured(way: str, asked: float | None, **of: Any) -> tuple[RatePoint, Tensor]:
        rate = asked if told else None
        rollouts = held_out_rollouts(parts, held_out, rate=rate, progress=progress, **how, **of)
        whole = concat_columns(
            [
                sequence_sums(td, parts.lm.codec)
                | {"action": td[keys.ACTION].cpu(), "decides": td[keys.DECISION_MASK].cpu()}
                for td in rollouts
            ]
        )
        (loss_B, _), drawn = sequence_losses(whole), realised_rate(whole["action"], whole["decides"])
        error = clustered_standard_error(loss_B, held_out.document_B)
        flops = reading_flops(parts.lm, drawn, parts.agent)
        asked = drawn if asked is None else asked
        return RatePoint(way, asked, drawn, loss_B.mean().item(), error, flops, run=run, **of), loss_B

    for asked in rates:
        if told:
            resolve_rate(parts, config, asked)
            yield measured(TOLD, asked)
        constant_B: Tensor | None = None
        if own is None:
            continue
        for doubt in dict.fromkeys((0.0, *doubts)):
            bias = calibrate(parts, own, asked, doubt=doubt, **how)
            if bias is None and (doubts or not (told or unmoved)):
                raise _unmoved(config, asked)
            if bias is None:
                continue
            reached = True
            point, loss_B = measured(DOUBT if doubt else CALIBRATED, asked, logit_bias=bias, doubt=doubt)
            if constant_B is None:
                constant_B = loss_B
            else:
                less_B = loss_B - constant_B
                error = clustered_standard_error(less_B, held_out.document_B)
                point = replace(point, difference=less_B.mean().item(), difference_error=error)
            yield point, loss_B
    if rates and unmoved and not (told or reached):
        yield measured(OWN, None)


def _unmoved(config: Config, asked: float) -> UserError:
    return UserError(
        f"rates: no logit bias brings agent {config.agent['name']!r} to {asked:g}: expected a run whose rate is a "
        "range (without doubt), or rates within its reach"
    )
