"""``tokenv bench``: speed, memory, and what learning the boundaries costs."""

from __future__ import annotations

import sys
from typing import Any

from tokenv.bench.measure import BenchOptions, bench
from tokenv.cli.options import check_text, take_own
from tokenv.cli.sacred import Record, run_experiment
from tokenv.config.convert import make
from tokenv.config.files import resolve
from tokenv.report.table import console, summary_table


def run(arguments: list[str]) -> Any:
    """Run the command: see ``tokenv.cli.main``."""
    return run_experiment("bench", arguments, resolve_bench, show_bench)


def resolve_bench(names: list[str], updates: dict[str, Any]) -> BenchOptions:
    """Options from configurations and the command line.

    Raises:
        UserError: an unknown key or value, or the configuration is of series.
    """
    own = take_own(BenchOptions, updates)
    config = resolve(names, updates)
    check_text(config)
    options: BenchOptions = make(BenchOptions, {**own, "config": config.as_dict()})
    return options


def show_bench(options: BenchOptions, _record: Record) -> dict[str, Any]:
    """Speed, memory, and what learning the boundaries costs."""
    results = bench(options, progress=sys.stderr.isatty())
    for title, rows in results["tables"].items():
        console().print(summary_table(rows, title=title))
    return results["figures"]
