"""Aggregate a comparison for its pictures, page and tables: order, wording, bands of curves, line styles."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tokenv.compare.comparison import UNEQUAL, ComparedMethod, ComparedRun, Comparison
from tokenv.compare.robust_statistics import Interval
from tokenv.plotting.characters import Character, characters, escape_line
from tokenv.plotting.figures import (
    Curve,
    Picture,
    draw_both,
    drawable,
    legend_below,
    legend_columns,
    running_mean,
    short,
)
from tokenv.plotting.theme import LINES, MARKERS, colour_ends

_SMOOTHING = 25  # a curve's length over the span of its running mean
_MAX_NAMES = 3  # methods named in a sentence


class Band(NamedTuple):
    """Mean of a curve over seeds, with the lowest and the highest seed; arrays of one length."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def format_number(value: float, form: str = ".4f") -> str:
    """Return a value for people; a dash for one which is not finite."""
    if not math.isfinite(value):
        return "–"
    return format(value, form).replace("e+0", "e").replace("e+", "e").replace("-", "−")


def format_with_error(value: float, error: float) -> str:
    """Return a value and its standard error for people."""
    return f"{format_number(value)} ± {format_number(error)}"


def format_interval(interval: Interval, form: str = ".4f") -> str:
    """Return a value and its 95% interval for people."""
    ends = "–"
    if math.isfinite(interval.low):
        ends = " to ".join(format_number(end, form) for end in interval[1:])
    return f"{format_number(interval.value, form)} ({ends})"


def sort_methods(comparison: Comparison) -> list[ComparedMethod]:
    """Return the methods by loss, best first, unknown ones last."""
    return sorted(comparison.methods, key=lambda m: (math.isnan(m.loss), m.loss))


def join_names(names: Sequence[str]) -> str:
    """Return names as an enumeration in a sentence."""
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def describe_target_rates(comparison: Comparison) -> str:
    """Return the target rates of the methods for people."""
    return join_names([f"{rate:g}" for rate in comparison.target_rates])


def describe_result(comparison: Comparison) -> list[str]:
    """Return two or three sentences: which method is best, and how certain that is."""
    best, *others = sort_methods(comparison)
    value = format_number(best.loss)
    unit = comparison.unit_in_words
    if math.isfinite(best.seed_error):
        value = f"{format_with_error(best.loss, best.seed_error)} (standard error over {len(best.runs)} seeds)"
    if not others:
        return [
            f"One method alone, {escape_line(best.name)}: {value} {unit}. There is nothing to compare it with."
        ]
    ratio = _describe_flops_ratio(comparison, best.name)
    sentences = [f"{escape_line(best.name)} has the lowest {unit}: {value}{ratio}."]
    pairs = comparison.both_ways
    known = [
        (escape_line(m.name), pairs[m.name, best.name])
        for m in others
        if (m.name, best.name) in pairs
    ]
    tied = [
        f"{name} ({format_number(d.mean, '+.4f')})"
        for name, d in known
        if d.verdict == "not separable"
    ]
    worse = [(name, d) for name, d in known if d.verdict == "worse"]
    if tied:
        sentences.append(f"Not separable from it at 95%: {join_names(tied)}.")
    if worse:
        if len(worse) <= _MAX_NAMES:
            names = join_names([name for name, _ in worse])
        else:
            names = f"{len(worse)} others"
        least = format_number(min(difference.mean for _, difference in worse)) + (
            " or more" if len(worse) > 1 else ""
        )
        sentences.append(
            f"At 95%{_describe_correction(comparison)} it is better than {names} (difference: {least})."
        )
    sentences += _describe_tests(comparison)
    sentences += _describe_compute(comparison)
    if not tied and not worse:
        sentences.append(
            "It was not compared with the others, so the certainty of this is unknown."
        )
    if ahead := find_look_ahead(comparison):
        if len(ahead) == 1:
            verb = "reads"
        else:
            verb = "read"
        sentences.append(
            f"{join_names(ahead)} {verb} ahead: such {comparison.unit_in_words} are not a causal model's."
        )
    if any(len(method.runs) == 1 for method in comparison.methods):
        sentences.append(
            "Methods with a single seed are separable from no other: how much another would change is unknown."
        )
    return sentences


class LossesAtFlops(NamedTuple):
    """Losses of the methods' trainings at the FLOPs of the cheapest run, and the metric which they are of."""

    flops: float
    metric: str
    losses: Mapping[str, float]


def find_losses_at_equal_flops(comparison: Comparison) -> LossesAtFlops | None:
    """Return every method's mean loss at the smallest FLOPs of a run, between the points of its curves.

    Where the training goes on after that, its learning rate is still high there: a training of this length would have
    reached less.

    Returns:
        None if FLOPs are equal, or no curve of all runs begins before these FLOPs.
    """
    if comparison.equal_flops:
        return None
    unit = comparison.unit
    flops = float(comparison.runs.flops.min())
    for metric in (f"calibrated/{unit}", f"validation/{unit}", f"train/{unit}"):
        losses = {}
        for method in comparison.methods:
            losses[method.name] = float(
                np.mean([_loss_at_flops(run, metric, flops) for run in method.runs])
            )
        if all(math.isfinite(loss) for loss in losses.values()):
            return LossesAtFlops(flops, metric, losses)
    return None


def _loss_at_flops(run: ComparedRun, metric: str, flops: float) -> float:
    """Return the value of a curve at these FLOPs; NaN where it begins later or has no point."""
    curve = run.history.get(metric, ((), ()))
    if metric.startswith("train/"):
        curve = _smooth(curve)
    symbols, losses = _clean(curve)
    spent = run.history.get("train/flops", ((), ()))
    if not len(symbols) or not len(_clean(spent)[0]):
        return math.nan
    return float(np.interp(flops, interpolate_flops(symbols, spent), losses, left=math.nan))


def _describe_compute(comparison: Comparison) -> list[str]:
    """Return a warning if FLOPs are not equal, with the losses at the smallest ones; nothing if they are."""
    if comparison.equal_flops:
        return []
    spent = comparison.means.flops.sort_values()
    ends = [
        f"{format_number(spent[name], '.3g')} ({escape_line(name)})"
        for name in (spent.index[0], spent.index[-1])
    ]
    limit = format_number(100 * UNEQUAL, ".0f")
    warning = f"Warning: FLOPs differ by more than {limit}%, from {ends[0]} to {ends[1]}; no verdict accounts for that."
    at_equal = find_losses_at_equal_flops(comparison)
    if at_equal is None:
        return [warning]
    first, *others = sorted(at_equal.losses, key=at_equal.losses.__getitem__)
    gap = format_number(at_equal.losses[others[0]] - at_equal.losses[first])
    return [
        warning,
        f"With {format_number(at_equal.flops, '.3g')} FLOPs each, {escape_line(first)} was lowest, {gap} below "
        f"{escape_line(others[0])} ({at_equal.metric}, interpolated; longer schedules were not finished there).",
    ]


def _describe_flops_ratio(comparison: Comparison, name: str) -> str:
    """Return how the FLOPs of a method compare with those of the others; empty if all are equal."""
    if comparison.equal_flops:
        return ""
    spent = comparison.means.flops
    ratios = sorted(
        (float(spent[name] / spent[other]), other) for other in spent.index if other != name
    )
    texts = [
        f"{format_number(ratio, '.2f')} times the FLOPs of {escape_line(other)}"
        for ratio, other in ratios
    ]
    return ", with " + " to ".join(dict.fromkeys((texts[0], texts[-1])))


def _describe_correction(comparison: Comparison) -> str:
    """Name the correction for the number of pairs; return nothing if it was not made for all of them."""
    pairs = sum(math.isfinite(difference.p_holm) for difference in comparison.differences.values())
    if pairs < 2 or find_reference(comparison):
        return ""
    return f", after Holm's correction for {pairs} pairs,"


def find_look_ahead(comparison: Comparison) -> list[str]:
    """Return the names of the methods which read ahead, escaped."""
    return [escape_line(method.name) for method in comparison.methods if method.reads_ahead]


def find_reference(comparison: Comparison) -> str:
    """Return the method whose pairs alone Holm's correction counts; empty if it counts all."""
    counted = [
        set(pair) for pair, each in comparison.differences.items() if math.isfinite(each.p_holm)
    ]
    if 1 < len(counted) < len(comparison.differences):
        common = set.intersection(*counted)
    else:
        common = set()
    if len(common) == 1:
        return common.pop()
    return ""


def _describe_tests(comparison: Comparison) -> list[str]:
    """Return a sentence on the methods which are better and worse than the reference, if there is one."""
    name = find_reference(comparison)
    if not name:
        return []
    pairs = comparison.both_ways
    tested = [
        (m.name, pairs[m.name, name]) for m in sort_methods(comparison) if (m.name, name) in pairs
    ]
    sides = []
    for verdict in ("better", "worse"):
        names = [escape_line(other) for other, d in tested if d.verdict == verdict]
        verb = "is"
        if len(names) > 1:
            verb = "are"
        sides.append(f"{join_names(names or ['none'])} {verb} {verdict}")
    return [
        f"Against {escape_line(name)}, after Holm's correction for {len(tested)} pairs: {'; '.join(sides)}."
    ]


def rank_by_seed(comparison: Comparison) -> pd.DataFrame:
    """Return the rank of every method among all, [method, seed], 1 being the lowest loss; equal losses share theirs.

    Only seeds which all methods have are counted.
    """
    losses = comparison.runs.pivot(index="method", columns="seed", values="loss")
    return losses.loc[[method.name for method in comparison.methods]].dropna(axis=1).rank()


def _clean(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    x = np.asarray(curve[0], dtype=float)
    y = np.asarray(curve[1], dtype=float)
    known = drawable(x, y)
    return x[known], y[known]


def _smooth(curve: Curve) -> Curve:
    """Return the running mean of a curve; a short curve as it is."""
    span = len(curve[1]) // _SMOOTHING
    if span < 2:
        return curve
    return (curve[0], running_mean(np.asarray(curve[1], dtype=float), span).tolist())


def interpolate_flops(positions: Sequence[float] | np.ndarray, flops: Curve) -> np.ndarray:
    """Return the FLOPs spent when so many training symbols were read.

    Args:
        positions: training symbols.
        flops: training symbols and all FLOPs spent until then, ascending.

    Returns:
        FLOPs: interpolated from the origin on, and in proportion to the symbols beyond the last known ones.
    """
    at, spent = _clean(flops)
    where = np.asarray(positions, dtype=float)
    inside = np.interp(where, np.append(0.0, at), np.append(0.0, spent))
    return np.where(where > at[-1], where * (spent[-1] / max(at[-1], 1.0)), inside)


def average_curves(curves: Sequence[Curve]) -> Band | None:
    """Return mean, lowest and highest of one curve a seed, where all of them are known.

    Args:
        curves: positions, ascending, and values; positions may differ from seed to seed.

    Returns:
        The band at the first curve's positions; None if there is nothing finite which all seeds share.
    """
    cleaned = [(x, y) for x, y in map(_clean, curves) if len(x)]
    if not cleaned:
        return None
    start = max(x[0] for x, _ in cleaned)
    end = min(x[-1] for x, _ in cleaned)
    grid = cleaned[0][0]
    grid = grid[(grid >= start) & (grid <= end)]
    if not len(grid):
        return None
    values = np.stack([np.interp(grid, x, y) for x, y in cleaned])
    return Band(grid, values.mean(0), values.min(0), values.max(0))


def compute_band(method: ComparedMethod, metric: str, by_flops: bool = False) -> Band | None:
    """Return a metric's band over the method's seeds; training metrics are smoothed.

    Args:
        method: method whose runs are read; runs without the metric are left out.
        metric: key of the runs' histories.
        by_flops: whether positions are FLOPs, their mean over the seeds, instead of training symbols.
    """
    curves = [run.history.get(metric, ((), ())) for run in method.runs]
    if metric.startswith("train/"):
        curves = [_smooth(curve) for curve in curves]
    band = average_curves(curves)
    if band is None or not by_flops:
        return band
    spent = [run.history.get("train/flops", ((), ())) for run in method.runs]
    flops = [interpolate_flops(band.x, curve) for curve in spent if len(_clean(curve)[0])]
    if flops:
        return band._replace(x=np.mean(flops, axis=0))
    return None


def choose_loss_metric(comparison: Comparison) -> str:
    """Return the loss to draw: the validation's, unless more methods have a curve of the training's."""

    def has_curve(method: ComparedMethod, metric: str) -> bool:
        return any(len(run.history.get(metric, ((),))[0]) > 1 for run in method.runs)

    def count_methods(metric: str) -> int:
        return sum(has_curve(method, metric) for method in comparison.methods)

    return max(f"validation/{comparison.unit}", f"train/{comparison.unit}", key=count_methods)


def compute_length_shares(comparison: Comparison, method: str) -> np.ndarray:
    """Return the share of tokens by length, mean over seeds; empty if no run has tokens.

    Entry l - 1 is the share of tokens of l symbols, the last one that of all longer ones, too.
    """
    runs = comparison.runs
    shares = runs[runs.method == method].filter(regex=r"^length \d+$").dropna(how="all")
    if shares.size:
        return shares.fillna(0.0).to_numpy().mean(0)
    return np.zeros(0)


def list_passages(method: ComparedMethod) -> list[list[Character]]:
    """Return the passages with the boundaries of the method's first seed."""
    passages = []
    for passage in method.runs[0].evaluation.passages:
        boundary = list(map(bool, passage.action))
        passages.append(characters(passage.text.encode("latin-1"), passage.boundary_prob, boundary))
    return passages


def compute_colour_scale(comparison: Comparison) -> tuple[float, float]:
    """Return the ends of the colour scale of all passages: the range used by methods which are not always certain.

    Returns:
        1st and 99th percentile of the probabilities other than 0 and 1; all of [0, 1] if there are none or if they
        are alike.
    """
    uncertain = []
    for method in comparison.methods:
        for character in itertools.chain.from_iterable(list_passages(method)):
            if 0 < character.probability < 1:
                uncertain.append(character.probability)
    return colour_ends(uncertain)


_DASHES = ("solid", "dashed", "dotted", "dashdot")


class Style(NamedTuple):
    """Style of a method's lines: colour as ``#rrggbb``, line style by its CSS-like name, marker."""

    colour: str
    line: str
    marker: str


def assign_styles(comparison: Comparison) -> dict[str, Style]:
    """Return the style of each method in all pictures, by its position in the comparison."""
    return {
        method.name: Style(
            LINES[i % len(LINES)],
            _DASHES[i // len(LINES) % len(_DASHES)],
            MARKERS[i % len(MARKERS)],
        )
        for i, method in enumerate(comparison.methods)
    }


def label_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label one row a name, the first on top."""
    axes.set_yticks(range(len(names)), [short(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def draw_lines(
    comparison: Comparison,
    name: str,
    caption: str,
    curves: Mapping[str, Band],
    finish: Callable[[Axes], None],
) -> Picture:
    """Draw lines with bands, one a method, and a legend.

    Args:
        comparison: comparison of all methods.
        name: name of the picture.
        caption: caption of the picture.
        curves: method to its band; at least one.
        finish: function which sets the axes' labels, limits and formats.
    """
    names = [short(method) for method in curves]
    styles = assign_styles(comparison)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        handles = []
        for method, band in curves.items():
            style = styles[method]
            each = max(1, len(band.x) // 8)
            # Markers of different methods are at different positions, or they would hide one another.
            first = list(styles).index(method) * each // len(styles)
            axes.fill_between(band.x, band.low, band.high, color=style.colour, alpha=0.15, lw=0)
            handles += axes.plot(
                band.x,
                band.mean,
                color=style.colour,
                ls=style.line,
                marker=style.marker,
                markevery=(first, each),
            )
        finish(axes)
        legend_below(figure, handles, names)

    rows = math.ceil(len(names) / legend_columns(names))
    return draw_both(name, caption, 3.6 + 0.19 * rows, draw)
