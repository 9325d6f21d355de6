"""Reports of ``tokenv bench``: tables of speed and cost; of scaling a table, a CSV file and a picture."""

import math
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.table import Column, Table

from tokenv.config.components import Components
from tokenv.config.schema import Config
from tokenv.core.devices import is_accelerator
from tokenv.lab.config import BenchOptions
from tokenv.lm.flops import matrix_parameters
from tokenv.plotting.console import write_csv
from tokenv.plotting.figures import save_png
from tokenv.plotting.theme import LINES, MARKERS, format_short

FIGURES = {
    "symbols_per_second": "bytes per second",
    "peak_memory_gib": "peak GiB",
    "step_seconds": "seconds a step",
    "model_flops_utilisation": "of matrix peak",
    "plain_over_learned": "seconds of the plain transformer over ours",
}


def peak_matrix_size(device: torch.device) -> int:
    """Return the size of the largest square matrices whose products measure the peak speed."""
    if is_accelerator(device):
        return 8192
    return 2048


def speed_tables(
    figures: dict[str, Any], components: Components, config: Config, device: torch.device
) -> dict[str, dict[str, str]]:
    """Return printable rows by title.

    Args:
        figures: figures of ``tokenv.lab.speed.bench``.
        components: components which were measured.
        config: configuration of the run.
        device: device which was measured.
    """
    if is_accelerator(device):
        name = torch.get_device_module(device).get_device_name(device)
    else:
        name = f"{torch.get_num_threads()} CPU threads"
    model = config.model
    size = sum(p.numel() for p in components.lm.parameters())
    speed_rows = {
        "machine": f"{name}, torch {torch.__version__}",
        "model": f"{size / 1e6:.1f}M parameters ({matrix_parameters(components.lm) / 1e6:.1f}M in matrices), width "
        f"{model.width}, {model.down_layers}/{model.mid_layers}/{model.up_layers} layers",
        "batch": f"{config.train.batch_size} x {config.data.seq_len} bytes, {components.lm.compute_dtype}",
        "step": f"{figures['step_seconds']:.3f} s ({figures['step_seconds_min']:.3f} to "
        f"{figures['step_seconds_max']:.3f})",
        "speed": f"{figures['symbols_per_second']:,.0f} bytes per second",
        "peak memory": f"{figures['peak_memory_gib']:.2f} GiB",
        "utilisation": f"{figures['model_flops_utilisation']:.1%} of {figures['matrix_peak_tflops_per_second']:.3g} "
        f"TFLOP/s, measured: matrix products of up to {peak_matrix_size(device):,} squared",
    }
    if "plain_over_learned" in figures:
        speed_rows["plain transformer"] = (
            f"{figures['plain_over_learned']:.2f} times the seconds a step"
        )
    cost = {
        "drawing boundaries": f"{figures['draw_share']:.1%} of a step",
        "time over given boundaries": f"{figures['time_over_given'] - 1:+.1%}",
        "the same, early exit in both": f"{figures['time_over_given_with_early_exit'] - 1:+.1%}",
        "FLOPs of the policy": f"{figures['flops_policy_share']:.4%} of the model with given boundaries",
        "FLOPs of the early exit": f"{figures['flops_early_exit_share']:.3%} of it",
    }
    if "stepping_over_one_pass" in figures:
        cost["stepping over one pass"] = (
            f"{figures['stepping_over_one_pass']:.0f} times the seconds"
        )
    tables = {"speed": speed_rows, "cost of learning the boundaries": cost}
    if "rates" in figures:
        tables["bytes per second by rate, boundaries evenly spaced"] = {
            f"rate {rate}, {of['flops']:,.0f} FLOPs": f"reading {of['reading']:,.0f}, writing {of['writing']:,.0f}, "
            f"64 texts at once {of['writing_together']:,.0f}"
            for rate, of in figures["rates"].items()
        }
    differences = figures.get("stepping_differences", {})
    if differences:
        rows = {
            stage: f"{mean:.2g}, at most {most:.2g}" for stage, (mean, most) in differences.items()
        }
        tables["mean difference between stepping and one pass"] = rows
    return tables


def scaling_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with one row for each size."""
    measured = set().union(*rows)
    names = [name for name in FIGURES if name in measured]
    table = Table(Column("size", no_wrap=True), *(FIGURES[name] for name in names), title="scaling")
    for row in rows:
        cells = {name: format_short(row.get(name, math.nan)) for name in names}
        if "model_flops_utilisation" in row:
            cells["model_flops_utilisation"] = f"{row['model_flops_utilisation']:.1%}"
        table.add_row(f"{row['key']} {row['value']:,}", *cells.values())
    return table


def plan_tables(figures: dict[str, Any], options: BenchOptions) -> list[Table]:
    """Return tables of memory and of time with a row for each number of ranks; see ``tokenv.lab.plan.plan``."""
    states = ("parameters", "gradients", "moments", "activations", "peak")
    columns = ("params", "grads", "moments", "activations", "peak")
    memory = Table("ranks", "shards", "rows", *columns, title="GiB per rank")
    title = (
        f"an update of {figures['symbols']:,} symbols: {figures['flops']:.3g} FLOPs\n"
        f"{options.peak_tflops:g} TFLOP/s each, {options.utilisation:.0%} used"
    )
    time = Table(
        "ranks",
        "shards",
        "GiB sent per rank",
        "seconds without sending",
        "hours of training",
        title=title,
    )
    for row in figures["ranks"]:
        first = f"{row['world']}", f"{row['fsdp_size']}"
        if "error" in row:
            memory.add_row(*first, "–", *["–"] * len(states))
            continue
        memory.add_row(
            *first,
            f"{row['passes']} × {row['rows']}",
            *(f"{row[f'{name}_gib']:.2f}" for name in states),
        )
        time.add_row(
            *first,
            f"{row['communication_gib']:.2f}",
            f"{row['step_seconds']:.3g}",
            f"{row['run_hours']:.3g}",
        )
    return [memory, time]


def write_scaling(rows: list[dict[str, Any]], out: str) -> tuple[Path, Path]:
    """Write all figures as ``OUT.csv``, and plots of speed and memory against every size as ``OUT.png``."""
    names = ["key", "value"]
    for row in rows:
        numbers = [name for name, value in row.items() if isinstance(value, int | float)]
        names += [name for name in numbers if name not in names]
    cells = [[row.get(name, "") for name in names] for row in rows]
    table = write_csv(Path(f"{out}.csv"), names, cells)
    keys = list(dict.fromkeys(row["key"] for row in rows))
    figure = Figure(figsize=(8, 3.2 * len(keys)), layout="constrained")
    for line, key in zip(figure.subplots(len(keys), 2, squeeze=False), keys, strict=True):
        of_key = [row for row in rows if row["key"] == key]
        for axes, name in zip(line, ("symbols_per_second", "peak_memory_gib"), strict=True):
            _draw(axes, of_key, name)
    return table, save_png(figure, Path(f"{out}.png"))


def _draw(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    value = [row["value"] for row in rows]
    axes.plot(
        value,
        [row[name] for row in rows],
        color=LINES[0],
        marker=MARKERS[0],
        label="learned boundaries",
    )
    if name == "symbols_per_second" and "plain_over_learned" in rows[0]:
        plain = [row[name] / row["plain_over_learned"] for row in rows]
        axes.plot(value, plain, color=LINES[1], marker=MARKERS[1], label="plain transformer")
        axes.legend()
    axes.set(yscale="log", xlabel=rows[0]["key"], ylabel=FIGURES[name])
    axes.set_xscale("log", base=2)
    axes.set_xticks(value, [f"{each:,}" for each in value])
    axes.xaxis.set_minor_formatter(NullFormatter())
    for each in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        each(FuncFormatter(lambda value, _: format_short(value)))
    axes.margins(y=0.15)
    axes.grid(visible=True, alpha=0.3)
