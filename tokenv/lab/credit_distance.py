"""How far ahead a boundary's effect on the reward reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.env.rollout import rollout
from tokenv.estimators.branching import BitFlip
from tokenv.lab.gradients import GradientProblem


@dataclass(frozen=True)
class Credit:
    """Effects of one decision, forced both ways, on the reward j symbols ahead (j = 0 is the first it can touch).

    Attributes:
        mean: E[R_{i+j+1}(a_i = 1) - R_{i+j+1}(a_i = 0)] in nats.
        mean_error: its standard error.
        rms: root of the mean squared effect, nats.
        noise: standard deviation of R_{i+j+1} itself around its mean, nats: what a single reward adds to a credit's
            variance if nothing is subtracted.
        pairs: decisions that reach j symbols ahead.
    """

    mean: list[float]
    mean_error: list[float]
    rms: list[float]
    noise: list[float]
    pairs: list[int]


@torch.no_grad()
def credit_by_distance(scene: GradientProblem, draws: int, generator: torch.Generator, longest: int = 128) -> Credit:
    """Force one random decision of every sequence both ways and compare the rewards that follow.

    Later decisions are the policy's, with the same random numbers.

    Args:
        scene: parameters and text.
        draws: rollouts.
        generator: of positions and noise.
        longest: distances 0 to longest - 1.
    """
    parts, pairs = scene.parts, Sampling(num_samples=2, couple=BitFlip().couple)
    longest = min(longest, scene.symbol_BN.shape[1] - 2)
    sums: Tensor = torch.zeros(5, longest, dtype=torch.float64)
    for _ in range(draws):
        td = rollout(parts.lm, parts.agent, scene.symbol_BN, pairs, generator=generator, rate=scene.rate)
        reward = td[keys.REWARD].squeeze(-1).double().cpu()
        noise = td[keys.NOISE].cpu()
        first = ((noise[0] == 0) & (noise[1] == 1)).long().argmax(-1)
        place = first.unsqueeze(-1) + torch.arange(longest)
        inside = place < reward.shape[-1]
        place = place.clamp(max=reward.shape[-1] - 1)
        one, zero = reward[0].gather(-1, place), reward[1].gather(-1, place)
        effect = (one - zero).where(inside, 0.0)
        plain = zero.where(inside, 0.0)
        sums += torch.stack([x.sum(0) for x in (effect, effect.square(), plain, plain.square(), inside.double())])
    effect, effect2, plain, plain2, count = (x / sums[4].clamp(min=1) for x in sums)
    count = sums[4]
    return Credit(
        mean=effect.tolist(),
        mean_error=((effect2 - effect.square()).clamp(min=0) / count.clamp(min=1)).sqrt().tolist(),
        rms=effect2.sqrt().tolist(),
        noise=(plain2 - plain.square()).clamp(min=0).sqrt().tolist(),
        pairs=[int(c) for c in count],
    )
