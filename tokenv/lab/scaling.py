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
from tokenv.data.sources import TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.lab.config import RANKS, BenchOptions
from tokenv.lab.speed import bench, figures_of_time, interleave, peak_memory
from tokenv.training import fsdp
from tokenv.training.process_group import Ranks, init_from_torchrun
from tokenv.training.update import accumulate_gradients, make_optimizer, optimizer_step


def bench_ranks(options: BenchOptions, size: int) -> dict[str, float]:
    """Let ``size`` processes make the configured update together; the CPU's cores are shared out among them.

    Returns:
        What ``update_figures`` gives.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = options.config.hardware.threads or max(torch.get_num_threads() // size, 1)
    config = replace(options.config, hardware=replace(options.config.hardware, threads=threads))
    theirs = replace(options, config=config, scaling={})
    with ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn")) as processes:
        measured = [processes.submit(_one_of, theirs, rank, size, port) for rank in range(size)]
        figures = [each.result() for each in measured]
    return figures[0]


def _one_of(options: BenchOptions, rank: int, size: int, port: int) -> dict[str, float]:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in here.items()})
    with init_from_torchrun() as ranks:
        return update_figures(options, ranks)


def update_figures(options: BenchOptions, ranks: Ranks) -> dict[str, float]:
    """Time whole updates, gradients added up among all; every process must ask together.

    Returns:
        Seconds of an update and symbols per second of all processes together; their peak memory added up, in GiB.
    """
    config = options.config
    prepare(config.hardware)
    parts = build_components(config, ranks.device(config.hardware.device), world=ranks.size)
    parts.train()
    ranks.broadcast_parameters(parts.modules.values())
    optimizer: torch.optim.Optimizer = make_optimizer(config.train, parts.named_parameters())
    if ranks.size > 1 and config.hardware.fsdp_size > 1:
        optimizer = fsdp.apply_fsdp(parts, optimizer, config, ranks)
    parameters, team = parts.named_parameters(), ranks.team(config.train, together=parts.has_cross_step_state)
    rows = len(team.slots.rows)
    source = TensorSource(torch.randint(0, 256, (rows, config.data.seq_len)))
    env = TokenizationEnv(parts.lm, source, rows, window=parts.agent.window)

    def update() -> None:
        accumulate_gradients(lambda _: env.one_pass(parts.agent, parts.sampling), parts, config.loss, team)
        optimizer_step(optimizer, parameters, config.train.max_grad_norm)

    device = parts.lm.head.weight.device
    seconds = interleave({"update": update}, options.repeats, device)["update"]
    memory = sum(ranks.control.all_gather_object(peak_memory(device)))
    symbols = config.train.gradient_accumulation_steps * config.train.batch_size * config.data.seq_len
    return figures_of_time(seconds, symbols) | {"peak_memory_gib": memory}


def scale(options: BenchOptions, *, progress: bool = False) -> list[dict[str, Any]]:
    """Measure at every value of ``options.scaling``, a key at a time and the rest as configured.

    Returns:
        A row a value: ``key``, ``value``, and the figures of ``tokenv.lab.speed.bench``, of ``ranks`` those of
        ``tokenv.lab.scaling.bench_ranks``.
    """
    wanted = list(options.sizes())
    rows = []
    for key, value, config in tqdm(wanted, desc="scaling", unit="size", disable=not progress):
        if key == RANKS:
            figures: dict[str, Any] = bench_ranks(options, int(value))
        else:
            alone = replace(options, config=config, scaling={}, stepping=False)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                figures = process.submit(bench, alone).result()["figures"]
        rows.append({"key": key, "value": value} | figures)
    return rows
