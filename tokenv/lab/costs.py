"""The cost of updates in seconds, counted FLOPs and memory: with each estimator, and by several processes together."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.utils.distributed import get_free_port
from tqdm import tqdm

from tokenv.config.components import Components, build_components
from tokenv.config.hardware import peak_resident_memory, prepare
from tokenv.config.schema import Config, LossConfig
from tokenv.core.devices import has_own_memory, is_accelerator
from tokenv.lab.config import BenchOptions
from tokenv.lm.flops import Batch, policy_flops, update_flops
from tokenv.training.data_parallel import DataParallelGroup, apply_fsdp
from tokenv.training.optimizers import (
    learning_rate,
    make_optimizer,
    optimizer_step,
    set_learning_rate,
)
from tokenv.training.process_group import Ranks, init_from_torchrun
from tokenv.training.update import PassInput, StoredPass, TrainingStep, accumulate_gradients

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
        torch.get_device_module(device).synchronize(device)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    repeats: int,
    device: torch.device,
    *,
    warmup: int = WARMUP_ROUNDS,
    title: str = "bench",
    progress: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds of every variant in every round, after some rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in tqdm(range(repeats + warmup), desc=title, unit="round", disable=not progress):
        for name, work in variants.items():
            elapsed = time_once(work, device)
            if number >= warmup:
                seconds[name].append(elapsed)
    return seconds


def time_figures(seconds: Sequence[float], symbols: int) -> dict[str, float]:
    """Return the median, least and most seconds of an update of so many symbols, and symbols per second."""
    median = statistics.median(seconds)
    return {
        "step_seconds": median,
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "symbols_per_second": symbols / median,
    }


def count_flops(components: Components, batch: Batch, rate: float) -> int:
    """Return the FLOPs of an update, without the optimizer's step, with so many tokens per symbol."""
    passes = components.passes
    policy = policy_flops(components.agent)
    return update_flops(components.lm, batch, passes.tokens(batch, rate), policy, passes)


def set_first_learning_rate(optimizer: torch.optim.Optimizer, config: Config) -> None:
    """Set the learning rate after the first sequences of a run; an optimizer begins at its peak.

    There an untrained policy would leave its rate, and with every number of tokens a GPU would compile other shapes.
    """
    symbols = config.train.batch_size * config.data.seq_len
    set_learning_rate(optimizer, learning_rate(config.train, symbols))


def peak_memory(device: torch.device) -> float:
    """Return the peak memory so far in GiB: allocated on the GPU, or resident in this process."""
    if has_own_memory(device):
        return float(torch.get_device_module(device).max_memory_allocated(device) / 2**30)
    return peak_resident_memory()


def measure_costs(
    components: Components,
    estimators: Mapping[str, Any],
    symbol_BN: Tensor,
    *,
    rate: float,
    repeats: int,
    progress: bool = False,
) -> dict[str, dict[str, float]]:
    """Time full updates, all estimators in turn in every round, so that disturbances of the machine affect all alike.

    Args:
        components: language model, agent and rate target.
        estimators: estimators by label.
        symbol_BN: text.
        rate: tokens per symbol for which FLOPs are counted; the target, so that all are counted alike.
        repeats: number of rounds, after one of warm-up.
        progress: whether to show a bar.

    Returns:
        By label the cost of one update, which is rollout, estimator and the whole model's backward pass: ``seconds``,
        median of the timed updates; ``fastest`` and ``slowest`` of them; counted ``flops`` (see ``tokenv.lm.flops``);
        ``memory``, peak number of bytes which autograd saves for the backward pass.
    """
    variants = {
        label: replace(components, estimator=estimator) for label, estimator in estimators.items()
    }
    batch = Batch(*symbol_BN.shape[:2])
    updates = {
        label: partial(_update, variant, PassInput(symbol_BN, seed=0))
        for label, variant in variants.items()
    }
    # which warms up, too
    memory = {label: _saved_bytes(update) for label, update in updates.items()}
    seconds = interleave(
        updates, repeats, symbol_BN.device, warmup=0, title="timing", progress=progress
    )
    return {
        label: {
            "seconds": statistics.median(seconds[label]),
            "fastest": min(seconds[label]),
            "slowest": max(seconds[label]),
            "flops": count_flops(variant, batch, rate),
            "memory": memory[label],
        }
        for label, variant in variants.items()
    }


def _update(components: Components, batch: PassInput) -> None:
    """Make one update without the optimizer's step."""
    step = TrainingStep(components, LossConfig())
    losses = step(batch)
    losses.total.backward()
    for head_only in components.further_steps:
        step(StoredPass(losses.rollout, head_only)).total.backward()
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


def bench_ranks(options: BenchOptions, size: int) -> dict[str, float]:
    """Time the configured update, made by ``size`` processes together, which share the CPU's cores.

    Returns:
        The result of ``measure_updates``.
    """
    threads = options.config.hardware.threads or max(torch.get_num_threads() // size, 1)
    config = replace(options.config, hardware=replace(options.config.hardware, threads=threads))
    options = replace(options, config=config, scaling={})
    measure = partial(_measure_on_rank, options, size, get_free_port())
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as processes:
        first, *_ = processes.map(measure, range(size))
    return first


def _measure_on_rank(options: BenchOptions, size: int, port: int, rank: int) -> dict[str, float]:
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in variables.items()})
    with init_from_torchrun() as ranks:
        return measure_updates(options, ranks)


def measure_updates(options: BenchOptions, ranks: Ranks) -> dict[str, float]:
    """Time whole updates, whose gradients are summed over all ranks; all ranks must call this together.

    Returns:
        Seconds of an update, symbols per second of all ranks together, and the sum of their peak memory in GiB.
    """
    config = options.config
    prepare(config.hardware)
    components = build_components(config, ranks.device(config.hardware.device), world=ranks.size)
    components.train()
    ranks.broadcast_parameters(components.modules.values())
    optimizer: torch.optim.Optimizer = make_optimizer(config.train, components.named_parameters())
    step = TrainingStep(components, config.loss)
    if ranks.size > 1 and config.hardware.fsdp_size > 1:
        optimizer = apply_fsdp(step, components, optimizer, config, ranks)
    set_first_learning_rate(optimizer, config)
    parameters = components.named_parameters()
    group = DataParallelGroup.create(
        ranks, config.train, split_each_pass=components.has_cross_step_state
    )
    rows = len(group.assignment.rows)
    device = components.lm.head.weight.device
    batch = PassInput(torch.randint(0, 256, (rows, config.data.seq_len), device=device), seed=0)

    def update() -> None:
        accumulate_gradients(step, [batch] * len(group.assignment.passes), group)
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    seconds = interleave({"update": update}, options.repeats, device)["update"]
    memory = sum(ranks.cpu_group.all_gather_object(peak_memory(device)))
    symbols = (
        config.train.gradient_accumulation_steps * config.train.batch_size * config.data.seq_len
    )
    return time_figures(seconds, symbols) | {"peak_memory_gib": memory}
