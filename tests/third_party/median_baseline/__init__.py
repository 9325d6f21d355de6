"""Somebody else's baseline: the median over the other samples of the same text."""

import torch

from tokenv.estimators.base import Stage, chain
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.estimators.surrogates import ScoreFunction


class MedianOfOthers(Stage):
    in_keys = out_keys = ["advantage"]
    samples = 3

    def forward(self, td):
        credit = td["advantage"]  # [.., K, B, T]
        others = [
            credit.roll(-k, -3)[..., 1:, :, :].median(-3).values for k in range(credit.shape[-3])
        ]
        return td.set("advantage", credit - torch.stack(others, -3))


def median(gamma=0.99, num_samples=3):
    return chain(
        EarlyExit(), Discount(gamma), MedianOfOthers(), ScoreFunction(), num_samples=num_samples
    )
