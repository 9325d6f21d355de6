"""Draw a comparison of methods, each picture for light and for dark pages."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.aggregate import (
    Band,
    assign_styles,
    choose_loss_metric,
    compute_band,
    compute_length_shares,
    describe_target_rates,
    draw_lines,
    label_rows,
    rank_by_seed,
    sort_methods,
)
from tokenv.compare.report.kind_report import kind_report
from tokenv.compare.report.report_tables import OWN_RATE, rate_columns
from tokenv.compare.robust_statistics import MIN_SEEDS
from tokenv.compare.score_statistics import apply_holm
from tokenv.evaluation.calibration import CALIBRATED
from tokenv.plotting.characters import escape_line
from tokenv.plotting.figures import Picture, draw_both, legend_below, short
from tokenv.plotting.theme import BLUE, GREY, ORANGE

VERDICTS = {"better": BLUE, "worse": ORANGE, "not separable": GREY}

_BAND = "band from the lowest to the highest seed"
_SPIKE = 0.5  # larger shares of tokens of one length would flatten all other methods' lines


def _draw_losses(comparison: Comparison) -> Picture | None:
    """Draw the loss of every method and seed."""
    methods = sort_methods(comparison)
    styles = assign_styles(comparison)
    unit = comparison.unit_in_words
    documents = f"{comparison.words.document}s"
    if not any(math.isfinite(method.loss) for method in methods):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, method in enumerate(methods):
            style = styles[method.name]
            for error, width, alpha in (
                (method.document_error, 1.2, 1.0),
                (method.seed_error, 6.0, 0.35),
            ):
                if math.isfinite(error):
                    ends = (method.loss - error, method.loss + error)
                    axes.plot(
                        ends,
                        (row, row),
                        color=style.colour,
                        lw=width,
                        alpha=alpha,
                        solid_capstyle="butt",
                    )
            seeds = [run.loss for run in method.runs]
            axes.plot(
                seeds, [row + 0.24] * len(seeds), "o", color=style.colour, mfc="none", ms=3.5, mew=1
            )
            axes.plot(method.loss, row, style.marker, color=style.colour, ms=6)
        label_rows(axes, [method.name for method in methods])
        axes.set_xlabel(f"held-out {unit} (left is better)")
        ink = mpl.rcParams["text.color"]
        handles = (
            Line2D([], [], color=ink, marker="D", ls="", ms=5),
            Line2D([], [], color=ink, marker="o", mfc="none", ls="", ms=3.5),
            Line2D([], [], color=ink, lw=6, alpha=0.35),
            Line2D([], [], color=ink, lw=1.2),
        )
        legend_below(
            figure, handles, ("mean", "one seed", "± error over seeds", f"error over {documents}")
        )

    caption = (
        f"{unit.capitalize()}: mean, each seed, and standard errors over seeds and over {documents}. All methods are "
        f"evaluated on the same {documents}, so most of that error is common to them: the intervals of their "
        "difference show whether two methods differ."
    )
    return draw_both("methods", caption, 1.2 + 0.34 * len(methods), draw)


def _draw_differences(comparison: Comparison) -> Picture | None:
    """Draw every method's difference from the best, with 95% intervals."""
    methods = sort_methods(comparison)
    pairs = comparison.both_ways
    best = methods[0]
    differences = [pairs.get((method.name, best.name)) for method in methods]
    if not any(difference and math.isfinite(difference.mean) for difference in differences):
        return None

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.axvline(0, color=mpl.rcParams["text.color"], lw=0.8)
        axes.plot(0, 0, "D", color=mpl.rcParams["text.color"], ms=5)
        for row, difference in enumerate(differences):
            if difference:
                colour = VERDICTS[difference.verdict]
                interval = (difference.low, difference.high)
                if all(map(math.isfinite, interval)):
                    axes.plot(interval, (row, row), color=colour, lw=2, marker="|", ms=7)
                axes.plot(difference.mean, row, "o", color=colour, ms=5)
        label_rows(axes, [method.name for method in methods])
        axes.set_xlabel(f"{comparison.unit_in_words} more than {short(best.name)}\n(95% interval)")
        drawn = {difference.verdict for difference in differences if difference}
        names = [name for name in VERDICTS if name in drawn]
        handles = [Line2D([], [], color=VERDICTS[name], marker="o", lw=2) for name in names]
        legend_below(figure, handles, names)

    caption = (
        f"Difference from {escape_line(best.name)}, with its 95% interval. Not separable: the interval contains 0, or "
        "would after Holm's correction for the number of pairs. "
        f"One seed decides nothing; its interval is of the {comparison.words.document}s alone."
    )
    return draw_both("differences", caption, 1.2 + 0.34 * len(methods), draw)


def draw_ranks(comparison: Comparison) -> Picture | None:
    """Draw the mean rank of every method over the seeds, and which methods are not separable.

    Returns:
        None with fewer than three methods or two seeds in common.
    """
    ranks = rank_by_seed(comparison)
    styles = assign_styles(comparison)
    if len(ranks) < 3 or len(ranks.columns) < 2:
        return None
    mean = ranks.mean(axis=1).sort_values(kind="stable")
    bars = _find_inseparable(comparison, list(mean.index))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for row, name in enumerate(mean.index):
            style = styles[name]
            rank_S = list(ranks.loc[name])
            axes.plot(
                rank_S, [row] * len(rank_S), "o", color=style.colour, mfc="none", ms=3.5, mew=1
            )
            axes.plot(mean[name], row, style.marker, color=style.colour, ms=7)
        for number, (first, last) in enumerate(bars):
            x = len(mean) + 0.6 + 0.35 * number
            axes.plot(
                (x, x),
                (first - 0.2, last + 0.2),
                color=mpl.rcParams["text.color"],
                lw=2.5,
                clip_on=False,
            )
        label_rows(axes, list(mean.index))
        axes.set_xlim(0.6, len(mean) + 0.8 + 0.35 * len(bars))
        axes.set_xlabel("rank, seed by seed, and its mean (left is better)")

    caption = (
        "Rank of every method among all, for each seed, and its mean. Vertical bars join methods no two of which are "
        "separable at 95% after Holm's correction for all pairs."
    )
    return draw_both("ranks", caption, 1.2 + 0.34 * len(mean), draw)


def draw_profiles(comparison: Comparison) -> Picture | None:
    """Draw the performance profile of every method; None for one method, or where no method has three seeds."""
    robust = comparison.robust
    documents = f"{comparison.words.document}s"
    curves = {
        m.name: Band(robust.threshold_P, *robust.profiles[m.name].T)
        for m in sort_methods(comparison)
    }
    if len(curves) < 2 or max(len(method.runs) for method in comparison.methods) < MIN_SEEDS:
        return None

    def finish(axes: Axes) -> None:
        unit = f"{comparison.unit_in_words} above the {comparison.words.document}'s mean over the methods (τ)"
        axes.set(xlabel=unit, ylabel=f"share of seeds and {documents} at most τ", ylim=(0, 1))

    caption = (
        f"Performance profiles: share of all seeds and {documents} whose loss is at most τ (higher is better), with "
        "pointwise 95% intervals of methods with three seeds or more."
    )
    return draw_lines(comparison, "profiles", caption, curves, finish)


def _find_inseparable(comparison: Comparison, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return the longest runs of neighbours, by first and last index, no two of which differ by Holm over all pairs."""
    every = comparison.both_ways
    counted = apply_holm(
        {pair: every[pair] for pair in itertools.combinations(names, 2) if pair in every}
    )

    def tied(first: int, last: int) -> bool:
        pairs = itertools.combinations(names[first : last + 1], 2)
        return all(counted[pair].verdict == "not separable" for pair in pairs if pair in counted)

    spans: list[tuple[int, int]] = []
    for first in range(len(names)):
        last = max(index for index in range(first, len(names)) if tied(first, index))
        if last > first and not any(last <= end for _, end in spans):
            spans.append((first, last))
    return spans


def _limit_to_late_part(axes: Axes, curves: Mapping[str, Band]) -> None:
    """Set limits by the values after each first third: the first steps' losses would flatten all else."""
    late = [band.mean[band.x >= band.x[-1] / 3] for band in curves.values()]
    low = min(map(np.min, late))
    high = max(map(np.max, late))
    margin = 0.06 * (high - low) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _draw_curves(
    comparison: Comparison,
    name: str,
    metric: str,
    position: str,
    labels: tuple[str, str],
    note: str,
) -> Picture | None:
    """Draw a metric of all methods over training.

    Args:
        comparison: what to draw.
        name: name of the picture.
        metric: key of the runs' histories.
        position: horizontal axis: ``FLOPs``, or the plural of a symbol.
        labels: label of the vertical axis, and beginning of the caption.
        note: end of the caption.

    Returns:
        None if no method has the metric.
    """
    bands = {
        m.name: compute_band(m, metric, by_flops=position == "FLOPs")
        for m in sort_methods(comparison)
    }
    curves = {method: band for method, band in bands.items() if band is not None}

    def finish(axes: Axes) -> None:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=f"training {position}", ylabel=labels[0])
        if name.startswith("loss-"):
            _limit_to_late_part(axes, curves)
            return
        for rate in comparison.target_rates if name == "boundary-rate" else ():
            axes.axhline(rate, color=mpl.rcParams["text.color"], ls=(0, (6, 4)), lw=1)
        axes.set_ylim(bottom=0)

    caption = f"{labels[1]}, mean over the seeds; {_BAND}. {note}".rstrip()
    if curves:
        return draw_lines(comparison, name, caption, curves, finish)
    return None


def _draw_training(comparison: Comparison) -> Iterator[Picture | None]:
    """Draw losses, boundary rates and the certainty of policies over training."""
    metric = choose_loss_metric(comparison)
    symbol = comparison.words.symbol
    if metric.startswith("validation/"):
        kind = "validation"
    else:
        kind = "training (running mean)"
    loss = f"{kind} {comparison.unit_in_words}"
    cut = "The axis ends above the values after the first third of training."
    for name, position in ((f"loss-{symbol}s", f"{symbol}s"), ("loss-flops", "FLOPs")):
        labels = (loss, f"{loss.capitalize()} against training {position}")
        yield _draw_curves(comparison, name, metric, position, labels, cut)
    labels = (f"boundaries per {symbol}", f"Boundaries per {symbol} over training: running mean")
    target = f"Thin dashes: target, {describe_target_rates(comparison)}."
    yield _draw_curves(
        comparison, "boundary-rate", "train/boundary_rate", f"{symbol}s", labels, target
    )
    labels = (
        "mean −log π, nats per decision",
        "Mean −log π of the decisions drawn, over training: running mean",
    )
    yield _draw_curves(comparison, "neg-log-prob", "train/neg_log_prob", f"{symbol}s", labels, "")


def _draw_lengths(comparison: Comparison) -> Picture | None:
    words = comparison.words
    shares = {
        method.name: compute_length_shares(comparison, method.name)
        for method in sort_methods(comparison)
    }
    curves = {name: Band(np.arange(len(y)) + 1.0, y, y, y) for name, y in shares.items() if len(y)}
    if not curves:
        return None
    last = max(len(band.x) for band in curves.values())
    peaks = {name: band.mean.max() for name, band in curves.items()}
    top = max((peak for peak in peaks.values() if peak <= _SPIKE), default=1.0)
    beyond = [
        f"{escape_line(name)}, up to {peak:.2f}" for name, peak in peaks.items() if peak > top
    ]

    def finish(axes: Axes) -> None:
        label = f"{words.symbol}s of a {words.token} ({last}: that many or more)"
        axes.set(xlabel=label, ylabel=f"share of {words.tokens}", ylim=(0, 1.1 * top))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    caption = f"Length of {words.tokens} on held-out {words.data}, mean over the seeds."
    if beyond:
        caption += f" Beyond the axis: {'; '.join(beyond)}."
    return draw_lines(comparison, f"{words.token}-lengths", caption, curves, finish)


def draw_rates(comparison: Comparison) -> Picture | None:
    """Draw the loss against the cost of reading; return None if nothing was measured at several rates."""
    if not len(comparison.rates):
        return None
    rates = comparison.rates[comparison.rates.compared]
    columns = ["flops", "loss", "lowest", "highest"]
    curves = {
        name: Band(*rows[columns].to_numpy().T)
        for name, rows in rates.groupby("method", sort=False)
    }
    trained = {method.name: method.runs[0].config.rate for method in comparison.methods}
    rings = [row for row in rates.itertuples() if row.target_rate == trained[row.method]]
    colours = {name: style.colour for name, style in assign_styles(comparison).items()}
    unit = comparison.unit_in_words
    symbol = comparison.words.symbol

    def finish(axes: Axes) -> None:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set(xlabel=f"FLOPs per {symbol}, forward", ylabel=f"held-out {unit}")
        for row in rings:
            axes.plot(row.flops, row.loss, "o", color=colours[row.method], ms=11, mfc="none", mew=1)

    requested = ", ".join(name for name in rate_columns(comparison) if name != OWN_RATE)
    caption = (
        f"Held-out {unit} against the cost of reading a {symbol}, at the rates {requested}: mean over the seeds; band "
        "from the lowest to the highest seed."
    )
    if (rates.way == CALIBRATED).any():
        caption += " Logits are shifted until other held-out data have the rate."
    if rings:
        caption += " Rings: the rate for which a method was trained."
    return draw_lines(comparison, "rates", caption, curves, finish)


def draw_pictures(comparison: Comparison) -> dict[str, Picture]:
    """Draw all pictures for which there are data.

    Returns:
        Name to picture: ``methods``, ``differences``, ``ranks``, ``profiles``, ``rates``, ``loss-bytes``
        (of series ``loss-steps``), ``loss-flops``, ``boundary-rate``, ``neg-log-prob``, ``token-lengths``
        (``patch-lengths``), and those of the kind of data, in this order; those without data are left out.
    """
    pictures = [
        _draw_losses(comparison),
        _draw_differences(comparison),
        draw_ranks(comparison),
        draw_profiles(comparison),
        draw_rates(comparison),
        *_draw_training(comparison),
        _draw_lengths(comparison),
        *kind_report(comparison).draw(),
    ]
    return {picture.name: picture for picture in pictures if picture}
