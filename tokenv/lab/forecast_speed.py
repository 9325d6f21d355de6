"""Forecasts per second against the number of samples, and by the direct head, timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from tokenv.config.components import Components, build_components
from tokenv.config.hardware import prepare, resolve_device
from tokenv.data.series.windows import Series, SplitBorders
from tokenv.forecasting.contexts import ContextBatch, ForecastContexts
from tokenv.forecasting.forecast_batch import checked_history
from tokenv.forecasting.forecaster import forecast, histories_together
from tokenv.lab.config import BenchOptions
from tokenv.lab.speed import interleave

QUANTILES = (0.1, 0.5, 0.9)
DIRECT = "direct"


def bench_forecasts(options: BenchOptions, *, progress: bool = False) -> dict[str, dict[str, Any]]:
    """Measure with an untrained model on random histories, as many at a time as ``tokenv forecast`` takes.

    Returns:
        ``tables``: title to printable rows; ``figures``: ``forecasts_per_second`` by the number of samples, and of
        the direct head where it reaches so far.

    Raises:
        UserError: the horizon does not fit the configuration, or the samples the memory.
    """
    config, horizon = options.config, options.horizon
    stepwise = not config.model.direct
    known, *_ = [checked_history(config, horizon, samples=samples, direct=not stepwise) for samples in options.samples]
    prepare(config.hardware)
    parts = build_components(config, resolve_device(config.hardware.device))
    parts.train(False)
    sizes = {f"{samples}": samples for samples in options.samples} if stepwise else {}
    sizes |= {DIRECT: 0} if config.model.horizon >= horizon else {}
    batches = {
        name: _histories(options, known, histories_together(samples, direct=not samples))
        for name, samples in sizes.items()
    }
    work = {name: _work(parts, batches[name], horizon, samples) for name, samples in sizes.items()}
    taken = interleave(work, options.repeats, torch.device("cpu"), progress=progress)
    speed = {name: len(batches[name].names) / statistics.median(of) for name, of in taken.items()}
    title = f"forecasts per second, {horizon} steps after {known}"
    rows = {name if name == DIRECT else f"{name} samples": f"{each:,.3g}" for name, each in speed.items()}
    return {"tables": {title: rows}, "figures": {"forecasts_per_second": speed}}


def _histories(options: BenchOptions, known: int, count: int) -> ContextBatch:
    config = options.config
    shape = (count, known, config.data.series.channels)
    value_BLC = torch.randn(shape, generator=torch.Generator().manual_seed(config.seed), dtype=torch.float64).numpy()
    columns, borders = [f"{c}" for c in range(shape[2])], SplitBorders(known, known, known)
    zero, one = torch.zeros(shape[2]).numpy(), torch.ones(shape[2]).numpy()
    series = [Series(f"{row}", columns, value_LC, borders, zero, one) for row, value_LC in enumerate(value_BLC)]
    place = torch.arange(count).numpy()
    start, end = torch.zeros(count).long().numpy(), torch.full((count,), known).numpy()
    made = ForecastContexts(
        series, config.data.series, options.horizon, place, start, end, place, known=False, total=count
    )
    return next(made.batches(count))


def _work(parts: Components, batch: ContextBatch, horizon: int, samples: int) -> Callable[[], object]:
    """What is timed: forecasts with their quantiles; no samples are the direct head."""
    return lambda: forecast(parts, batch, horizon, samples=samples or 2, direct=not samples).law.quantile(QUANTILES)
