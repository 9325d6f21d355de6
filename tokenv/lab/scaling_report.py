"""How speed and memory grow: a table, a CSV file and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.table import Column, Table

from tokenv.plotting.console import write_csv
from tokenv.plotting.figures import save_png
from tokenv.plotting.theme import LINES, MARKERS

FIGURES = {
    "symbols_per_second": "bytes per second",
    "peak_memory_gib": "peak GiB",
    "step_seconds": "seconds a step",
    "model_flops_utilisation": "of matrix peak",
    "plain_over_learned": "plain one's seconds over ours",
}


def scaling_table(rows: list[dict[str, Any]]) -> Table:
    """One line a size."""
    names = [name for name in FIGURES if any(name in row for row in rows)]
    table = Table(Column("size", no_wrap=True), *(FIGURES[name] for name in names), title="scaling")
    for row in rows:
        table.add_row(f"{row['key']} {row['value']:,}", *(_printed(name, row.get(name)) for name in names))
    return table


def _printed(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1%}" if name == "model_flops_utilisation" else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_scaling(rows: list[dict[str, Any]], out: str) -> tuple[Path, Path]:
    """All figures as ``OUT.csv``, and speed and memory against every size as ``OUT.png``."""
    numbers = (name for row in rows for name, value in row.items() if isinstance(value, int | float))
    names = list(dict.fromkeys(["key", "value", *numbers]))
    table = write_csv(Path(f"{out}.csv"), names, ([row.get(name, "") for name in names] for row in rows))
    keys = list(dict.fromkeys(row["key"] for row in rows))
    figure = Figure(figsize=(8, 3.2 * len(keys)), layout="constrained")
    for line, key in zip(figure.subplots(len(keys), 2, squeeze=False), keys, strict=True):
        own = [row for row in rows if row["key"] == key]
        for axes, name in zip(line, ("symbols_per_second", "peak_memory_gib"), strict=True):
            _draw(axes, own, name)
    return table, save_png(figure, Path(f"{out}.png"))


def _draw(axes: Axes, rows: list[dict[str, Any]], name: str) -> None:
    value = [row["value"] for row in rows]
    axes.plot(value, [row[name] for row in rows], color=LINES[0], marker=MARKERS[0], label="learned boundaries")
    if name == "symbols_per_second" and "plain_over_learned" in rows[0]:
        plain = [row[name] / row["plain_over_learned"] for row in rows]
        axes.plot(value, plain, color=LINES[1], marker=MARKERS[1], label="plain transformer")
        axes.legend()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(value, [f"{each:,}" for each in value])
    axes.xaxis.set_minor_formatter(NullFormatter())
    for each in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        each(FuncFormatter(lambda y, _: f"{y:,.3g}" if y < 1000 else f"{y:,.0f}"))
    axes.set_xlabel(rows[0]["key"])
    axes.set_ylabel(FIGURES[name])
    axes.margins(y=0.15)
    axes.grid(visible=True, alpha=0.3)
