"""Report a run: training curves, patches in held-out series, and a table and a picture of several rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter
from rich.table import Column, Table
from rich.text import Text

from tokenv.core.rates import Rate, RateRange, mean_rate
from tokenv.evaluation.boundary_stats import SeriesExcerpt
from tokenv.evaluation.calibration import CALIBRATED, CONDITIONED, ENTROPY_WEIGHTED, RatePoint
from tokenv.plotting import figures
from tokenv.plotting.characters import escape
from tokenv.plotting.console import write_csv
from tokenv.plotting.theme import BLUE, GREEN, LINES, ORANGE, in_words, with_error


class _Panel(NamedTuple):
    ylabel: str
    lines: tuple[tuple[str, str, str], ...]  # key, label and colour
    log: bool = False
    has_target: bool = False


def _loss_panel(unit: str) -> _Panel:
    lines = (
        (f"train/{unit}", "training", BLUE),
        (f"train/{unit}_early", "early exit", GREEN),
        (f"validation/{unit}", "validation", ORANGE),
    )
    return _Panel(in_words(unit), lines)


_PANELS = (
    _Panel(
        "boundaries per symbol",
        (("train/boundary_rate", "training", BLUE), ("validation/boundary_rate", "validation", ORANGE)),
        has_target=True,
    ),
    _Panel(
        "nats per decision",
        (("train/neg_log_prob", "−log π of the decisions drawn", BLUE), ("train/entropy", "entropy of π", ORANGE)),
    ),
    _Panel(
        "gradient norm",
        (("train/grad_norm_lm", "language model", BLUE), ("train/grad_norm_policy", "policy", ORANGE)),
        log=True,
    ),
)


def draw_curves(
    metrics: Mapping[str, figures.Curve],
    path: Path,
    *,
    title: str,
    target_rate: Rate | None = None,
    unit: str = "bits_per_byte",
) -> Path:
    """Draw loss, boundary rate, decision entropy and gradient norms against training symbols.

    Curves under ``train/`` are drawn faintly with their running mean on top, those under ``validation/`` as points
    joined by lines. A panel without metrics says so. Values which are not finite, or 1e100 and more, are left out, and
    so are those which a logarithmic axis cannot show.

    Args:
        metrics: curves by name: numbers of training symbols, and as many values; names of no panel are ignored.
        path: PNG file in an existing folder; it is replaced atomically.
        title: title of the figure, without markup.
        target_rate: target boundaries per symbol, drawn as a dashed line; for a range its mean.
        unit: unit of the losses, as in the names of their metrics.

    Returns:
        ``path``.

    Raises:
        ValueError: if ``metrics`` is empty, or the two sequences of a metric differ in length.
        OSError: if the file cannot be written.
    """
    if not metrics:
        raise ValueError("no metrics to draw")
    for name, (x, y) in metrics.items():
        if len(x) != len(y):
            raise ValueError(f"metric {name}: {len(x)} positions but {len(y)} values")

    figure = figures.titled_figure(12, 8, dpi=120, title=title)
    for axes, panel in zip(figure.subplots(2, 2).flat, (_loss_panel(unit), *_PANELS), strict=True):
        _draw_panel(axes, panel, metrics, target_rate)

    return figures.save_png(figure, path)


def _draw_panel(axes: Axes, panel: _Panel, metrics: Mapping[str, figures.Curve], target_rate: Rate | None) -> None:
    drawn = [
        figures.draw_curve(
            axes, metrics[key], label=label, colour=colour, log=panel.log, sparse=key.startswith("validation/")
        )
        for key, label, colour in panel.lines
        if key in metrics
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
        label = f"{'mean of targets' if isinstance(target_rate, RateRange) else 'target'} {target_rate:g}"
        axes.axhline(mean_rate(target_rate), color="0.25", linestyle="--", linewidth=1, label=label)
    if panel.log:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    # The legend is above the panel: inside it may hide a curve, and matplotlib's search for the best place is slow.
    _add_grid(axes)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")


def _add_grid(axes: Axes) -> None:
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_patches(excerpts: Sequence[SeriesExcerpt], path: Path, *, title: str, context: int = 0) -> Path:
    """Draw series with their patches as alternating bands, and the boundary probabilities below.

    Args:
        excerpts: series, from top to bottom.
        path: PNG file in an existing folder; it is replaced atomically.
        title: title of the figure, without markup.
        context: number of leading steps which are not predicted.

    Returns:
        ``path``.

    Raises:
        ValueError: if there is no series.
        OSError: if the file cannot be written.
    """
    if not excerpts:
        raise ValueError("no series to draw")
    figure = figures.titled_figure(13, 0.9 + 2.9 * len(excerpts), dpi=110, title=title)
    handles = draw_windows(figure, excerpts, context)
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    return figures.save_png(figure, path)


def draw_windows(figure: Figure, excerpts: Sequence[SeriesExcerpt], context: int) -> list[Patch | Line2D]:
    """Fill an empty figure with series, from top to bottom, each above its boundary probabilities.

    Args:
        figure: empty figure.
        excerpts: at least one series; its name is its title.
        context: number of leading steps which are not predicted.

    Returns:
        The handles of the legend.
    """
    axes = figure.subplots(2 * len(excerpts), 1, height_ratios=[3, 1] * len(excerpts), squeeze=False)[:, 0]
    longest = max(len(excerpt.value) for excerpt in excerpts)
    for excerpt, above, below in zip(excerpts, axes[::2], axes[1::2], strict=True):
        value_NC = np.array(excerpt.value, dtype=float)  # None becomes NaN
        figures.draw_values(above, value_NC, excerpt.action, title=excerpt.name, context=context, gold_N=excerpt.gold)
        figures.draw_probabilities(below, excerpt.boundary_prob)
    for each in axes:  # all share the axis below the last
        each.set_xlim(-0.5, longest - 0.5)
        each.tick_params(labelbottom=each is axes[-1])
    axes[-1].set_xlabel("step")
    return figures.legend_handles(context=context > 0, gold=any(excerpt.gold is not None for excerpt in excerpts))


STYLES = {CONDITIONED: "o-", CALIBRATED: "s--", ENTROPY_WEIGHTED: "^:"}


def rates_table(points: Sequence[RatePoint], *, unit: str, title: str) -> Table:
    """Return a table with a row for each point.

    Args:
        points: at least one point.
        unit: unit of the losses.
        title: title of the table, without markup.
    """
    names = ["target", "drawn", f"{in_words(unit)} ±", "FLOPs/symbol", "bias"]
    weighted = any(point.difference is not None for point in points)
    right = [Column(name, justify="right") for name in [*names, *(["difference ±"] if weighted else [])]]
    table = Table("run", "way", *right, title=Text(escape(title)), title_justify="left")
    for point in points:
        differences = [""] * weighted
        if point.difference is not None:
            differences = [with_error(point.difference, point.difference_error, "+.4f")]
        table.add_row(
            Text(escape(point.run)),
            _describe_way(point),
            f"{point.target_rate:.3f}",
            f"{point.boundary_rate:.4f}",
            with_error(point.loss, point.standard_error),
            f"{point.flops:,.0f}",
            "" if point.way == CONDITIONED else f"{point.logit_bias:+.3f}",
            *differences,
        )
    return table


def _describe_way(point: RatePoint) -> str:
    return f"{point.way}, {point.entropy_weight:g} a nat" if point.way == ENTROPY_WEIGHTED else point.way


def write_rates(points: Sequence[RatePoint], path: Path) -> Path:
    """Write points as a CSV file in an existing folder."""
    return write_csv(path, list(asdict(points[0])), [list(asdict(point).values()) for point in points])


def draw_rates(points: Sequence[RatePoint], path: Path, *, unit: str, title: str, trained: Rate | None = None) -> Path:
    """Draw the loss against FLOPs per symbol, and drawn rates against target rates.

    Args:
        points: at least one point.
        path: PNG file in an existing folder; it is replaced atomically.
        unit: unit of the losses.
        title: title of the figure, without markup.
        trained: rates for which the first model was trained.

    Raises:
        OSError: if the file cannot be written.
    """
    figure = figures.titled_figure(11, 4.4, dpi=120, title=title)
    left, right = figure.subplots(1, 2)
    several_runs = len({point.run for point in points}) > 1
    colours = list(dict.fromkeys((point.run, point.entropy_weight) for point in points))
    for run, way, weight in dict.fromkeys((point.run, point.way, point.entropy_weight) for point in points):
        line = [p for p in points if (p.run, p.way, p.entropy_weight) == (run, way, weight)]
        line.sort(key=lambda point: point.boundary_rate)
        name = _describe_way(line[0])
        look: dict[str, Any] = {
            "color": LINES[colours.index((run, weight)) % len(LINES)],
            "label": f"{figures.short(run)} {name}" if several_runs else name,
            "markersize": 4,
            "linewidth": 1.2,
        }
        losses, errors = [point.loss for point in line], [point.standard_error for point in line]
        left.errorbar([p.flops for p in line], losses, errors, fmt=STYLES[way], elinewidth=0.4, **look)
        right.plot([p.target_rate for p in line], [p.boundary_rate for p in line], STYLES[way], **look)
        for p in line if not several_runs and way == points[0].way else ():
            place = {"xytext": (4, 5), "textcoords": "offset points", "fontsize": "x-small"}
            left.annotate(f"{p.boundary_rate:.2f}", (p.flops, p.loss), **place)
    left.set(xlabel="FLOPs per symbol, forward", ylabel=in_words(unit))
    right.set(xlabel="target: boundaries per symbol", ylabel="drawn")
    ends = min(p.target_rate for p in points), max(p.target_rate for p in points)
    right.plot(ends, ends, color="0.5", linestyle="--", linewidth=1, label="target = drawn")
    if isinstance(trained, RateRange):
        right.axvspan(trained.min, trained.max, color="0.94", zorder=0, label="trained for")
    elif trained is not None:
        right.axvline(trained, color="0.8", linewidth=4, zorder=0, label="trained for")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        _add_grid(axes)
        axes.legend(frameon=False, fontsize="small")
    return figures.save_png(figure, path)
