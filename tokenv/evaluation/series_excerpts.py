"""Make excerpts of series with the boundaries which a run draws in them, as plain values which JSON keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from tokenv.core.sequences import SequenceBatch
from tokenv.lm.codecs.series import VALUE


@dataclass(frozen=True)
class SeriesExcerpt:
    """A held-out window of N steps of a series with the boundaries that a run draws in it.

    Attributes:
        name: where it comes from, for people.
        value: of every step and channel; None where missing.
        boundary_prob: of the first N - 1 steps.
        action: drawn boundaries of these, 0 or 1.
        gold: whether a change follows, of every step; None if unknown.
    """

    name: str
    value: list[list[float | None]]
    boundary_prob: list[float]
    action: list[int]
    gold: list[bool] | None


def make_excerpts(batch: SequenceBatch, prob_BT: Tensor, action_BT: Tensor) -> list[SeriesExcerpt]:
    """The windows of a batch of series, as many as there are boundaries of.

    Args:
        batch: of at least B windows.
        prob_BT: boundary probabilities.
        action_BT: drawn boundaries.
    """
    return [
        SeriesExcerpt(
            name=batch.origin[row],
            value=[
                [None if math.isnan(value) else value for value in value_C]
                for value_C in batch.symbol_BN[row, ..., VALUE].tolist()
            ],
            boundary_prob=prob_T.tolist(),
            action=action_T.tolist(),
            gold=None if batch.gold_BN is None else batch.gold_BN[row].tolist(),
        )
        for row, (prob_T, action_T) in enumerate(zip(prob_BT, action_BT, strict=True))
    ]
