"""What a comparison of estimators found: tables, and a CSV file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from tokenv.plotting.console import console, write_csv

FIGURES = ("variance", "noise", "snr", "bias", "turn", "cosine", "scale")
BASIS = "reinforce"


def pair(values: list[float], digits: int = 2) -> str:
    """Value and standard error, to the error's first digit."""
    value, error = values
    if not math.isfinite(value):
        return "–"
    return f"{value:.{digits}f} ± {error:.{digits}f}" if math.isfinite(error) else f"{value:.{digits}f}"


def _short(value: float) -> str:
    """Three digits, no exponent below a million."""
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _noise_pair(values: list[float]) -> str:
    value, error = values
    return f"{_short(value)} ± {_short(error)}" if math.isfinite(value) else "no signal"


def reference_of(result: Mapping[str, Any]) -> str:
    """The estimator that costs and products are relative to: the paper's, or else the first."""
    labels = list(result["costs"])
    return next((label for label in labels if label.partition("(")[0] == BASIS), labels[0])


def products(result: Mapping[str, Any], moment: Mapping[str, Any], component: str = "policy") -> dict[str, float]:
    """Noise times FLOPs of every estimator, relative to the paper's: below 1 is better."""
    costs, basis = result["costs"], reference_of(result)
    raw = {
        label: moment["estimators"][label]["components"][component]["noise"][0] * cost["flops"]
        for label, cost in costs.items()
    }
    known = 0 < raw[basis] < math.inf
    return {label: value / raw[basis] if known else math.nan for label, value in raw.items()}


def variance_tables(result: Mapping[str, Any], component: str = "policy") -> Iterator[Table]:
    """A table for every moment.

    Args:
        result: what ``tokenv.lab.variance_study.run_variance_study`` gave.
        component: which gradient: ``logits``, ``policy`` or ``encoder``.
    """
    for moment in result["moments"]:
        bits = moment["bits_per_byte"]
        title = f"{moment['symbols']:,} bytes of training" + (f", {bits:.3f} bits per byte" if bits else "")
        table = Table(title=f"{title}: gradient of the {component}", title_justify="left")
        table.add_column("estimator", overflow="fold")
        for name in ("bias", "turn", "cosine", "noise = 1/SNR²", "seconds", "FLOPs", "noise × FLOPs"):
            table.add_column(name, justify="right")
        basis = reference_of(result)
        product = products(result, moment, component)
        for label, found in moment["estimators"].items():
            if "refused" in found:
                table.add_row(label, "refused: " + found["refused"])
                continue
            figures, cost, base = found["components"][component], result["costs"][label], result["costs"][basis]
            table.add_row(
                label + (" *" if found["unbiased"] else ""),
                pair(figures["bias"]),
                pair(figures["turn"]),
                pair(figures["cosine"], 3),
                _noise_pair(figures["noise"]),
                f"{cost['seconds'] / base['seconds']:.2f}",
                f"{cost['flops'] / base['flops']:.2f}",
                _short(product[label]),
            )
        yield table


def print_variance(result: Mapping[str, Any]) -> None:
    """Print the tables, and how to read them."""
    shown = console(wide=150)
    for table in variance_tables(result):
        shown.print(table)
    shown.print(
        "value ± standard error. bias: |E g - true| / |true| (negative: its square was estimated below 0);\n"
        "turn: 1 - cos(E g, true); cosine: of single draws with the truth; seconds, FLOPs and the product are relative "
        f"to {reference_of(result)}. * declared unbiased. Truth: {result['reference']}."
    )


def write_variance(result: Mapping[str, Any], path: Path) -> Path:
    """Every figure of every estimator, moment and component, a line each."""
    costs = ("seconds", "flops", "memory")
    header = [name for figure in FIGURES for name in (figure, f"{figure}_error")]
    rows = []
    for moment in result["moments"]:
        for label, found in moment["estimators"].items():
            for component, figures in found.get("components", {}).items():
                values = [x for figure in FIGURES for x in figures[figure]]
                cost = [result["costs"][label][name] for name in costs]
                rows.append([moment["symbols"], label, found["unbiased"], component, *values, *cost])
    return write_csv(path, ["symbols", "estimator", "declared_unbiased", "component", *header, *costs], rows)
