"""Measure speed and memory as one size of a run, or its number of processes, grows."""

from __future__ import annotations

import multiprocessing
import os
import socket
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from tokenv.config.components import build_components
from tokenv.config.hardware import prepare
from tokenv.data.corpus import TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.lab.config import RANKS, BenchOptions
from tokenv.lab.costs import interleave
from tokenv.lab.speed import bench, peak_memory, time_figures
from tokenv.training.data_parallel import DataParallelGroup, apply_fsdp
from tokenv.training.optimizers import make_optimizer, optimizer_step
from tokenv.training.process_group import Ranks, init_from_torchrun
from tokenv.training.update import accumulate_gradients


def bench_ranks(options: BenchOptions, size: int) -> dict[str, float]:
    """Time the configured update, made by ``size`` processes together, which share the CPU's cores.

    Returns:
        The result of ``measure_updates``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = options.config.hardware.threads or max(torch.get_num_threads() // size, 1)
    config = replace(options.config, hardware=replace(options.config.hardware, threads=threads))
    options = replace(options, config=config, scaling={})
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as processes:
        futures = [processes.submit(_measure_on_rank, options, rank, size, port) for rank in range(size)]
        figures = [future.result() for future in futures]
    return figures[0]


def _measure_on_rank(options: BenchOptions, rank: int, size: int, port: int) -> dict[str, float]:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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
    if ranks.size > 1 and config.hardware.fsdp_size > 1:
        optimizer = apply_fsdp(components, optimizer, config, ranks)
    parameters = components.named_parameters()
    group = DataParallelGroup.create(ranks, config.train, split_each_pass=components.has_cross_step_state)
    rows, agent = len(group.assignment.rows), components.agent
    source = TensorSource(torch.randint(0, 256, (rows, config.data.seq_len)))
    env = TokenizationEnv(components.lm, source, rows, window=agent.window)

    def update() -> None:
        accumulate_gradients(lambda _: env.one_pass(agent, components.sampling), components, config.loss, group)
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    device = components.lm.head.weight.device
    seconds = interleave({"update": update}, options.repeats, device)["update"]
    memory = sum(ranks.cpu_group.all_gather_object(peak_memory(device)))
    symbols = config.train.gradient_accumulation_steps * config.train.batch_size * config.data.seq_len
    return time_figures(seconds, symbols) | {"peak_memory_gib": memory}


def scale(options: BenchOptions, *, progress: bool = False) -> list[dict[str, Any]]:
    """Measure at every value of ``options.scaling``, one key at a time and the rest as configured.

    Returns:
        A row for each value: ``key``, ``value``, and the figures of ``tokenv.lab.speed.bench``, or for ``ranks`` those
        of ``bench_ranks``.
    """
    sizes, rows = list(options.sizes()), []
    for key, value, config in tqdm(sizes, desc="scaling", unit="size", disable=not progress):
        if key == RANKS:
            figures: dict[str, Any] = bench_ranks(options, int(value))
        else:
            options_of_size = replace(options, config=config, scaling={}, stepping=False)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                figures = process.submit(bench, options_of_size).result()["figures"]
        rows.append({"key": key, "value": value} | figures)
    return rows
