"""Report a run: training curves, and a table and a picture of several rates."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, LogFormatter
from rich.table import Column, Table
from rich.text import Text

from tokenv.core.rates import Rate, RateRange, mean_rate
from tokenv.evaluation.calibration import CALIBRATED, CONDITIONED, ENTROPY_WEIGHTED, RatePoint
from tokenv.plotting import figures
from tokenv.plotting.characters import escape
from tokenv.plotting.console import write_csv
from tokenv.plotting.theme import AMBER, BLUE, GREEN, LINES, ORANGE, PINK, in_words, with_error


class _Panel(NamedTuple):
    ylabel: str
    lines: tuple[tuple[str, str, str], ...]  # key, label and colour
    log: bool = False
    has_target: bool = False


_PANELS = (
    _Panel(
        "boundaries per symbol",
        (
            ("train/boundary_rate", "training", BLUE),
            ("validation/boundary_rate", "validation", ORANGE),
        ),
        has_target=True,
    ),
    _Panel(
        "nats per decision",
        (
            ("train/neg_log_prob", "−log π of the decisions drawn", BLUE),
            ("train/entropy", "entropy of π", ORANGE),
        ),
    ),
    _Panel(
        "gradient norm",
        (
            ("train/grad_norm_lm", "language model", BLUE),
            ("train/grad_norm_policy", "policy", ORANGE),
        ),
        log=True,
    ),
)
# Left out where none of their metrics is recorded.
_BOUNDARY_PANELS = (
    _Panel(
        "boundary enrichment",
        (
            ("train/boundary_enrichment", "training", BLUE),
            ("train/boundary_enrichment_early", "early exit", GREEN),
        ),
    ),
    _Panel(
        "agreement of the boundaries",
        (
            ("validation/whitespace_precision", "precision, whitespace", BLUE),
            ("validation/whitespace_f1", "F1, whitespace", GREEN),
            ("validation/bpe_precision", "precision, BPE", ORANGE),
            ("validation/bpe_f1", "F1, BPE", PINK),
        ),
    ),
    _Panel(
        "boundaries per symbol",
        (
            ("validation/boundary_rate_space", "space", BLUE),
            ("validation/boundary_rate_line_break", "line break", ORANGE),
            ("validation/boundary_rate_letter", "letter", GREEN),
            ("validation/boundary_rate_digit", "digit", PINK),
            ("validation/boundary_rate_punctuation", "punctuation", AMBER),
        ),
    ),
    _Panel(
        "enrichment ratio",
        (("validation/enrichment_ratio", "validation", ORANGE),),
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
    """Draw loss, boundary rate, decision entropy, gradient norms and metrics of the boundaries over training.

    Curves under ``train/`` are drawn faintly with their running mean on top, those under ``validation/`` as points
    joined by lines. One of the first four panels without metrics says so; others are left out. Values which are not
    finite, or 1e100 and more, are left out, and so are those which a logarithmic axis cannot show.

    Args:
        metrics: curves by name: numbers of training symbols, and as many values; names of no panel are ignored.
        path: PNG file in an existing folder; it is replaced atomically.
        title: title of the figure, without markup; none if it is empty.
        target_rate: target boundaries per symbol, drawn as a dashed line; for a range its mean.
        unit: unit of the losses, as in the names of their metrics.

    Returns:
        ``path``.

    Raises:
        OSError: if the file cannot be written.
    """
    losses = (
        (f"train/{unit}", "training", BLUE),
        (f"train/{unit}_early", "early exit", GREEN),
        (f"validation/{unit}", "validation", ORANGE),
    )
    panels = [_Panel(in_words(unit), losses), *_PANELS]
    for panel in _BOUNDARY_PANELS:
        if any(name in metrics for name, _, _ in panel.lines):
            panels.append(panel)
    rows = math.ceil(len(panels) / 2)

    def draw(figure: Figure) -> None:
        for number, panel in enumerate(panels, 1):
            axes = figure.add_subplot(rows, 2, number)
            _draw_panel(axes, panel, metrics, target_rate)

    return figures.draw_picture(path, 2.4 * rows, title, draw)


def _draw_panel(
    axes: Axes, panel: _Panel, metrics: Mapping[str, figures.Curve], target_rate: Rate | None
) -> None:
    recorded = [line for line in panel.lines if line[0] in metrics]
    drawn = False
    for key, label, colour in recorded:
        sparse = key.startswith("validation/")
        drawn |= figures.draw_curve(
            axes, metrics[key], label=label, colour=colour, log=panel.log, sparse=sparse
        )
    axes.set(xlabel="training symbols", ylabel=panel.ylabel)
    if not drawn:
        message = "nothing finite to draw" if recorded else "not recorded"
        axes.text(
            0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="0.4"
        )
        axes.set(xticks=[], yticks=[])
        return
    if panel.has_target and target_rate is not None:
        name = "mean of targets" if isinstance(target_rate, RateRange) else "target"
        rate = mean_rate(target_rate)
        axes.axhline(
            rate, color="0.25", linestyle="--", linewidth=1, label=f"{name} {target_rate:g}"
        )
    if panel.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    # The legend is above the panel: inside it may hide a curve, and matplotlib's search for the best place is slow.
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), borderaxespad=0.1)


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
    right = [
        Column(name, justify="right") for name in [*names, *(["difference ±"] if weighted else [])]
    ]
    table = Table("run", "way", *right, title=Text(escape(title)), title_justify="left")
    for point in points:
        differences = [""] * weighted
        if point.difference is not None:
            differences = [with_error(point.difference, point.difference_error, "+.4f")]
        bias = "" if point.way == CONDITIONED else f"{point.logit_bias:+.3f}"
        table.add_row(
            Text(escape(point.run)),
            _describe_way(point),
            f"{point.target_rate:.3f}",
            f"{point.boundary_rate:.4f}",
            with_error(point.loss, point.standard_error),
            f"{point.flops:,.0f}",
            bias,
            *differences,
        )
    return table


def _describe_way(point: RatePoint) -> str:
    if point.way == ENTROPY_WEIGHTED:
        return f"{point.way}, {point.entropy_weight:g} a nat"
    return point.way


def write_rates(points: Sequence[RatePoint], path: Path) -> Path:
    """Write points as a CSV file in an existing folder."""
    return write_csv(
        path, list(asdict(points[0])), [list(asdict(point).values()) for point in points]
    )


def draw_rates(
    points: Sequence[RatePoint], path: Path, *, unit: str, title: str, trained: Rate | None = None
) -> Path:
    """Draw the loss against FLOPs per symbol, and drawn rates against target rates.

    Args:
        points: at least one point.
        path: PNG file in an existing folder; it is replaced atomically.
        unit: unit of the losses.
        title: title of the figure, without markup; none if it is empty.
        trained: rates for which the first model was trained.

    Raises:
        OSError: if the file cannot be written.
    """
    several_runs = len({point.run for point in points}) > 1
    lines: dict[Any, list[RatePoint]] = {}
    for point in points:
        lines.setdefault((point.run, point.way, point.entropy_weight), []).append(point)
    colours = list(dict.fromkeys((run, weight) for run, _, weight in lines))

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        entries = {}
        for (run, way, weight), unsorted in lines.items():
            line = sorted(unsorted, key=lambda point: point.boundary_rate)
            name = _describe_way(line[0])
            if several_runs:
                name = f"{figures.short(run)} {name}"
            colour = LINES[colours.index((run, weight)) % len(LINES)]
            losses = [point.loss for point in line]
            errors = [point.standard_error for point in line]
            flops = [point.flops for point in line]
            look: dict[str, Any] = {"color": colour, "markersize": 4, "linewidth": 1.2}
            entries[name] = left.errorbar(
                flops, losses, errors, fmt=STYLES[way], elinewidth=0.6, **look
            )
            right.plot(
                [p.target_rate for p in line], [p.boundary_rate for p in line], STYLES[way], **look
            )
            if not several_runs and way == points[0].way:
                _label_rates(left, line)
        left.set(xlabel="FLOPs per symbol, forward", ylabel=in_words(unit))
        left.xaxis.set_major_formatter(EngFormatter(sep=""))
        right.set(xlabel="target: boundaries per symbol", ylabel="drawn")
        targets = [point.target_rate for point in points]
        ends = (min(targets), max(targets))
        (entries["target = drawn"],) = right.plot(
            ends, ends, color="0.5", linestyle="--", linewidth=1
        )
        if isinstance(trained, RateRange):
            entries["trained for"] = right.axvspan(trained.min, trained.max, color="0.94", zorder=0)
        elif trained is not None:
            entries["trained for"] = right.axvline(trained, color="0.8", linewidth=4, zorder=0)
        figures.legend_below(figure, list(entries.values()), list(entries))

    return figures.draw_picture(path, 3.4, title, draw)


def _label_rates(axes: Axes, line: Sequence[RatePoint]) -> None:
    """Write the drawn rates beside their points."""
    for point in line:
        place = (point.flops, point.loss)
        axes.annotate(
            f"{point.boundary_rate:.2f}",
            place,
            xytext=(4, 5),
            textcoords="offset points",
            fontsize="x-small",
        )
