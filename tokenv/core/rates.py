"""Target boundary rates: one for all sequences, or a range from which each sequence draws its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenv.core.errors import UserError, bounds, check_value

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RateRange:
    """Range of target rates, one of which each sequence draws: ``rate = min^(1 - u) max^u`` for uniform u.

    The distribution is log-uniform because losses fall about linearly with the logarithm of the rate, so every octave
    is trained equally. The mean, ``(max - min) / log(max / min)``, is 0.195 for 0.05 to 0.5: such a run costs as much
    as one of rate 0.2.

    Args:
        min: smallest number of boundaries per symbol.
        max: largest number of boundaries per symbol.

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
        """Mean of the drawn rates."""
        return (self.max - self.min) / math.log(self.max / self.min)

    def at(self, uniform: Tensor) -> Tensor:
        """Map uniform numbers in [0, 1] to rates of the same shape."""
        return self.min * (self.max / self.min) ** uniform

    def __format__(self, spec: str) -> str:
        return f"{self.min:{spec}} to {self.max:{spec}}"


Rate = float | RateRange


FIXED_RATE = bounds("boundaries per symbol in (0, 1), such as 0.2", lambda rate: 0 < rate < 1)
# Range of the rates which a command is asked for; None for a run's own.
REQUESTED_RATE = bounds(
    FIXED_RATE["expected"], lambda rate: rate is None or FIXED_RATE["accepts"](rate)
)
FLOPS = bounds(
    "floating-point operations per symbol, such as 1e6", lambda value: value is None or value > 0
)


def check_rates(rates: list[float]) -> None:
    """Check the requested ``rates`` of a command.

    Raises:
        UserError: one is not in (0, 1).
    """
    for rate in rates:
        check_value("rates", rate, REQUESTED_RATE)


def mean_rate(rate: Rate) -> float:
    """Return the mean target rate in boundaries per symbol."""
    return rate.mean if isinstance(rate, RateRange) else rate


def highest_rate(rate: Rate) -> float:
    """Return the largest target rate in boundaries per symbol."""
    return rate.max if isinstance(rate, RateRange) else rate
