"""What a comparison of estimators found, as three pictures: no error is left out, and what is missing says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tokenv.lab.report import pair, reference_of
from tokenv.plotting.figures import save_png
from tokenv.plotting.theme import LINES, MARKERS

_SHADES = (*LINES, "#000000", "#7F7F7F")
_NO_BIAS = "#BBBBBB"  # of points whose bias is not known to differ from 0
_NOISE = "noise of one draw: variance over squared mean, tr Cov / |E g|²"
_READING = "Noise 1: one draw is as much noise as signal; the mean of n draws has an n-th of it. Lower is better."


@dataclass(frozen=True)
class _Point:
    """An estimator's noise at one place: infinite where there was no signal, the error NaN where it is unknown."""

    x: float
    noise: float
    error: float

    @property
    def seen(self) -> bool:
        """Whether a logarithmic axis has a place for it."""
        return math.isfinite(self.noise) and self.noise > 0

    def height(self, axes: Axes) -> float:
        """Where it is drawn: what has no place, at the edge that it lies beyond."""
        floor, top = axes.get_ylim()
        return self.noise if self.seen else floor * 1.15 if self.noise <= 0 else top / 1.15


def _found(moment: Mapping[str, Any], label: str, component: str, figure: str) -> tuple[float, float]:
    value, error = moment["estimators"][label]["components"][component][figure]
    return value, error


def _set_noise_axis(axes: Axes, points: Sequence[_Point]) -> None:
    """A logarithmic axis with room for all bars that do not come near 0, and above them for what has no signal."""
    seen = [point for point in points if point.seen]
    errors = [point.error if math.isfinite(point.error) else 0.0 for point in seen]
    tops = [point.noise + error for point, error in zip(seen, errors, strict=True)] or [10.0]
    ends = [max(point.noise - error, point.noise / 10) for point, error in zip(seen, errors, strict=True)] or [0.1]
    axes.set(yscale="log", ylim=(min(ends) / 2, max(tops) * 2))


def _draw_noise(axes: Axes, points: Sequence[_Point], ink: Any, marker: str = "o", faces: Sequence[Any] = ()) -> None:
    """Points with their standard errors, on an axis that ``_set_noise_axis`` has set.

    A bar that comes too near 0 ends at the axis; without a known error the point is hollow; a noise that is infinite,
    or was estimated at 0 or below, is a triangle at the edge.

    Args:
        axes: where to draw.
        points: to draw.
        ink: colour of lines, and of all that has no other.
        marker: of points.
        faces: colours of the points; the ink where not given.
    """
    floor, _ = axes.get_ylim()
    for i, point in enumerate(points):
        face = faces[i] if faces else ink
        if not point.seen:
            sign = "v" if point.noise <= 0 else "^"
            axes.plot(point.x, point.height(axes), marker=sign, ms=7, mfc="none", mec=ink, ls="", zorder=4)
            continue
        known = math.isfinite(point.error)
        low = min(point.error, point.noise - floor)
        axes.errorbar(
            [point.x],
            [point.noise],
            [[low], [point.error]] if known else None,
            color=ink,
            marker=marker,
            ms=6,
            mfc=face if known else "white",
            mec="black" if faces and known else face,
            mew=0.6 if known else 1.5,
            elinewidth=0.8,
            capsize=2,
            zorder=3,
        )


def _explained(figure: Figure, more: Sequence[Line2D], said: Sequence[str]) -> None:
    """What the signs mean, in words, below a picture."""
    signs = [
        Line2D(
            [],
            [],
            color="black",
            marker="o",
            ms=6,
            lw=0.8,
            label="value ± standard error (a bar to the lower edge goes on below it)",
        ),
        Line2D([], [], color="black", marker="o", ms=6, mfc="white", ls="", label="standard error not measurable"),
        Line2D(
            [],
            [],
            color="black",
            marker="^",
            ms=7,
            mfc="none",
            ls="",
            label="no signal seen: noise infinite (downwards: noise estimated at 0 or below)",
        ),
        *more,
    ]
    figure.legend(
        handles=signs,
        loc="outside lower left",
        ncols=2,
        frameon=False,
        fontsize=8,
        title="\n".join([_READING, *said]),
        title_fontsize=8,
        alignment="left",
    )


def _refused(result: Mapping[str, Any]) -> list[str]:
    """A sentence on estimators that the policy does not allow; none without any."""
    names = [label for label, found in result["moments"][-1]["estimators"].items() if "refused" in found]
    return [f"Not measured, for they refuse this policy: {', '.join(names)}."] if names else []


def _unseen(result: Mapping[str, Any], component: str) -> list[str]:
    """A sentence on estimators without a signal, by moment; none without any."""
    found = {
        f"{moment['symbols'] / 1e6:.2f} MB": [
            label for label in result["costs"] if _found(moment, label, component, "noise")[0] == math.inf
        ]
        for moment in result["moments"]
    }
    told = "; ".join(f"at {when}: {', '.join(labels)}" for when, labels in found.items() if labels)
    return [f"No signal seen {told}."] if told else []


def draw_progress(result: Mapping[str, Any], path: Path, component: str = "policy") -> Path:
    """Noise (1 / SNR^2) against training progress, a line for each estimator, direct labels at the right."""
    figure = Figure(figsize=(9, 7.2), dpi=140, layout="constrained")
    axes = figure.subplots()
    moments, labels = result["moments"], list(result["costs"])
    at = [moment["symbols"] / 1e6 for moment in moments]
    aside = 0.06 * ((max(at) - min(at)) or at[0]) / len(labels)
    lines = {
        label: [
            _Point(x + aside * (number - (len(labels) - 1) / 2), *_found(moment, label, component, "noise"))
            for x, moment in zip(at, moments, strict=True)
        ]
        for number, label in enumerate(labels)
    }
    _set_noise_axis(axes, [point for points in lines.values() for point in points])
    ends: list[tuple[float, float, str, str]] = []
    for number, (label, points) in enumerate(lines.items()):
        colour, marker = _SHADES[number % len(_SHADES)], MARKERS[number // len(_SHADES) % len(MARKERS)]
        axes.plot([p.x for p in points], [p.noise if p.seen else math.nan for p in points], color=colour, lw=1)
        _draw_noise(axes, points, colour, marker)
        ends.append((points[-1].x, points[-1].height(axes), label, colour))
    axes.set(xlabel="training megabytes", ylabel=_NOISE)
    axes.set_title(f"Variance of the {component} gradient along one training run", loc="left")
    _label_at_right(axes, ends)
    said = ["Estimators stand a little aside of one another, so that no bar hides another; they share their moments."]
    _explained(figure, [], [*said, *_unseen(result, component), *_refused(result)])
    return save_png(figure, path)


def _label_at_right(axes: Any, ends: list[tuple[float, float, str, str]]) -> None:
    """Names right of the axes, each joined to its point (x, y, name, colour), pushed apart so that none hides another.

    The vertical axis is logarithmic.
    """
    if not ends:
        return
    low, high = np.log10(axes.get_ylim())
    step = (high - low) / max(32, len(ends))
    height = -math.inf
    for place, (x, y, label, colour) in enumerate(sorted(ends, key=lambda end: end[1])):
        below_top = high - step * (len(ends) - 1 - place)  # the rest fits above
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
            arrowprops={"arrowstyle": "-", "color": "lightgrey", "lw": 0.5, "shrinkA": 0, "shrinkB": 3},
        )


def differs(value: float, error: float) -> bool:
    """Return whether a value lies more than two standard errors from 0; False where either is unknown."""
    return abs(value) > 2 * error


def draw_cost(result: Mapping[str, Any], path: Path, component: str = "policy") -> Path:
    """Draw noise against FLOPs of an update, one panel for each moment.

    The colour is the bias of direction where that ``differs`` from 0; all other points are grey.
    """
    moments, costs = result["moments"], result["costs"]
    figure = Figure(figsize=(max(7.5 * len(moments), 9), 7.2), dpi=140, layout="constrained")
    panels = figure.subplots(1, len(moments), squeeze=False)[0]
    basis = reference_of(result)
    turns = [_found(moment, label, component, "turn") for moment in moments for label in costs]
    known = [value for value, error in turns if differs(value, error)]
    scale = mpl.cm.ScalarMappable(
        mpl.colors.Normalize(min([0.0, *known]), max([0.1, *known])), mpl.colormaps["viridis"]
    )
    for axes, moment in zip(panels, moments, strict=True):
        points = {
            label: _Point(cost["flops"] / costs[basis]["flops"], *_found(moment, label, component, "noise"))
            for label, cost in costs.items()
        }
        _set_noise_axis(axes, list(points.values()))
        limits, ends = axes.get_ylim(), []
        for label, point in points.items():
            turn = _found(moment, label, component, "turn")
            face = scale.to_rgba(np.array(turn[0])) if differs(*turn) else _NO_BIAS
            _draw_noise(axes, [point], "black", faces=[face])
            told = f"{label}  [{pair(list(turn))}]"
            ends.append((point.x, point.height(axes), told, "black"))
        if points[basis].seen:
            line = np.geomspace(0.9, max(point.x for point in points.values()) * 1.05, 50)
            axes.plot(line, points[basis].noise / line, color="grey", lw=1, ls="--", zorder=1)
            axes.plot(line, points[basis].noise / line / 2, color="grey", lw=1, ls=":", zorder=1)
        axes.set(ylim=limits, xlabel=f"FLOPs of an update, relative to {basis}")
        axes.set_title(f"{moment['symbols'] / 1e6:.2f} MB of training", loc="left")
        _label_at_right(axes, ends)
    panels[0].set_ylabel(_NOISE)
    figure.colorbar(scale, ax=list(panels), label="bias of direction, 1 − cos(E g, true), where it differs from 0")
    figure.suptitle(f"Variance of the {component} gradient against what an update costs", x=0.01, ha="left")
    lines = [
        Line2D(
            [],
            [],
            color=_NO_BIAS,
            marker="o",
            ms=6,
            ls="",
            label="grey: bias within 2 standard errors of 0, or not measurable",
        ),
        Line2D([], [], color="grey", ls="--", label=f"as good as {basis} at equal compute: the same noise × FLOPs"),
        Line2D([], [], color="grey", ls=":", label="half of that"),
    ]
    said = ["In brackets, and as colour: bias of direction ± standard error; at 0 it is the true gradient's."]
    _explained(figure, lines, [*said, *_unseen(result, component), *_refused(result)])
    return save_png(figure, path)


def draw_credit(result: Mapping[str, Any], path: Path) -> Path | None:
    """Effect of one boundary on the reward j symbols ahead, with the noise of that reward, for every moment."""
    moments = [moment for moment in result["moments"] if "credit" in moment]
    if not moments:
        return None
    figure = Figure(figsize=(11, 5.2), dpi=140, layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, moment in enumerate(moments):
        credit, colour = moment["credit"], _SHADES[number % len(_SHADES)]
        several = np.array(credit["pairs"]) > 1  # one pair has no spread, and no error
        ahead = np.arange(len(several)) + 1
        rms, noise, mean, error = (
            np.where(several, credit[name], math.nan) for name in ("rms", "noise", "mean", "mean_error")
        )
        name = f"{moment['symbols'] / 1e6:.2f} MB of training"
        left.plot(ahead, rms, color=colour, label=f"effect of one boundary, {name}")
        left.plot(ahead, noise, color=colour, ls=":", label=f"spread of the reward itself, {name}")
        total = np.cumsum(mean)
        spread = np.sqrt(np.cumsum(error**2))
        right.plot(ahead, total, color=colour, label=name)
        right.fill_between(ahead, total - 2 * spread, total + 2 * spread, color=colour, alpha=0.15, lw=0)
    left.set(xscale="log", yscale="log", xlabel="symbols ahead", ylabel="nats, root mean square")
    left.set_title("How far one boundary's effect reaches", loc="left")
    left.legend(fontsize=7, frameon=False)
    right.axhline(0, color="grey", lw=0.8)
    right.set(xscale="log", xlabel="symbols ahead", ylabel="nats, summed up to there")
    right.set_title("What a random further boundary earns", loc="left")
    right.legend(fontsize=7, frameon=False)
    figure.supxlabel(
        "One decision is forced both ways, and the rewards that follow are compared: an effect below the reward's own "
        "spread is what makes gradients noisy.\nLeft: errors were not measured. Right: bands are ± 2 standard errors, "
        "as if distances were independent. Distances that fewer than two pairs reach are left out.",
        fontsize=8,
    )
    return save_png(figure, path)
