"""Aggregate a comparison for its pictures, page and tables: order, means, wording, line styles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import rankdata

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.run_evaluation import Agreement
from tokenv.compare.significance import Difference
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

_SMOOTHING = 25  # a running mean spans one part in so many of its curve
_NAMED = 3  # methods that a sentence names


class Band(NamedTuple):
    """A curve's mean over seeds, with the lowest and the highest seed; arrays of one length."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def number(value: float, form: str = ".4f") -> str:
    """A value for people; a dash where there is none."""
    if not math.isfinite(value):
        return "–"
    return format(value, form).replace("e+0", "e").replace("e+", "e").replace("-", "−")


def with_error(value: float, error: float) -> str:
    """A value and its standard error for people."""
    return f"{number(value)} ± {number(error)}"


def mean(values: Iterable[float]) -> float:
    """Mean of the finite ones, NaN without any."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def targets(comparison: Comparison) -> str:
    """The rates that methods aim at, for people."""
    return _listed([f"{rate:g}" for rate in comparison.target_rates])


def ranked(comparison: Comparison) -> list[ComparedMethod]:
    """The methods by loss, best first, unknown ones last."""
    return sorted(comparison.methods, key=lambda m: (math.isnan(m.loss), m.loss))


def oriented(comparison: Comparison) -> dict[tuple[str, str], Difference]:
    """Every pair from both sides: (first, second) to the first's loss minus the second's."""
    turned = {(second, first): -difference for (first, second), difference in comparison.differences.items()}
    return {**comparison.differences, **turned}


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def conclusion(comparison: Comparison) -> list[str]:
    """Two or three sentences: which method is best, and how sure that is."""
    best, *others = ranked(comparison)
    value, unit = number(best.loss), comparison.unit_in_words
    if math.isfinite(best.seed_error):
        value = f"{with_error(best.loss, best.seed_error)} (standard error over {len(best.runs)} seeds)"
    if not others:
        return [f"One method alone, {escape_line(best.name)}: {value} {unit}. There is nothing to compare it with."]
    said = [f"{escape_line(best.name)} has the lowest {unit}: {value}."]
    pairs = oriented(comparison)
    seen = [(other, pairs.get((other.name, best.name))) for other in others]
    tied = [f"{escape_line(m.name)} ({number(d.mean, '+.4f')})" for m, d in seen if d and d.verdict == "not separable"]
    worse = [(m, d) for m, d in seen if d and d.verdict == "worse"]
    if tied:
        said.append(f"Not separable from it at 95%: {_listed(tied)}.")
    if worse:
        which = _listed([escape_line(m.name) for m, _ in worse]) if len(worse) <= _NAMED else f"{len(worse)} others"
        least = number(min(difference.mean for _, difference in worse)) + (" or more" if len(worse) > 1 else "")
        said.append(f"At 95%{_corrected(comparison)} it is better than {which} (difference: {least}).")
    said += _tested(comparison)
    if not tied and not worse:
        said.append("It was not held against the others, so how sure that is cannot be told.")
    if any(len(method.runs) == 1 for method in comparison.methods):
        said.append("Methods with a single seed are separable from no other: how much another would change is unknown.")
    return said


def ranks(comparison: Comparison) -> dict[str, list[float]]:
    """Place of every method among all, seed by seed, 1 being the lowest loss and ties sharing theirs.

    Only seeds that all methods have count; empty without any.
    """
    losses = {method.name: {run.seed: run.loss for run in method.runs} for method in comparison.methods}
    seeds = sorted(set.intersection(*(set(of) for of in losses.values())))
    if not seeds:
        return {}
    rank_MS = rankdata([[of[seed] for seed in seeds] for of in losses.values()], axis=0)
    return {name: row.tolist() for name, row in zip(losses, rank_MS, strict=True)}


def _corrected(comparison: Comparison) -> str:
    """Name the correction for the number of pairs; empty where it was not made for all of them."""
    pairs = sum(math.isfinite(difference.p_holm) for difference in comparison.differences.values())
    if pairs < 2 or _against(comparison):
        return ""
    return f", after Holm's correction for {pairs} pairs,"


def _against(comparison: Comparison) -> str:
    """The method whose pairs alone Holm's correction counts; empty where it counts all."""
    counted = [set(pair) for pair, found in comparison.differences.items() if math.isfinite(found.p_holm)]
    common = set.intersection(*counted) if 1 < len(counted) < len(comparison.differences) else set()
    return common.pop() if len(common) == 1 else ""


def _tested(comparison: Comparison) -> list[str]:
    """A sentence on who is better and worse than the method that all others were tested against, if there is one."""
    name = _against(comparison)
    if not name:
        return []
    pairs = oriented(comparison)
    tested = [(method, pairs[method.name, name]) for method in ranked(comparison) if (method.name, name) in pairs]
    sides = []
    for verdict in ("better", "worse"):
        left = [escape_line(m.name) for m, d in tested if d.verdict == verdict]
        sides.append(f"{_listed(left) if left else 'none'} {'are' if len(left) > 1 else 'is'} {verdict}")
    return [f"Against {escape_line(name)}, after Holm's correction for {len(tested)} pairs: {'; '.join(sides)}."]


def _clean(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(curve[0], dtype=float), np.asarray(curve[1], dtype=float)
    known = drawable(x, y)
    return x[known], y[known]


def smoothed(curve: Curve) -> Curve:
    """The curve's running mean; a short curve as it is."""
    span = len(curve[1]) // _SMOOTHING
    return curve if span < 2 else (curve[0], running_mean(np.asarray(curve[1], dtype=float), span).tolist())


def to_flops(positions: Sequence[float] | np.ndarray, flops: Curve) -> np.ndarray:
    """FLOPs spent when so many training symbols were seen.

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


def seed_band(curves: Sequence[Curve]) -> Band | None:
    """Mean, lowest and highest of one curve a seed, where all of them are known.

    Args:
        curves: positions, ascending, and values; positions may differ from seed to seed.

    Returns:
        The band at the first curve's positions; None if there is nothing finite that all seeds share.
    """
    cleaned = [(x, y) for x, y in map(_clean, curves) if len(x)]
    if not cleaned:
        return None
    start, end = max(x[0] for x, _ in cleaned), min(x[-1] for x, _ in cleaned)
    grid = cleaned[0][0]
    grid = grid[(grid >= start) & (grid <= end)]
    if not len(grid):
        return None
    values = np.stack([np.interp(grid, x, y) for x, y in cleaned])
    return Band(grid, values.mean(0), values.min(0), values.max(0))


def method_band(method: ComparedMethod, metric: str, by_flops: bool = False) -> Band | None:
    """A metric's band over the method's seeds; training metrics smoothed.

    Args:
        method: whose runs are read; those without the metric count for nothing.
        metric: key of the runs' histories.
        by_flops: positions are FLOPs, their mean over the seeds, instead of training symbols.
    """
    curves = [run.history.get(metric, ((), ())) for run in method.runs]
    if metric.startswith("train/"):
        curves = [smoothed(curve) for curve in curves]
    band = seed_band(curves)
    if band is None or not by_flops:
        return band
    spent = [run.history.get("train/flops", ((), ())) for run in method.runs]
    flops = [to_flops(band.x, curve) for curve in spent if len(_clean(curve)[0])]
    return band._replace(x=np.mean(flops, axis=0)) if flops else None


def loss_metric(comparison: Comparison) -> str:
    """The loss to draw: the validation's, unless more methods have a curve of the training's."""

    def drawable(metric: str) -> int:
        return sum(any(len(run.history.get(metric, ((),))[0]) > 1 for run in m.runs) for m in comparison.methods)

    return max(f"validation/{comparison.unit}", f"train/{comparison.unit}", key=drawable)


def length_shares(method: ComparedMethod) -> list[float]:
    """Share of tokens by length: entry l - 1 is for l symbols, the last for those at least so long; mean over seeds.

    Empty if no run has tokens.
    """
    counts = [run.assessment.token_lengths for run in method.runs if sum(run.assessment.token_lengths) > 0]
    if not counts:
        return []
    last = min(map(len, counts))
    folded = [np.append(np.asarray(c[: last - 1], dtype=float), sum(c[last - 1 :])) for c in counts]
    return np.mean([c / c.sum() for c in folded], axis=0).tolist()


def references(comparison: Comparison) -> list[str]:
    """What boundaries were held against, in the order of the first run that names it."""
    return list(dict.fromkeys(name for m in comparison.methods for run in m.runs for name in run.assessment.agreement))


def agreement(method: ComparedMethod, reference: str) -> Agreement | None:
    """Mean over the method's seeds; None if it was not held against this."""
    every = [run.assessment.agreement for run in method.runs]
    found = [known[reference] for known in every if reference in known]
    if not found:
        return None
    return Agreement(mean(a.precision for a in found), mean(a.recall for a in found), mean(a.f1 for a in found))


def over_seeds(method: ComparedMethod, figure: str) -> float:
    """Mean of a figure, an attribute of ``ComparedRun``, over the method's runs."""
    return mean(getattr(run, figure) for run in method.runs)


def error_on_test(method: ComparedMethod) -> float:
    """Standard error over seeds of the loss on the test split; NaN where fewer than two are known."""
    known = [run.loss_test for run in method.runs if math.isfinite(run.loss_test)]
    return float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan


def passages(method: ComparedMethod) -> list[list[Character]]:
    """The passages as the method's first seed cut them."""
    return [
        characters(passage.text.encode("latin-1"), passage.boundary_prob, [bool(action) for action in passage.action])
        for passage in method.runs[0].assessment.passages
    ]


def colour_scale(comparison: Comparison) -> tuple[float, float]:
    """Ends of the colour scale of all passages: the range that methods use which are not always certain.

    Returns:
        1st and 99th percentile of the probabilities other than 0 and 1; all of [0, 1] if there are none or if they
        are alike.
    """
    texts = [text for method in comparison.methods for text in passages(method)]
    return colour_ends([c.probability for text in texts for c in text if 0 < c.probability < 1])


_DASHES = ("solid", "dashed", "dotted", "dashdot")


class Style(NamedTuple):
    """How a method's lines look: colour as ``#rrggbb``, line style by its CSS-like name, marker."""

    colour: str
    line: str
    marker: str


def styles(comparison: Comparison) -> dict[str, Style]:
    """Method to its look in all pictures, by its place in the comparison."""
    return {
        method.name: Style(LINES[i % len(LINES)], _DASHES[i // len(LINES) % len(_DASHES)], MARKERS[i % len(MARKERS)])
        for i, method in enumerate(comparison.methods)
    }


def line_picture(
    name: str, caption: str, curves: Mapping[str, Band], looks: Mapping[str, Style], finish: Callable[[Axes], None]
) -> Picture:
    """Lines with bands, one a method, and a legend.

    Args:
        name: of the picture.
        caption: of the picture.
        curves: method to what is drawn; at least one.
        looks: method to style.
        finish: sets the axes' labels, limits and formats.
    """
    names = [short(method) for method in curves]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        handles = []
        for method, band in curves.items():
            look = looks[method]
            each = max(1, len(band.x) // 8)
            # Markers of different methods stand at different places, or they would hide one another.
            first = list(looks).index(method) * each // len(looks)
            axes.fill_between(band.x, band.low, band.high, color=look.colour, alpha=0.15, lw=0)
            handles += axes.plot(
                band.x, band.mean, color=look.colour, ls=look.line, marker=look.marker, markevery=(first, each)
            )
        finish(axes)
        legend_below(figure, handles, names)

    rows = math.ceil(len(names) / legend_columns(names))
    return draw_both(name, caption, 3.6 + 0.19 * rows, draw)
