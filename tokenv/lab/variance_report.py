"""Results of a variance study: tables, a CSV file, and pictures with all errors and notes on missing values."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Column, Table

from tokenv.plotting.console import console, write_csv
from tokenv.plotting.figures import save_png
from tokenv.plotting.theme import LINES, MARKERS, format_short, with_error

FIGURES = ("variance", "noise", "snr", "bias", "turn", "cosine", "scale")
COLUMNS = ("bias", "turn", "cosine", "noise = 1/SNR²", "seconds", "FLOPs", "noise × FLOPs")
REFERENCE = "reinforce"
_SHADES = (*LINES, "#000000", "#7F7F7F")
_NO_BIAS = "#BBBBBB"  # of points whose bias is not known to differ from 0
_NOISE = "noise of one draw: variance over squared mean, tr Cov / |E g|²"
_READING = "Noise 1: one draw is as much noise as signal; the mean of n draws has an n-th of it. Lower is better."


def _format_noise(noise: float, error: float) -> str:
    if math.isfinite(noise):
        return f"{format_short(noise)} ± {format_short(error)}"
    return "no signal"


def reference_of(result: Mapping[str, Any]) -> str:
    """Return the estimator to which costs and products are relative: the paper's, or else the first."""
    labels = list(result["costs"])
    return next((label for label in labels if label.partition("(")[0] == REFERENCE), labels[0])


def policy_estimate(entry: Mapping[str, Any], label: str, figure: str) -> tuple[float, float]:
    """Return a figure of an estimator's gradient of the policy at one checkpoint, and its standard error."""
    value, error = entry["estimators"][label]["components"]["policy"][figure]
    return value, error


def noise_flops(result: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, float]:
    """Return noise times FLOPs of every estimator, relative to the reference's: below 1 is better."""
    costs = result["costs"]
    reference = reference_of(result)
    products = {
        label: policy_estimate(entry, label, "noise")[0] * cost["flops"]
        for label, cost in costs.items()
    }
    base = products[reference]
    if not 0 < base < math.inf:
        base = math.nan
    return {label: value / base for label, value in products.items()}


def variance_tables(result: Mapping[str, Any]) -> Iterator[Table]:
    """Yield a table for every checkpoint of a result of ``tokenv.lab.variance_study.run_variance_study``."""
    base = result["costs"][reference_of(result)]
    for entry in result["moments"]:
        title = f"{entry['symbols']:,} bytes of training"
        if entry["bits_per_byte"]:
            title += f", {entry['bits_per_byte']:.3f} bits per byte"
        table = Table(
            Column("estimator", overflow="fold"),
            *(Column(name, justify="right") for name in COLUMNS),
            title=f"{title}: gradient of the policy",
            title_justify="left",
        )
        relative = noise_flops(result, entry)
        for label, score in entry["estimators"].items():
            if "refused" in score:
                table.add_row(label, "refused: " + score["refused"])
                continue
            cost = result["costs"][label]
            table.add_row(
                f"{label}{' *' * score['unbiased']}",
                with_error(*policy_estimate(entry, label, "bias"), ".2f"),
                with_error(*policy_estimate(entry, label, "turn"), ".2f"),
                with_error(*policy_estimate(entry, label, "cosine"), ".3f"),
                _format_noise(*policy_estimate(entry, label, "noise")),
                f"{cost['seconds'] / base['seconds']:.2f}",
                f"{cost['flops'] / base['flops']:.2f}",
                format_short(relative[label]),
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
    named = chain.from_iterable((figure, f"{figure}_error") for figure in FIGURES)
    header = ["symbols", "estimator", "declared_unbiased", "component", *named, *costs]
    rows = []
    for entry in result["moments"]:
        for label, score in entry["estimators"].items():
            for component, figures in score.get("components", {}).items():
                values = chain.from_iterable(figures[figure] for figure in FIGURES)
                cost = [result["costs"][label][name] for name in costs]
                rows.append([entry["symbols"], label, score["unbiased"], component, *values, *cost])
    return write_csv(path, header, rows)


@dataclass(frozen=True)
class _Point:
    """An estimator's noise: infinite if there is no signal, with an error of NaN if that is unknown.

    Attributes:
        x: where it is drawn.
        noise: value.
        error: its standard error.
        label: name at the right; empty for none.
        ink: colour of lines.
        face: colour of the point itself.
        marker: marker of the point.
    """

    x: float
    noise: float
    error: float
    label: str
    ink: Any
    face: Any
    marker: str = "o"

    @property
    def is_drawable(self) -> bool:
        """Whether it fits on a logarithmic axis."""
        return 0 < self.noise < math.inf


def _draw_points(axes: Axes, points: Sequence[_Point]) -> None:
    """Draw points with their standard errors and names on a logarithmic axis, which has room for all of them.

    A bar which comes too near 0 ends at the axis; a point without known error is hollow; a noise which is infinite, or
    estimated at 0 or below, is a triangle at the edge.
    """
    drawable = [point for point in points if point.is_drawable]
    errors = np.nan_to_num([point.error for point in drawable], posinf=0.0)
    tops = [point.noise + error for point, error in zip(drawable, errors, strict=True)]
    ends = [
        max(point.noise - error, point.noise / 10)
        for point, error in zip(drawable, errors, strict=True)
    ]
    floor = min(ends, default=0.1) / 2
    top = max(tops, default=10.0) * 2
    axes.set(yscale="log", ylim=(floor, top))
    names = []
    for point in points:
        height = point.noise
        look: dict[str, Any] = {"mfc": "white", "mec": point.face, "mew": 1.5}
        if math.isfinite(point.error):
            low = min(point.error, point.noise - floor)
            look = {"yerr": [[low], [point.error]], "mfc": point.face, "mec": point.ink, "mew": 0.6}
        if point.is_drawable:
            look |= {"color": point.ink, "marker": point.marker, "elinewidth": 0.8, "capsize": 2}
            axes.errorbar([point.x], [point.noise], ms=6, zorder=3, **look)
        else:
            sign = "^"
            height = top / 1.15
            if point.noise <= 0:
                sign = "v"
                height = floor * 1.15
            axes.plot(
                point.x, height, marker=sign, ms=7, mfc="none", mec=point.ink, ls="", zorder=4
            )
        if point.label:
            names.append((point.x, height, point.label, point.ink))
    _label_at_right(axes, names)


def _sign(label: str, **style: Any) -> Line2D:
    """Return an entry of a legend."""
    return Line2D([], [], label=label, **{"color": "black", "ls": ""} | style)


def _draw_legend(
    figure: Figure, result: Mapping[str, Any], more: Sequence[Line2D], note: str
) -> None:
    """Explain the signs below a picture, followed by a note and by what is missing."""
    signs = [
        _sign(
            "value ± standard error (a bar to the lower edge goes on below it)",
            marker="o",
            ms=6,
            ls="-",
            lw=0.8,
        ),
        _sign("standard error not measurable", marker="o", ms=6, mfc="white"),
        _sign(
            "no signal: noise infinite (downwards: estimated at 0 or below)",
            marker="^",
            ms=7,
            mfc="none",
        ),
        *more,
    ]
    figure.legend(
        handles=signs,
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=8,
        title="\n".join([_READING, note, *_notes_on_missing(result)]),
        title_fontsize=8,
        alignment="left",
    )


def _notes_on_missing(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the estimators without a signal, by checkpoint, and on those which refuse the policy."""
    places = []
    for entry in result["moments"]:
        without = [
            label
            for label in result["costs"]
            if policy_estimate(entry, label, "noise")[0] == math.inf
        ]
        if without:
            places.append(f"at {entry['symbols'] / 1e6:.2f} MB: {', '.join(without)}")
    if places:
        yield f"No signal seen {'; '.join(places)}."
    refused = [
        label for label, score in result["moments"][-1]["estimators"].items() if "refused" in score
    ]
    if refused:
        yield f"Not measured, for they refuse this policy: {', '.join(refused)}."


def draw_progress(result: Mapping[str, Any], path: Path) -> Path:
    """Draw noise (1 / SNR^2) against training progress, a line for each estimator, labelled at the right."""
    figure = Figure(figsize=(9, 7.2), dpi=140, layout="constrained")
    axes = figure.subplots()
    entries = result["moments"]
    labels = list(result["costs"])
    megabytes = [entry["symbols"] / 1e6 for entry in entries]
    offset = 0.06 * ((max(megabytes) - min(megabytes)) or megabytes[0]) / len(labels)
    points = []
    for number, label in enumerate(labels):
        beside = offset * (number - (len(labels) - 1) / 2)
        colour = _SHADES[number % len(_SHADES)]
        marker = MARKERS[number // len(_SHADES) % len(MARKERS)]
        line = []
        for x, entry in zip(megabytes, entries, strict=True):
            estimate = policy_estimate(entry, label, "noise")
            line.append(_Point(x + beside, *estimate, "", colour, colour, marker))
        line[-1] = replace(line[-1], label=label)
        noise = np.where(
            [point.is_drawable for point in line], [point.noise for point in line], math.nan
        )
        axes.plot([point.x for point in line], noise, color=colour, lw=1)
        points += line
    _draw_points(axes, points)
    axes.set(xlabel="training megabytes", ylabel=_NOISE)
    axes.set_title("Variance of the policy gradient along one training run", loc="left")
    note = (
        "Estimators are drawn a little beside one another, so that no bar hides another; "
        "they share their checkpoints."
    )
    _draw_legend(figure, result, [], note)
    return save_png(figure, path)


def _label_at_right(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write names right of logarithmic axes, each joined to its point (x, y, name, colour), without overlap."""
    low, high = np.log10(axes.get_ylim())
    step = (high - low) / max(32, len(ends))
    height = -math.inf
    for rank, (x, y, label, colour) in enumerate(sorted(ends, key=lambda end: end[1])):
        below_top = high - step * (len(ends) - 1 - rank)  # leaves room for the names above
        height = max(min(math.log10(y), below_top), height + step)
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
            arrowprops={
                "arrowstyle": "-",
                "color": "lightgrey",
                "lw": 0.5,
                "shrinkA": 0,
                "shrinkB": 3,
            },
        )


def differs(value: float, error: float) -> bool:
    """Return whether a value lies more than two standard errors from 0; False where either is unknown."""
    return abs(value) > 2 * error


def draw_cost(result: Mapping[str, Any], path: Path) -> Path:
    """Draw noise against FLOPs of an update, one panel for each checkpoint.

    The colour is the bias of direction where that ``differs`` from 0; all other points are grey.
    """
    entries = result["moments"]
    costs = result["costs"]
    figure = Figure(figsize=(max(7.5 * len(entries), 9), 7.2), dpi=140, layout="constrained")
    panels = figure.subplots(1, len(entries), squeeze=False)[0]
    reference = reference_of(result)
    biases = [policy_estimate(entry, label, "turn") for entry, label in product(entries, costs)]
    known = [value for value, error in biases if differs(value, error)]
    scale = mpl.cm.ScalarMappable(
        mpl.colors.Normalize(min([0.0, *known]), max([0.1, *known])), mpl.colormaps["viridis"]
    )
    for axes, entry in zip(panels, entries, strict=True):
        points = []
        for label, cost in costs.items():
            bias = policy_estimate(entry, label, "turn")
            face: Any = _NO_BIAS
            if differs(*bias):
                face = scale.to_rgba(np.array(bias[0]))
            flops = cost["flops"] / costs[reference]["flops"]
            name = f"{label}  [{with_error(*bias, '.2f')}]"
            noise = policy_estimate(entry, label, "noise")
            points.append(_Point(flops, *noise, name, "black", face))
            if label == reference:
                equal = points[-1]
        _draw_points(axes, points)
        if equal.is_drawable:
            # where noise × FLOPs equals the reference's, and half of it
            flops_x = np.geomspace(0.9, max(point.x for point in points) * 1.05, 50)
            axes.plot(flops_x, equal.noise / flops_x, color="grey", lw=1, ls="--", zorder=1)
            axes.plot(flops_x, equal.noise / flops_x / 2, color="grey", lw=1, ls=":", zorder=1)
        axes.set(xlabel=f"FLOPs of an update, relative to {reference}")
        axes.set_title(f"{entry['symbols'] / 1e6:.2f} MB of training", loc="left")
    panels[0].set_ylabel(_NOISE)
    figure.colorbar(
        scale,
        ax=list(panels),
        label="bias of direction, 1 − cos(E g, true), where it differs from 0",
    )
    figure.suptitle(
        "Variance of the policy gradient against what an update costs", x=0.01, ha="left"
    )
    lines = [
        _sign(
            "grey: bias within 2 standard errors of 0, or not measurable",
            marker="o",
            ms=6,
            color=_NO_BIAS,
        ),
        _sign(
            f"as good as {reference} at equal compute: the same noise × FLOPs",
            color="grey",
            ls="--",
        ),
        _sign("half of that", color="grey", ls=":"),
    ]
    note = "In brackets, and as colour: bias of direction ± standard error; at 0 it is the true gradient's."
    _draw_legend(figure, result, lines, note)
    return save_png(figure, path)


def draw_credit(result: Mapping[str, Any], path: Path) -> Path | None:
    """Draw the effect of one boundary on the reward j symbols ahead, and the noise of that reward, by checkpoint."""
    entries = [entry for entry in result["moments"] if "credit" in entry]
    if not entries:
        return None
    figure = Figure(figsize=(11, 5.2), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, entry in enumerate(entries):
        credit = entry["credit"]
        colour = _SHADES[number % len(_SHADES)]
        several = np.array(credit["pairs"]) > 1  # one pair has no spread, hence no error
        ahead = np.arange(len(several)) + 1
        rms, noise, mean, error = (
            np.where(several, credit[name], math.nan)
            for name in ("rms", "noise", "mean", "mean_error")
        )
        name = f"{entry['symbols'] / 1e6:.2f} MB of training"
        left.plot(ahead, rms, color=colour, label=f"effect of one boundary, {name}")
        left.plot(ahead, noise, color=colour, ls=":", label=f"spread of the reward itself, {name}")
        total = np.cumsum(mean)
        spread = np.sqrt(np.cumsum(error**2))
        right.plot(ahead, total, color=colour, label=name)
        right.fill_between(
            ahead, total - 2 * spread, total + 2 * spread, color=colour, alpha=0.15, lw=0
        )
    left.set(xscale="log", yscale="log", xlabel="symbols ahead", ylabel="nats, root mean square")
    left.set_title("Effect of one boundary by distance", loc="left")
    left.legend(fontsize=7, frameon=False)
    right.axhline(0, color="grey", lw=0.8)
    right.set(xscale="log", xlabel="symbols ahead", ylabel="nats, summed up to there")
    right.set_title("Reward of one more boundary, at random", loc="left")
    right.legend(fontsize=7, frameon=False)
    figure.supxlabel(
        "One decision is forced both ways, and the rewards which follow are compared: gradients are noisy where the "
        "effect is below the reward's own spread.\nLeft: errors were not measured. Right: bands are ± 2 standard "
        "errors, as if distances were independent. Distances with fewer than two pairs are left out.",
        fontsize=8,
    )
    return save_png(figure, path)
