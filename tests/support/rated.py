"""Tiny worlds in which every sequence is asked for a rate of its own."""

import torch

from tokenv.agents.fixed import Random, Uniform
from tokenv.agents.learned import Learned
from tokenv.agents.strict import ExactCount
from tokenv.core.rates import RateRange
from tokenv.evaluation.calibration import evaluate_rates

RANGE = RateRange(0.1, 0.6)


def stir(agent, spread=0.5):
    """Give a policy parameters that say something of the encoding, of earlier boundaries and of the rate."""
    with torch.no_grad():
        agent.projection.weight.normal_(std=spread)
        agent.told.last.weight.normal_(std=0.3)
    return agent


def told_agents(width, length):
    """Every agent that can be told a rate, by name, in float64."""
    return {
        "learned, w = 0": stir(Learned(width, window=0, scale=1.0, rates=RANGE)).double(),
        "learned, w = 3": stir(Learned(width, window=3, scale=1.0, rates=RANGE)).double(),
        "learned, evaluating": stir(Learned(width, window=3, scale=1.0, rates=RANGE)).double().eval(),
        "strict, w = 2": stir(ExactCount(width, length, window=2, scale=1.0, rates=RANGE)).double(),
        "uniform": Uniform(0.3, length, rates=RANGE),
        "random": Random(0.3, length, rates=RANGE),
        "uniform, rounding at random": Uniform(0.3, length, rounding="random", rates=RANGE),
        "random, rounding at random": Random(0.3, length, rounding="random", rates=RANGE),
    }


def rate_curve(*given, **named):
    """A model's points alone."""
    return [point for point, _ in evaluate_rates(*given, **named)]
