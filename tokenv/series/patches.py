"""Held-out windows of series with their patches."""

import math
from dataclasses import dataclass

from torch import Tensor

from tokenv.core.sequences import SequenceBatch
from tokenv.series.codec import COUNTED, VALUE


@dataclass(frozen=True)
class SeriesExcerpt:
    """Held-out window of N steps of a series with its drawn boundaries, as plain values for JSON.

    Attributes:
        name: description of the window's origin.
        value: value of each step and channel; None for a missing one.
        boundary_prob: boundary probabilities of the first N - 1 steps.
        action: drawn boundaries of these steps, 0 or 1.
        gold: whether a change follows each step; None if unknown.
    """

    name: str
    value: list[list[float | None]]
    boundary_prob: list[float]
    action: list[int]
    gold: list[bool] | None


def make_excerpts(batch: SequenceBatch, prob_BT: Tensor, action_BT: Tensor) -> list[SeriesExcerpt]:
    """Return the first B windows of a batch of series with their boundaries.

    Args:
        batch: at least B windows.
        prob_BT: boundary probabilities.
        action_BT: drawn boundaries.
    """
    excerpts = []
    for row, (prob_T, action_T) in enumerate(zip(prob_BT, action_BT, strict=True)):
        counted_C = batch.symbol_BN[row, -1, :, COUNTED] > 0
        value_NC = batch.symbol_BN[row, :, counted_C, VALUE]
        gold = None if batch.gold_BN is None else batch.gold_BN[row].tolist()
        excerpts.append(
            SeriesExcerpt(
                name=batch.origin[row],
                value=[_without_nan(value_C) for value_C in value_NC],
                boundary_prob=prob_T.tolist(),
                action=action_T.tolist(),
                gold=gold,
            )
        )
    return excerpts


def _without_nan(value_C: Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in value_C.tolist()]
