"""The cost of one update with each estimator: seconds, counted FLOPs, and memory saved for the backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config.components import Components
from tokenv.config.schema import LossConfig
from tokenv.core.devices import device_module, is_accelerator
from tokenv.env.rollout import rollout
from tokenv.lm.flops import policy_flops, update_flops
from tokenv.training.update import backward, rescored_rollouts

WARMUP_ROUNDS = 2


def time_once(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds which ``work`` takes, its kernels on a GPU included."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if is_accelerator(device):
        device_module(device).synchronize(device)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    *,
    warmup: int = WARMUP_ROUNDS,
    progress: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of every variant in every round, after some rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in tqdm(range(repeats + warmup), desc="timing", unit="round", disable=not progress):
        for name, work in variants.items():
            elapsed = time_once(work, device)
            if number >= warmup:
                seconds[name].append(elapsed)
    return seconds


@dataclass(frozen=True)
class Cost:
    """Cost of one update: rollout, estimator, and the whole model's backward pass.

    Attributes:
        seconds: median of the timed updates.
        fastest: seconds of the fastest one.
        slowest: seconds of the slowest one.
        flops: FLOPs counted by the paper's rule.
        memory: peak number of bytes which autograd saves for the backward pass.
    """

    seconds: float
    fastest: float
    slowest: float
    flops: int
    memory: int


def measure_costs(
    components: Components,
    estimators: Mapping[str, Any],
    symbol_BN: Tensor,
    *,
    rate: float,
    repeats: int,
    progress: bool = False,
) -> dict[str, Cost]:
    """Time full updates, all estimators in turn in every round, so that disturbances of the machine affect all alike.

    Args:
        components: language model, agent and rate target.
        estimators: estimators by label.
        symbol_BN: text.
        rate: tokens per symbol for which FLOPs are counted; the target, so that all are counted alike.
        repeats: number of rounds, after one of warm-up.
        progress: whether to show a bar.
    """
    variants = {label: replace(components, estimator=estimator) for label, estimator in estimators.items()}
    symbols = symbol_BN.shape[0] * symbol_BN.shape[1]
    tokens, policy = round(rate * symbols), policy_flops(components.agent)
    generator = torch.Generator(symbol_BN.device).manual_seed(0)
    updates = {label: partial(_update, variant, symbol_BN, generator) for label, variant in variants.items()}
    memory = {label: _saved_bytes(update) for label, update in updates.items()}  # which warms up, too
    seconds = interleave(updates, repeats, symbol_BN.device, warmup=0, progress=progress)
    return {
        label: Cost(
            seconds=statistics.median(seconds[label]),
            fastest=min(seconds[label]),
            slowest=max(seconds[label]),
            flops=update_flops(components.lm, symbols, variant.passes.tokens(tokens), policy, variant.passes),
            memory=memory[label],
        )
        for label, variant in variants.items()
    }


def _update(components: Components, symbol_BN: Tensor, generator: torch.Generator) -> None:
    """Make one update without the optimizer's step."""
    one_pass = partial(rollout, components.lm, components.agent, symbol_BN, components.sampling, generator=generator)
    td, _ = backward(one_pass, components, LossConfig())
    for rollouts in rescored_rollouts(components, [td.detach()]):
        for rescored in rollouts:
            backward(rescored, components, LossConfig())
    for module in components.modules.values():
        module.zero_grad(set_to_none=True)


def _saved_bytes(update: partial[None]) -> int:
    """Make an update, and return the bytes of all distinct storages which autograd saves."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        update()
    return sum(storages.values())
