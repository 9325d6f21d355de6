"""How fast a model reads and writes, as a function of the rate: fewer tokens, less work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from tokenv.agents.fixed import Uniform
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.lm.flops import reading_flops
from tokenv.lm.unet import UNet

PROMPT = 8  # symbols


def reading_and_writing(lm: UNet, rates: Sequence[float], symbol_BN: Tensor) -> dict[str, Callable[[], object]]:
    """What is to be timed: each way at each rate, by name; boundaries are evenly spaced.

    Args:
        lm: the model, in evaluation mode.
        rates: boundaries per symbol.
        symbol_BN: what is read in one pass; a row of so many symbols is written.
    """
    length = symbol_BN.shape[1]
    prompt = symbol_BN[:1, :PROMPT]
    found: dict[str, Callable[[], object]] = {}
    for rate in rates:
        agent = Uniform(rate, length)
        found[f"reading {rate:g}"] = torch.no_grad()(partial(rollout, lm, agent, symbol_BN))
        found[f"writing {rate:g}"] = partial(generate, lm, agent, prompt, length - PROMPT)
    return found


def speeds(
    lm: UNet, rates: Sequence[float], symbol_BN: Tensor, seconds: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Symbols per second by name of what was timed, and FLOPs per symbol.

    Args:
        lm: the model.
        rates: boundaries per symbol.
        symbol_BN: what was read.
        seconds: of each.
    """
    symbols = {"reading": symbol_BN.shape[0] * symbol_BN.shape[1], "writing": symbol_BN.shape[1]}
    return {
        f"{rate:g}": {way: number / seconds[f"{way} {rate:g}"] for way, number in symbols.items()}
        | {"flops": reading_flops(lm, rate, torch.nn.Module())}
        for rate in rates
    }
