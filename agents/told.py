"""What a policy makes of the rate that it is told."""

import math

import torch
from torch import Tensor, nn

from tokenv.rates import RateRange


class ToldRate(nn.Module):
    """Gains and shifts of a policy's outputs as functions of the rate (FiLM, Perez et al. 2018, arXiv 1709.07871).

    ``(g, h) = V tanh(U z + b)`` with ``z = (logit(rate) - m) / r``, -1 and 1 at the ends of the range; V starts at 0,
    so that nothing is changed at the start.

    Args:
        rates: the range.
        outputs: of the policy.
        hidden: units.
    """

    def __init__(self, rates: RateRange, outputs: int, hidden: int = 16) -> None:
        super().__init__()
        low, high = (math.log(rate / (1 - rate)) for rate in (rates.min, rates.max))
        self.middle, self.reach = (low + high) / 2, (high - low) / 2
        self.hidden, self.last = nn.Linear(1, hidden), nn.Linear(hidden, 2 * outputs, bias=False)
        nn.init.zeros_(self.last.weight)

    def forward(self, rate: Tensor) -> tuple[Tensor, Tensor]:
        """Rates [..] to gains and shifts, [.., outputs] each."""
        z = (torch.logit(rate) - self.middle) / self.reach
        gain, shift = self.last(torch.tanh(self.hidden(z.unsqueeze(-1)))).chunk(2, -1)
        return gain, shift
