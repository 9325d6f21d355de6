"""Draw the report of a training run: its curves, and the patches in held-out series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from tokenv.core.rates import Rate, RateRange, mean_rate
from tokenv.evaluation.series_excerpts import SeriesExcerpt
from tokenv.plotting.figures import (
    Curve,
    draw_curve,
    draw_probabilities,
    draw_values,
    legend_handles,
    save_png,
    titled_figure,
)
from tokenv.plotting.theme import BLUE, GREEN, ORANGE, in_words


class _Line(NamedTuple):
    key: str
    label: str
    colour: str


class _Panel(NamedTuple):
    ylabel: str
    lines: tuple[_Line, ...]
    log: bool = False
    has_target: bool = False


def _loss_panel(unit: str) -> _Panel:
    lines = (
        _Line(f"train/{unit}", "training", BLUE),
        _Line(f"train/{unit}_early", "early exit", GREEN),
        _Line(f"validation/{unit}", "validation", ORANGE),
    )
    return _Panel(in_words(unit), lines)


_PANELS = (
    _Panel(
        "boundaries per symbol",
        (
            _Line("train/boundary_rate", "training", BLUE),
            _Line("validation/boundary_rate", "validation", ORANGE),
        ),
        has_target=True,
    ),
    _Panel(
        "nats per decision",
        (
            _Line("train/neg_log_prob", "−log π of the decisions drawn", BLUE),
            _Line("train/entropy", "entropy of π", ORANGE),
        ),
    ),
    _Panel(
        "gradient norm",
        (
            _Line("train/grad_norm_lm", "language model", BLUE),
            _Line("train/grad_norm_policy", "policy", ORANGE),
        ),
        log=True,
    ),
)


def draw_curves(
    metrics: Mapping[str, Curve],
    path: Path,
    *,
    title: str,
    target_rate: Rate | None = None,
    unit: str = "bits_per_byte",
) -> Path:
    """Draw loss, boundary rate, decision entropy and gradient norms against training symbols.

    Curves under ``train/`` are drawn faintly with their running mean on top; those under ``validation/`` as
    points joined by lines. A panel without any of its metrics says so; values that are not finite (or
    1e100 and more) are left out, as are those no logarithmic axis can show.

    Args:
        metrics: Name → (training symbols seen, values), two sequences of one length. Names not drawn here are
            ignored.
        path: The PNG to write, in an existing folder; it is replaced in one step.
        title: Written above the panels, literally.
        target_rate: Boundaries per symbol aimed at, drawn dashed; of a range its mean.
        unit: Of the losses, as in their metrics' names.

    Returns:
        ``path``.

    Raises:
        ValueError: If ``metrics`` is empty or a metric's two sequences differ in length.
        OSError: If the file cannot be written.
    """
    if not metrics:
        raise ValueError("no metrics to draw")
    for name, (x, y) in metrics.items():
        if len(x) != len(y):
            raise ValueError(f"metric {name}: {len(x)} positions but {len(y)} values")

    figure = titled_figure(12, 8, dpi=120, title=title)
    for axes, panel in zip(figure.subplots(2, 2).flat, (_loss_panel(unit), *_PANELS), strict=True):
        _draw_panel(axes, panel, metrics, target_rate)

    return save_png(figure, path)


def _draw_panel(axes: Axes, panel: _Panel, metrics: Mapping[str, Curve], target_rate: Rate | None) -> None:
    drawn = [
        draw_curve(
            axes,
            metrics[line.key],
            label=line.label,
            colour=line.colour,
            log=panel.log,
            sparse=line.key.startswith("validation/"),
        )
        for line in panel.lines
        if line.key in metrics
    ]
    axes.set_ylabel(panel.ylabel)
    axes.set_xlabel("training symbols")
    axes.spines[["top", "right"]].set_visible(False)
    if not any(drawn):
        message = "nothing finite to draw" if drawn else "not recorded"
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set(xticks=[], yticks=[])
        return
    if panel.has_target and target_rate is not None:
        told = f"{'mean of targets' if isinstance(target_rate, RateRange) else 'target'} {target_rate:g}"
        axes.axhline(mean_rate(target_rate), color="0.25", linestyle="--", linewidth=1, label=told)
    if panel.log:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    # Above the panel: a place inside may hide a curve, and matplotlib's search for the best one is slow.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")


def draw_patches(shown: Sequence[SeriesExcerpt], path: Path, *, title: str, context: int = 0) -> Path:
    """Draw series with their patches as alternating bands, and the boundary probabilities below.

    Args:
        shown: The series, from top to bottom.
        path: The PNG to write, in an existing folder; it is replaced in one step.
        title: Written above, literally.
        context: Leading steps that nothing is predicted of.

    Returns:
        ``path``.

    Raises:
        ValueError: There is no series.
        OSError: The file cannot be written.
    """
    if not shown:
        raise ValueError("no series to draw")
    figure = titled_figure(13, 0.9 + 2.9 * len(shown), dpi=110, title=title)
    figure.legend(
        handles=draw_windows(figure, shown, context),
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize="small",
    )
    return save_png(figure, path)


def draw_windows(figure: Figure, shown: Sequence[SeriesExcerpt], context: int) -> list[Patch | Line2D]:
    """Fill an empty figure with windows, from top to bottom: each over its patches, boundary probabilities below.

    Args:
        figure: to fill.
        shown: at least one window, its name written above it.
        context: leading steps that nothing is predicted of.

    Returns:
        What its legend explains.
    """
    axes = figure.subplots(2 * len(shown), 1, height_ratios=[3, 1] * len(shown), squeeze=False)[:, 0]
    longest = max(len(window.value) for window in shown)
    for window, above, below in zip(shown, axes[::2], axes[1::2], strict=True):
        value_NC = np.array(window.value, dtype=float)  # None becomes NaN
        draw_values(above, value_NC, window.action, title=window.name, context=context, gold_N=window.gold)
        draw_probabilities(below, window.boundary_prob)
    for each in axes:  # one scale, read off below the last
        each.set_xlim(-0.5, longest - 0.5)
        each.tick_params(labelbottom=each is axes[-1])
    axes[-1].set_xlabel("step")
    return legend_handles(context=context > 0, gold=any(window.gold is not None for window in shown))
