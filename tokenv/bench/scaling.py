"""Speed and memory as one size of a run grows: each value in a process of its own, whose peak memory is its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from tokenv.bench.measure import bench
from tokenv.bench.options import RANKS, BenchOptions
from tokenv.bench.ranks import bench_ranks


def scale(options: BenchOptions, *, progress: bool = False) -> list[dict[str, Any]]:
    """Measure at every value of ``options.scaling``, a key at a time and the rest as configured.

    Returns:
        A row a value: ``key``, ``value``, and the figures of ``tokenv.bench.measure.bench``, of ``ranks`` those of
        ``tokenv.bench.ranks.bench_ranks``.
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
