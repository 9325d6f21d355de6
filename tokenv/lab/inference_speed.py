"""Time inference with an untrained model: reading and writing by rate, forecasts by their number of samples.

All variants of a measurement are timed in turn in every round, so that disturbances of the machine affect all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config import registry
from tokenv.config.components import Components, build_components
from tokenv.config.hardware import prepare, resolve_device
from tokenv.data.series.windows import Series, SplitBorders
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.forecasting.contexts import ContextBatch, ForecastContexts
from tokenv.forecasting.forecaster import batch_size, check_forecast, forecast
from tokenv.lab.config import BenchOptions
from tokenv.lm.flops import reading_flops

PROMPT = 8  # symbols
QUANTILES = (0.1, 0.5, 0.9)
DIRECT = "direct"
WARMUP_ROUNDS = 2


def time_once(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds which ``work`` takes, its kernels on a GPU included."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def interleave(
    variants: Mapping[str, Callable[[], object]], repeats: int, device: torch.device, *, progress: bool = False
) -> dict[str, list[float]]:
    """Return the seconds of every variant in every round, after two rounds of warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in tqdm(range(repeats + WARMUP_ROUNDS), desc="bench", unit="round", disable=not progress):
        for name, work in variants.items():
            elapsed = time_once(work, device)
            if number >= WARMUP_ROUNDS:
                seconds[name].append(elapsed)
    return seconds


def bench_generation(
    components: Components, symbol_BN: Tensor, options: BenchOptions, *, progress: bool = False
) -> dict[str, dict[str, float]]:
    """Time reading and writing at each of ``options.rates``, with evenly spaced boundaries.

    Args:
        components: language model, in evaluation mode.
        symbol_BN: symbols read in one pass; one row of as many symbols is written.
        options: rates and rounds.
        progress: whether to show a bar.

    Returns:
        By rate: symbols per second of ``reading`` and ``writing``, and ``flops`` per symbol.
    """
    lm, length = components.lm, symbol_BN.shape[1]
    prompt, work = symbol_BN[:1, :PROMPT], {}
    for rate in options.rates:
        agent = registry.build("agent", {"name": "uniform"}, registry.AGENTS, rate=rate, seq_len=length)
        work[f"reading {rate:g}"] = torch.no_grad()(partial(rollout, lm, agent, symbol_BN))
        work[f"writing {rate:g}"] = partial(generate, lm, agent, prompt, length - PROMPT)
    seconds = interleave(work, options.repeats, symbol_BN.device, progress=progress)
    symbols = {"reading": symbol_BN.shape[0] * length, "writing": length}
    return {
        f"{rate:g}": {way: count / statistics.median(seconds[f"{way} {rate:g}"]) for way, count in symbols.items()}
        | {"flops": reading_flops(lm, rate, torch.nn.Module())}
        for rate in options.rates
    }


def bench_forecasts(options: BenchOptions, *, progress: bool = False) -> dict[str, dict[str, Any]]:
    """Time forecasts of random histories, in batches of the size which ``tokenv forecast`` uses.

    Returns:
        ``tables``: printable rows by title; ``figures``: ``forecasts_per_second`` by the number of samples, and of
        the direct head where its horizon is long enough.

    Raises:
        UserError: the horizon does not fit the configuration, or the samples do not fit into memory.
    """
    config, horizon = options.config, options.horizon
    stepwise = not config.model.direct
    history, *_ = [check_forecast(config, horizon, samples=count, direct=not stepwise) for count in options.samples]
    prepare(config.hardware)
    components = build_components(config, resolve_device(config.hardware.device))
    components.train(False)
    samples = {f"{count}": count for count in options.samples} if stepwise else {}
    samples |= {DIRECT: 0} if config.model.horizon >= horizon else {}
    batches = {
        name: _random_histories(options, history, batch_size(count, direct=not count))
        for name, count in samples.items()
    }
    work = {name: partial(_forecast, components, batches[name], horizon, count) for name, count in samples.items()}
    seconds = interleave(work, options.repeats, torch.device("cpu"), progress=progress)
    speed = {name: len(batches[name].names) / statistics.median(values) for name, values in seconds.items()}
    title = f"forecasts per second, {horizon} steps after {history}"
    rows = {name if name == DIRECT else f"{name} samples": f"{value:,.3g}" for name, value in speed.items()}
    return {"tables": {title: rows}, "figures": {"forecasts_per_second": speed}}


def _random_histories(options: BenchOptions, length: int, count: int) -> ContextBatch:
    config = options.config
    shape = (count, length, config.data.series.channels)
    value_BLC = torch.randn(shape, generator=torch.Generator().manual_seed(config.seed), dtype=torch.float64).numpy()
    columns, borders = [f"{c}" for c in range(shape[2])], SplitBorders(length, length, length)
    zero, one = torch.zeros(shape[2]).numpy(), torch.ones(shape[2]).numpy()
    series = [Series(f"{row}", columns, value_LC, borders, zero, one) for row, value_LC in enumerate(value_BLC)]
    index = torch.arange(count).numpy()
    start, end = torch.zeros(count).long().numpy(), torch.full((count,), length).numpy()
    contexts = ForecastContexts(
        series, config.data.series, options.horizon, index, start, end, index, known=False, total=count
    )
    return next(contexts.batches(count))


def _forecast(components: Components, batch: ContextBatch, horizon: int, samples: int) -> None:
    """Forecast with quantiles; by the direct head if there are no samples."""
    result = forecast(components, batch, horizon, samples=samples or 2, direct=not samples)
    result.distribution.quantile(QUANTILES)
