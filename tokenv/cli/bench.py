"""``tokenv bench``: speed, memory, and the cost of learning boundaries."""

from __future__ import annotations

import sys
from typing import Any

from tokenv.cli.options import check_text, take_own
from tokenv.cli.outputs import check_output
from tokenv.cli.sacred import Command, Record
from tokenv.config.conversion import from_dict
from tokenv.config.files import resolve
from tokenv.core.errors import UserError
from tokenv.lab.bench_report import scaling_table, write_scaling
from tokenv.lab.config import BenchOptions
from tokenv.lab.inference_speed import bench_forecasts
from tokenv.lab.scaling import scale
from tokenv.lab.speed import bench
from tokenv.plotting.console import console, summary_table


def resolve_bench(names: list[str], updates: dict[str, Any]) -> BenchOptions:
    """Return the options for configurations and the command line.

    Raises:
        UserError: an unknown key or value; the configuration is of series, or of text where forecasts are to be timed.
    """
    own = take_own(BenchOptions, updates)
    config = resolve(names, updates)
    options: BenchOptions = from_dict(BenchOptions, {**own, "config": config.as_dict()})
    check_output("out", options.out, ".csv", ".png")
    if not options.samples:
        check_text(config)
    elif config.data.kind != "series":
        raise UserError(
            f"samples = {options.samples!r} with data.kind = 'text': expected series, such as series-synthetic"
        )
    return options


def measure_and_show(options: BenchOptions, _record: Record) -> dict[str, Any]:
    """Measure, and print the tables."""
    if options.scaling:
        rows = scale(options, progress=sys.stderr.isatty())
        console().print(scaling_table(rows))
        console().print("scaling: " + ", ".join(map(str, write_scaling(rows, options.out))))
        return {"scaling": rows}
    measure = bench_forecasts if options.samples else bench
    results = measure(options, progress=sys.stderr.isatty())
    for title, rows in results["tables"].items():
        console().print(summary_table(rows, title=title))
    return results["figures"]


COMMAND = Command("bench", resolve_bench, measure_and_show, BenchOptions)
