"""A comparison of methods as pictures, each for light and for dark pages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.report import forecast_tables
from tokenv.compare.report.aggregate import (
    Band,
    Style,
    length_shares,
    line_picture,
    loss_metric,
    method_band,
    oriented,
    ranked,
    ranks,
    styles,
    targets,
)
from tokenv.compare.report.forecast_tables import window_pictures
from tokenv.compare.report.rate_tables import rate_picture
from tokenv.compare.significance import corrected
from tokenv.plotting.characters import escape_line
from tokenv.plotting.figures import Picture, draw_both, legend_below, short
from tokenv.plotting.theme import BLUE, GREY, ORANGE

VERDICTS = {"better": BLUE, "worse": ORANGE, "not separable": GREY}

_BAND = "band from the lowest to the highest seed"
_SPIKE = 0.5  # a share of tokens of one length that would press all other methods flat


def _rows(axes: Axes, methods: Sequence[ComparedMethod]) -> None:
    """One row a method, the first on top."""
    axes.set_yticks(range(len(methods)), [short(method.name) for method in methods])
    axes.set_ylim(len(methods) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _dots(comparison: Comparison, methods: Sequence[ComparedMethod], looks: Mapping[str, Style]) -> Picture | None:
    """The loss of every method and seed."""
    unit, documents = comparison.unit_in_words, f"{comparison.words.document}s"
    if not any(math.isfinite(method.loss) for method in methods):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, method in enumerate(methods):
            look = looks[method.name]
            for error, width, alpha in ((method.document_error, 1.2, 1.0), (method.seed_error, 6.0, 0.35)):
                if math.isfinite(error):
                    ends = (method.loss - error, method.loss + error)
                    axes.plot(ends, (row, row), color=look.colour, lw=width, alpha=alpha, solid_capstyle="butt")
            seeds = [run.loss for run in method.runs]
            axes.plot(seeds, [row + 0.24] * len(seeds), "o", color=look.colour, mfc="none", ms=3.5, mew=1)
            axes.plot(method.loss, row, look.marker, color=look.colour, ms=6)
        _rows(axes, methods)
        axes.set_xlabel(f"held-out {unit} (left is better)")
        ink = mpl.rcParams["text.color"]
        handles = (
            Line2D([], [], color=ink, marker="D", ls="", ms=5),
            Line2D([], [], color=ink, marker="o", mfc="none", ls="", ms=3.5),
            Line2D([], [], color=ink, lw=6, alpha=0.35),
            Line2D([], [], color=ink, lw=1.2),
        )
        legend_below(figure, handles, ("mean", "one seed", "± error over seeds", f"error over {documents}"))

    caption = (
        f"{unit.capitalize()}: mean, each seed, and standard errors over seeds and over {documents}. All methods are "
        f"held against the same {documents}, so most of that error is common to them: whether two differ is told by "
        "the intervals of their difference."
    )
    return draw_both("methods", caption, 1.2 + 0.34 * len(methods), draw)


def _differences(comparison: Comparison, methods: Sequence[ComparedMethod]) -> Picture | None:
    """Every method minus the best, with 95% intervals."""
    best, pairs = methods[0], oriented(comparison)
    against = [pairs.get((method.name, best.name)) for method in methods]
    if not any(difference and math.isfinite(difference.mean) for difference in against):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axvline(0, color=mpl.rcParams["text.color"], lw=0.8)
        axes.plot(0, 0, "D", color=mpl.rcParams["text.color"], ms=5)
        for row, difference in enumerate(against):
            if difference:
                colour, interval = VERDICTS[difference.verdict], (difference.low, difference.high)
                if all(map(math.isfinite, interval)):
                    axes.plot(interval, (row, row), color=colour, lw=2, marker="|", ms=7)
                axes.plot(difference.mean, row, "o", color=colour, ms=5)
        _rows(axes, methods)
        axes.set_xlabel(f"{comparison.unit_in_words} more than {short(best.name)} (95% interval)")
        names = [name for name in VERDICTS if any(difference and difference.verdict == name for difference in against)]
        handles = [Line2D([], [], color=VERDICTS[name], marker="o", lw=2) for name in names]
        legend_below(figure, handles, names)

    caption = (
        f"Difference from {escape_line(best.name)}, with its 95% interval. Not separable: the interval holds 0, or "
        "would after Holm's correction for the number of pairs. "
        f"One seed decides nothing; its interval is of the {comparison.words.document}s alone."
    )
    return draw_both("differences", caption, 1.2 + 0.34 * len(methods), draw)


def _ranks(comparison: Comparison, looks: Mapping[str, Style]) -> Picture | None:
    """Mean rank of every method over the seeds, and which of them cannot be told apart."""
    found = ranks(comparison)
    if len(found) < 3 or len(next(iter(found.values()))) < 2:
        return None
    methods = sorted((m for m in comparison.methods if m.name in found), key=lambda m: np.mean(found[m.name]))
    bars = _inseparable(comparison, [method.name for method in methods])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, method in enumerate(methods):
            look, rank_S = looks[method.name], found[method.name]
            axes.plot(rank_S, [row] * len(rank_S), "o", color=look.colour, mfc="none", ms=3.5, mew=1)
            axes.plot(np.mean(rank_S), row, look.marker, color=look.colour, ms=7)
        for place, (first, last) in enumerate(bars):
            x = len(methods) + 0.6 + 0.35 * place
            axes.plot((x, x), (first - 0.2, last + 0.2), color=mpl.rcParams["text.color"], lw=2.5, clip_on=False)
        _rows(axes, methods)
        axes.set_xlim(0.6, len(methods) + 0.8 + 0.35 * len(bars))
        axes.set_xlabel("rank, seed by seed, and its mean (left is better)")

    caption = (
        "Rank of every method among all, for each seed, and its mean. Upright bars join methods no two of which can be "
        "told apart at 95% after Holm's correction for all pairs."
    )
    return draw_both("ranks", caption, 1.2 + 0.34 * len(methods), draw)


def _inseparable(comparison: Comparison, names: Sequence[str]) -> list[tuple[int, int]]:
    """Longest runs of neighbours, by first and last place, no two of which differ by Holm over all pairs."""
    every = oriented(comparison)
    counted = corrected({pair: every[pair] for pair in itertools.combinations(names, 2) if pair in every})

    def tied(first: int, last: int) -> bool:
        pairs = itertools.combinations(names[first : last + 1], 2)
        return all(counted[pair].verdict == "not separable" for pair in pairs if pair in counted)

    spans: list[tuple[int, int]] = []
    for first in range(len(names)):
        last = max(place for place in range(first, len(names)) if tied(first, place))
        if last > first and not any(last <= end for _, end in spans):
            spans.append((first, last))
    return spans


def _bands(methods: Sequence[ComparedMethod], metric: str, by_flops: bool = False) -> dict[str, Band]:
    found = ((method.name, method_band(method, metric, by_flops)) for method in methods)
    return {name: band for name, band in found if band is not None}


def _show_the_late_part(axes: Axes, curves: Mapping[str, Band]) -> None:
    """Set limits by what comes after each first third: the first steps' losses would press all else flat."""
    late = [band.mean[band.x >= band.x[-1] / 3] for band in curves.values()]
    low, high = min(map(np.min, late)), max(map(np.max, late))
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _losses(comparison: Comparison, methods: Sequence[ComparedMethod], looks: Mapping[str, Style]) -> Iterator[Picture]:
    metric = loss_metric(comparison)
    kind = "validation" if metric.startswith("validation/") else "training (running mean)"
    loss, symbols = comparison.unit_in_words, f"{comparison.words.symbol}s"
    for name, by_flops, spent in ((f"loss-{symbols}", False, symbols), ("loss-flops", True, "FLOPs")):
        curves = _bands(methods, metric, by_flops)
        if not curves:
            continue

        def finish(axes: Axes, curves: Mapping[str, Band] = curves, spent: str = spent) -> None:
            _show_the_late_part(axes, curves)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set(xlabel=f"training {spent}", ylabel=f"{kind} {loss}")

        caption = (
            f"{kind.capitalize()} {loss} against training {spent}: mean over the seeds; {_BAND}. "
            "The axis is cut above what the first third of training leaves behind."
        )
        yield line_picture(name, caption, curves, looks, finish)


def _policies(
    comparison: Comparison, methods: Sequence[ComparedMethod], looks: Mapping[str, Style]
) -> Iterator[Picture]:
    symbol = comparison.words.symbol
    kinds = (
        ("boundary-rate", "train/boundary_rate", f"boundaries per {symbol}", f"Boundaries per {symbol}"),
        ("neg-log-prob", "train/neg_log_prob", "mean −log π, nats per decision", "Mean −log π of the decisions drawn"),
    )
    for name, metric, unit, what in kinds:
        curves = _bands(methods, metric)
        if not curves:
            continue

        def finish(axes: Axes, unit: str = unit, has_target: bool = name == "boundary-rate") -> None:
            if has_target:
                for rate in comparison.target_rates:
                    axes.axhline(rate, color=mpl.rcParams["text.color"], ls=(0, (6, 4)), lw=1)
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.set(xlabel=f"training {symbol}s", ylabel=unit)
            axes.set_ylim(bottom=0)

        target = f" Thin dashes: aimed at, {targets(comparison)}." if name == "boundary-rate" else ""
        caption = f"{what} over training: running mean, mean over the seeds; {_BAND}.{target}"
        yield line_picture(name, caption, curves, looks, finish)


def _lengths(comparison: Comparison, methods: Sequence[ComparedMethod], looks: Mapping[str, Style]) -> Picture | None:
    words = comparison.words
    shares = {method.name: np.array(length_shares(method)) for method in methods}
    curves = {name: Band(np.arange(len(y)) + 1.0, y, y, y) for name, y in shares.items() if len(y)}
    if not curves:
        return None
    last = max(len(band.x) for band in curves.values())
    peaks = {name: band.mean.max() for name, band in curves.items()}
    top = max((peak for peak in peaks.values() if peak <= _SPIKE), default=1.0)
    beyond = [f"{escape_line(name)}, up to {peak:.2f}" for name, peak in peaks.items() if peak > top]

    def finish(axes: Axes) -> None:
        axes.set(
            xlabel=f"{words.symbol}s of a {words.token} ({last}: that many or more)", ylabel=f"share of {words.tokens}"
        )
        axes.set_ylim(0, 1.1 * top)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    caption = f"How long {words.tokens} are on held-out {words.data}, mean over the seeds."
    if beyond:
        caption += f" Beyond the axis: {'; '.join(beyond)}."
    return line_picture(f"{words.token}-lengths", caption, curves, looks, finish)


def _forecasts(comparison: Comparison, looks: Mapping[str, Style]) -> Picture | None:
    if comparison.forecasts is None:
        return None
    return forecast_tables.draw(comparison.forecasts, {name: look.colour for name, look in looks.items()})


def draw_ranks(comparison: Comparison) -> Picture | None:
    """The methods' ranks; None with fewer than three methods or two seeds in common."""
    return _ranks(comparison, styles(comparison))


def draw_pictures(comparison: Comparison) -> dict[str, Picture]:
    """Draw everything there is something to draw of.

    Returns:
        Name to picture: ``methods``, ``differences``, ``ranks``, ``rates``, ``forecasts``, ``loss-bytes`` (of series
        ``loss-steps``), ``loss-flops``, ``boundary-rate``, ``neg-log-prob``, ``token-lengths`` (``patch-lengths``),
        ``window-1`` and so on, in this order, those without anything to show left out.
    """
    methods, looks = ranked(comparison), styles(comparison)
    pictures = [
        _dots(comparison, methods, looks),
        _differences(comparison, methods),
        _ranks(comparison, looks),
        rate_picture(comparison, looks),
        _forecasts(comparison, looks),
        *_losses(comparison, methods, looks),
        *_policies(comparison, methods, looks),
        _lengths(comparison, methods, looks),
        *window_pictures(comparison),
    ]
    return {picture.name: picture for picture in pictures if picture}
