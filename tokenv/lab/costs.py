"""What one update costs with each estimator: seconds, counted FLOPs, and memory kept for the backward pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config.components import Components
from tokenv.config.schema import LossConfig
from tokenv.env.rollout import rollout
from tokenv.lm.flops import policy_flops, update_flops
from tokenv.training.update import backward, rescored_rollouts


@dataclass(frozen=True)
class Cost:
    """Of one update: rollout, estimator, and the whole model's backward pass.

    Attributes:
        seconds: median over the timed updates.
        fastest: of these.
        slowest: of these.
        flops: counted by the paper's rule.
        memory: bytes that autograd keeps for the backward pass at its peak.
    """

    seconds: float
    fastest: float
    slowest: float
    flops: int
    memory: int


class _SavedTensors:
    """Bytes of all distinct storages that autograd has saved."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}

    def pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        self.storages[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def total(self) -> int:
        return sum(self.storages.values())


def _update(parts: Components, symbol_BN: Tensor, generator: torch.Generator) -> None:
    """One update's work without the optimiser's."""
    one_pass = partial(rollout, parts.lm, parts.agent, symbol_BN, parts.sampling, generator=generator)
    td, _ = backward(one_pass, parts, LossConfig())
    for again in rescored_rollouts(parts, [td.detach()]):
        for scored in again:
            backward(scored, parts, LossConfig())
    for module in parts.modules.values():
        module.zero_grad(set_to_none=True)


def measure_costs(
    parts: Components,
    estimators: Mapping[str, Any],
    symbol_BN: Tensor,
    *,
    rate: float,
    repeats: int,
    progress: bool = False,
) -> dict[str, Cost]:
    """Time full updates, all estimators in turn in every round, so that the machine's moods hit all alike.

    Args:
        parts: model, agent and rate target.
        estimators: by label.
        symbol_BN: the text.
        rate: tokens per symbol that FLOPs are counted for; the target, so that all are counted alike.
        repeats: rounds, after one of warm-up.
        progress: show a bar.
    """
    variants = {label: replace(parts, estimator=estimator) for label, estimator in estimators.items()}
    seconds: dict[str, list[float]] = {label: [] for label in variants}
    memory, flops = {}, {}
    symbols = symbol_BN.shape[0] * symbol_BN.shape[1]
    tokens = round(rate * symbols)
    generator = torch.Generator(symbol_BN.device).manual_seed(0)
    for number in tqdm(range(repeats + 1), desc="timing", unit="round", disable=not progress):
        for label, variant in variants.items():
            if number == 0:
                kept = _SavedTensors()
                with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda x: x):
                    _update(variant, symbol_BN, generator)
                memory[label] = kept.total
                passes = variant.passes
                flops[label] = update_flops(parts.lm, symbols, passes.tokens(tokens), policy_flops(parts.agent), passes)
                continue
            started = time.perf_counter()
            _update(variant, symbol_BN, generator)
            if symbol_BN.is_cuda:
                torch.cuda.synchronize()
            seconds[label].append(time.perf_counter() - started)
    return {
        label: Cost(statistics.median(values), min(values), max(values), flops[label], memory[label])
        for label, values in seconds.items()
    }
