"""Agents whose sequences have target rates of their own."""

import torch

from tokenv.agents.exact_count import ExactCount
from tokenv.agents.fixed import Random, Uniform
from tokenv.agents.learned import Learned
from tokenv.core.rates import RateRange
from tokenv.evaluation.calibration import evaluate_rates

RANGE = RateRange(0.1, 0.6)


def stir(agent, spread=0.5):
    """Randomise a policy's parameters so that it depends on the encoding, earlier boundaries and the rate."""
    with torch.no_grad():
        agent.projection.weight.normal_(std=spread)
        agent.film.last.weight.normal_(std=0.3)
    return agent


def rate_conditioned_agents(width, length):
    """Return all agents which read a target rate, by name, in float64."""
    return {
        "learned, w = 0": stir(Learned(width, window=0, scale=1.0, rates=RANGE)).double(),
        "learned, w = 3": stir(Learned(width, window=3, scale=1.0, rates=RANGE)).double(),
        "learned, evaluating": stir(Learned(width, window=3, scale=1.0, rates=RANGE))
        .double()
        .eval(),
        "exact_count, w = 2": stir(
            ExactCount(width, length, window=2, scale=1.0, rates=RANGE)
        ).double(),
        "uniform": Uniform(0.3, length, rates=RANGE),
        "random": Random(0.3, length, rates=RANGE),
        "uniform, rounding at random": Uniform(0.3, length, rounding="random", rates=RANGE),
        "random, rounding at random": Random(0.3, length, rounding="random", rates=RANGE),
    }


def rate_curve(*given, **named):
    """Return the points of a model's rate curve."""
    return [point for point, _ in evaluate_rates(*given, **named)]
