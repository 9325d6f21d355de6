"""Speed and memory as one size of a run grows: each value in a process of its own, whose peak memory is its own."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from tokenv.bench.measure import bench
from tokenv.bench.options import BenchOptions


def scale(options: BenchOptions, *, progress: bool = False) -> list[dict[str, Any]]:
    """Measure at every value of ``options.scaling``, a key at a time and the rest as configured.

    Returns:
        A row a value: ``key``, ``value``, and the figures of ``tokenv.bench.measure.bench``.
    """
    wanted = list(options.sizes())
    rows = []
    for key, value, config in tqdm(wanted, desc="scaling", unit="size", disable=not progress):
        alone = replace(options, config=config, scaling={}, stepping=False)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            measured = process.submit(bench, alone).result()
        rows.append({"key": key, "value": value} | measured["figures"])
    return rows
