"""Results of a variance study: tables, and a CSV file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenv.plotting.console import console, write_csv

FIGURES = ("variance", "noise", "snr", "bias", "turn", "cosine", "scale")
REFERENCE = "reinforce"


def format_estimate(values: list[float], digits: int = 2) -> str:
    """Return a text with a value and its standard error."""
    value, error = values
    if not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f} ± {error:.{digits}f}" if math.isfinite(error) else f"{value:.{digits}f}"


def _format_number(value: float) -> str:
    """Return a number with three digits, without exponent below a million."""
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _format_noise(values: list[float]) -> str:
    value, error = values
    return f"{_format_number(value)} ± {_format_number(error)}" if math.isfinite(value) else "no signal"


def reference_of(result: Mapping[str, Any]) -> str:
    """Return the estimator to which costs and products are relative: the paper's, or else the first."""
    labels = list(result["costs"])
    return next((label for label in labels if label.partition("(")[0] == REFERENCE), labels[0])


def policy_estimate(entry: Mapping[str, Any], label: str, figure: str) -> list[float]:
    """Return a figure of an estimator's gradient of the policy at one checkpoint, and its standard error."""
    return entry["estimators"][label]["components"]["policy"][figure]


def noise_flops(result: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, float]:
    """Return noise times FLOPs of every estimator, relative to the reference's: below 1 is better."""
    costs, reference = result["costs"], reference_of(result)
    products = {label: policy_estimate(entry, label, "noise")[0] * cost["flops"] for label, cost in costs.items()}
    known = 0 < products[reference] < math.inf
    return {label: value / products[reference] if known else math.nan for label, value in products.items()}


def variance_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for every checkpoint of a result of ``tokenv.lab.variance_study.run_variance_study``."""
    for entry in result["moments"]:
        bits = entry["bits_per_byte"]
        title = f"{entry['symbols']:,} bytes of training" + (f", {bits:.3f} bits per byte" if bits else "")
        table = Table(title=f"{title}: gradient of the policy", title_justify="left")
        table.add_column("estimator", overflow="fold")
        for name in ("bias", "turn", "cosine", "noise = 1/SNR²", "seconds", "FLOPs", "noise × FLOPs"):
            table.add_column(name, justify="right")
        reference = reference_of(result)
        product = noise_flops(result, entry)
        for label, score in entry["estimators"].items():
            if "refused" in score:
                table.add_row(label, "refused: " + score["refused"])
                continue
            figures = score["components"]["policy"]
            cost, base = result["costs"][label], result["costs"][reference]
            table.add_row(
                label + (" *" if score["unbiased"] else ""),
                format_estimate(figures["bias"]),
                format_estimate(figures["turn"]),
                format_estimate(figures["cosine"], 3),
                _format_noise(figures["noise"]),
                f"{cost['seconds'] / base['seconds']:.2f}",
                f"{cost['flops'] / base['flops']:.2f}",
                _format_number(product[label]),
            )
        yield table


def print_variance(result: Mapping[str, Any]) -> None:
    """Print the tables, and how to read them."""
    output = console(wide=150)
    for table in variance_tables(result):
        output.print(table)
    output.print(
        "value ± standard error. bias: |E g - true| / |true| (negative: its square was estimated below 0);\n"
        "turn: 1 - cos(E g, true); cosine: of single draws with the true gradient; seconds, FLOPs and the product\n"
        f"are relative to {reference_of(result)}. * declared unbiased. True gradient: {result['reference']}."
    )


def write_variance(result: Mapping[str, Any], path: Path) -> Path:
    """Write a CSV file with a row for every estimator, checkpoint and component."""
    costs = ("seconds", "flops", "memory")
    header = [name for figure in FIGURES for name in (figure, f"{figure}_error")]
    rows = []
    for entry in result["moments"]:
        for label, score in entry["estimators"].items():
            for component, figures in score.get("components", {}).items():
                values = [x for figure in FIGURES for x in figures[figure]]
                cost = [result["costs"][label][name] for name in costs]
                rows.append([entry["symbols"], label, score["unbiased"], component, *values, *cost])
    return write_csv(path, ["symbols", "estimator", "declared_unbiased", "component", *header, *costs], rows)
