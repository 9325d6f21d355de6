"""What a comparison of estimators found: tables, a CSV file, and three pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from tokenv.report.canvas import save_png
from tokenv.report.table import console, write_csv
from tokenv.report.theme import LINES, MARKERS

FIGURES = ("variance", "noise", "snr", "bias", "turn", "cosine", "scale")
BASIS = "reinforce"
_SHADES = (*LINES, "#000000", "#7F7F7F")


def _pair(values: list[float], digits: int = 2) -> str:
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


def basis_of(result: Mapping[str, Any]) -> str:
    """The estimator that costs and products are relative to: the paper's, or else the first."""
    labels = list(result["costs"])
    return next((label for label in labels if label.partition("(")[0] == BASIS), labels[0])


def products(result: Mapping[str, Any], moment: Mapping[str, Any], component: str = "policy") -> dict[str, float]:
    """Noise times FLOPs of every estimator, relative to the paper's: below 1 is better."""
    costs, basis = result["costs"], basis_of(result)
    raw = {
        label: moment["estimators"][label]["components"][component]["noise"][0] * cost["flops"]
        for label, cost in costs.items()
    }
    return {label: value / raw[basis] if raw[basis] > 0 else math.nan for label, value in raw.items()}


def variance_tables(result: Mapping[str, Any], component: str = "policy") -> Iterator[Table]:
    """A table for every moment.

    Args:
        result: what ``tokenv.variance.lab.compare`` gave.
        component: which gradient: ``logits``, ``policy`` or ``encoder``.
    """
    for moment in result["moments"]:
        bits = moment["bits_per_byte"]
        title = f"{moment['symbols']:,} bytes of training" + (f", {bits:.3f} bits per byte" if bits else "")
        table = Table(title=f"{title}: gradient of the {component}", title_justify="left")
        table.add_column("estimator", overflow="fold")
        for name in ("bias", "turn", "cosine", "noise = 1/SNR²", "seconds", "FLOPs", "noise × FLOPs"):
            table.add_column(name, justify="right")
        basis = basis_of(result)
        product = products(result, moment, component)
        for label, found in moment["estimators"].items():
            if "refused" in found:
                table.add_row(label, "refused: " + found["refused"])
                continue
            figures, cost, base = found["components"][component], result["costs"][label], result["costs"][basis]
            table.add_row(
                label + (" *" if found["unbiased"] else ""),
                _pair(figures["bias"]),
                _pair(figures["turn"]),
                _pair(figures["cosine"], 3),
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
        f"to {basis_of(result)}. * declared unbiased. Truth: {result['reference']}."
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


def draw_progress(result: Mapping[str, Any], path: Path, component: str = "policy") -> Path:
    """Noise (1 / SNR^2) against training progress, a line for each estimator, direct labels at the right."""
    figure = Figure(figsize=(9, 6), dpi=140, layout="constrained")
    axes = figure.subplots()
    ends: list[tuple[float, float, str, str]] = []
    for number, label in enumerate(result["costs"]):
        points = [
            (moment["symbols"] / 1e6, *moment["estimators"][label]["components"][component]["noise"])
            for moment in result["moments"]
        ]
        shown = [(x, y, e) for x, y, e in points if math.isfinite(y) and y > 0]
        if not shown:
            continue
        x, y, error = map(np.array, zip(*shown, strict=True))
        colour, marker = _SHADES[number % len(_SHADES)], MARKERS[number // len(_SHADES) % len(MARKERS)]
        low = np.minimum(error, 0.7 * y)  # a logarithmic axis has no room below 0
        axes.errorbar(x, y, [low, error], color=colour, marker=marker, ms=5, lw=1, elinewidth=0.8, capsize=2)
        ends.append((x[-1], y[-1], label, colour))
    axes.set(yscale="log", xlabel="training megabytes", ylabel="noise of one draw, tr Cov / |E g|²")
    axes.set_title(f"Variance of the {component} gradient along one training run", loc="left")
    _label_at_right(axes, ends)
    return save_png(figure, path)


def _label_at_right(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Names right of the axes, each joined to its point (x, y, name, colour), pushed apart so that none hides another.

    The vertical axis is logarithmic.
    """
    if not ends:
        return
    low, high = np.log10(axes.get_ylim())
    step = (high - low) / 32
    height = -math.inf
    for x, y, label, colour in sorted(ends, key=lambda end: end[1]):
        height = max(math.log10(y), height + step)
        axes.annotate(
            label,
            (x, y),
            xycoords="data",
            xytext=(1.02, 10**height),
            textcoords=("axes fraction", "data"),
            fontsize=7,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "lightgrey", "lw": 0.5, "shrinkA": 0, "shrinkB": 3},
        )


def _turn(moment: Mapping[str, Any], label: str, component: str) -> float:
    """Bias of direction, cut to [0, 1]; 1 where it is unknown."""
    turn = moment["estimators"][label]["components"][component]["turn"][0]
    return min(max(turn, 0.0), 1.0) if math.isfinite(turn) else 1.0


def draw_cost(result: Mapping[str, Any], path: Path, component: str = "policy") -> Path:
    """Noise against FLOPs of an update, bias of direction as colour, one panel for each moment."""
    moments = result["moments"]
    figure = Figure(figsize=(6.5 * len(moments), 6), dpi=140, layout="constrained")
    panels = figure.subplots(1, len(moments), squeeze=False)[0]
    colours = mpl.colormaps["viridis"]
    basis = result["costs"][basis_of(result)]["flops"]
    most = max(_turn(moment, label, component) for moment in moments for label in result["costs"])
    scale = mpl.cm.ScalarMappable(mpl.colors.Normalize(0, max(most, 0.1)), colours)
    for axes, moment in zip(panels, moments, strict=True):
        ends = []
        for label, cost in result["costs"].items():
            noise = moment["estimators"][label]["components"][component]["noise"][0]
            if math.isfinite(noise) and noise > 0:
                x = cost["flops"] / basis
                colour = scale.to_rgba(np.array(_turn(moment, label, component)))
                axes.scatter(x, noise, color=colour, edgecolor="black", linewidth=0.6, s=45, zorder=3)
                ends.append((x, noise, label, "black"))
        base = moment["estimators"][basis_of(result)]["components"][component]["noise"][0]
        if math.isfinite(base) and base > 0:
            line = np.geomspace(0.9, max(end[0] for end in ends) * 1.05, 50)
            axes.plot(line, base / line, color="grey", lw=1, ls="--", zorder=1)
            axes.plot(line, base / line / 2, color="grey", lw=1, ls=":", zorder=1)
        axes.set(yscale="log", xlabel=f"FLOPs of an update, relative to {basis_of(result)}")
        axes.set_title(f"{moment['symbols'] / 1e6:.2f} MB", loc="left")
        _label_at_right(axes, ends)
    panels[0].set_ylabel("noise of one draw, tr Cov / |E g|²")
    figure.colorbar(scale, ax=list(panels), label="bias of direction, 1 − cos(E g, true)")
    figure.suptitle(
        f"Variance against cost ({component}); dashed: equal product with {basis_of(result)}, dotted: half of it", x=0.3
    )
    return save_png(figure, path)


def draw_credit(result: Mapping[str, Any], path: Path) -> Path | None:
    """Effect of one boundary on the reward j symbols ahead, with the noise of that reward, for every moment."""
    moments = [moment for moment in result["moments"] if "credit" in moment]
    if not moments:
        return None
    figure = Figure(figsize=(11, 4.5), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, moment in enumerate(moments):
        credit, colour = moment["credit"], _SHADES[number]
        ahead = np.arange(len(credit["rms"])) + 1
        name = f"{moment['symbols'] / 1e6:.2f} MB"
        left.plot(ahead, credit["rms"], color=colour, label=f"effect, {name}")
        left.plot(ahead, credit["noise"], color=colour, ls=":", label=f"reward itself, {name}")
        mean, error = np.array(credit["mean"]), np.array(credit["mean_error"])
        total = np.cumsum(mean)
        spread = np.sqrt(np.cumsum(error**2))
        right.plot(ahead, total, color=colour, label=name)
        right.fill_between(ahead, total - 2 * spread, total + 2 * spread, color=colour, alpha=0.15, lw=0)
    left.set(xscale="log", yscale="log", xlabel="symbols ahead", ylabel="nats, root mean square")
    left.set_title("How far one boundary's effect reaches", loc="left")
    left.legend(fontsize=7, frameon=False)
    right.axhline(0, color="grey", lw=0.8)
    right.set(xscale="log", xlabel="symbols ahead", ylabel="nats, summed up to there")
    right.set_title("What a random further boundary earns (± 2 s.e.)", loc="left")
    right.legend(fontsize=7, frameon=False)
    return save_png(figure, path)
