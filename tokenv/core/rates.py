"""Boundary rates that are asked for: one for all sequences, or a range of which every sequence is asked for one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenv.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RateRange:
    """Rates of which every sequence is asked for one: ``rate = min^(1 - u) max^u`` for uniform u.

    Log-uniform, for losses fall about evenly with the rate's logarithm, so that every octave is trained alike; and the
    mean, ``(max - min) / log(max / min)``, is 0.195 from 0.05 to 0.5: such a run costs what one of rate 0.2 costs.

    Args:
        min: smallest boundaries per symbol.
        max: largest.

    Raises:
        UserError: not 0 < ``min`` < ``max`` < 1.
    """

    min: float = 0.05
    max: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.min < self.max < 1:
            raise UserError(
                f"rate.min = {self.min}, rate.max = {self.max}: expected boundaries per symbol with "
                "0 < min < max < 1, such as 0.05 and 0.5; or one number, rate=0.2"
            )

    @property
    def mean(self) -> float:
        """Of the rates that are drawn."""
        return (self.max - self.min) / math.log(self.max / self.min)

    def at(self, uniform: Tensor) -> Tensor:
        """The rates that uniform numbers in [0, 1] stand for: of their shape."""
        return self.min * (self.max / self.min) ** uniform

    def covers(self, rate: float) -> bool:
        """Whether a rate may be drawn."""
        return self.min <= rate <= self.max

    def __format__(self, how: str) -> str:
        return f"{self.min:{how}} to {self.max:{how}}"


Rate = float | RateRange


def check_rate(key: str, rate: float | None) -> None:
    """Refuse what is no rate.

    Args:
        key: what it is called where it was asked for.
        rate: boundaries per symbol; None is none.

    Raises:
        UserError: it is not in (0, 1).
    """
    if rate is not None and not 0 < rate < 1:
        raise UserError(f"{key} = {rate}: expected boundaries per symbol in (0, 1), such as 0.2")


def mean_rate(rate: Rate) -> float:
    """Boundaries per symbol that sequences are asked for on average."""
    return rate.mean if isinstance(rate, RateRange) else rate


def highest_rate(rate: Rate) -> float:
    """The most boundaries per symbol that a sequence is asked for."""
    return rate.max if isinstance(rate, RateRange) else rate
