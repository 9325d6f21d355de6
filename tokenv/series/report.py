"""Reports of series: patches of a run; forecasts as a picture, a CSV file and a table of scores."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from tqdm import tqdm

from tokenv.data.corpus import Corpus
from tokenv.evaluation.evaluator import EvalOptions, evaluate_sequences
from tokenv.evaluation.loaded_run import LoadedRun
from tokenv.plotting.console import csv_rows
from tokenv.plotting.figures import (
    change_handle,
    date_labels,
    draw_picture,
    draw_probabilities,
    draw_values,
    legend_below,
    series_legend,
)
from tokenv.plotting.theme import BLUE, GREEN, ORANGE, PINK, SKY, with_error
from tokenv.series.forecaster import ForecastBatch, ForecastExcerpt
from tokenv.series.patches import SeriesExcerpt, make_excerpts
from tokenv.series.scores import ForecastScore, ScoreAccumulator

_TRUTH = "0.15"
_BASELINES = (GREEN, SKY, PINK, "0.5")
PICTURE_SERIES = 4  # forecasts in the picture
MIN_Z_SCORE = 2.0  # between two forecasts whose difference is clear


def draw_forecasts(
    excerpts: Sequence[ForecastExcerpt],
    quantiles: Sequence[float],
    source: str,
    path: Path,
    *,
    title: str,
    context: int = 0,
) -> Path:
    """Draw histories with their patches as bands, the middle and the outermost quantiles, and the baselines.

    Args:
        excerpts: forecasts, from top to bottom.
        quantiles: probabilities of the Q quantiles, ascending.
        source: description of where the quantiles come from.
        path: PNG to write, in an existing folder; it is replaced in one step.
        title: title above the picture, taken literally; none if it is empty.
        context: leading steps of the histories which are not predicted.

    Raises:
        OSError: the file cannot be written.
    """

    def draw(figure: Figure) -> None:
        entries = series_legend(context=context > 0)
        for each, axes in zip(
            excerpts, figure.subplots(len(excerpts), 1, squeeze=False)[:, 0], strict=True
        ):
            draw_values(axes, each.history_LC, each.boundary_L, title=each.title, context=context)
            _draw_horizon(axes, each, quantiles, source)
            if each.date_N is not None:
                axes.set_xticks(*date_labels(each.date_N, 6), fontsize="small")
            drawn, names = axes.get_legend_handles_labels()
            entries |= dict(zip(names, drawn, strict=True))
        if excerpts[-1].date_N is None:
            axes.set_xlabel("step")
        legend_below(figure, list(entries.values()), list(entries))

    return draw_picture(path, 0.8 + 1.4 * len(excerpts), title, draw)


def _draw_horizon(
    axes: Axes, each: ForecastExcerpt, quantiles: Sequence[float], source: str
) -> None:
    middle = len(quantiles) // 2
    known = len(each.history_LC)
    step_H = np.arange(known, known + len(each.mean_HC))
    low_HC, middle_HC, high_HC = each.quantile_QHC[[0, middle, -1]]
    interval = f"{quantiles[0]:g} to {quantiles[-1]:g} quantile {source}"
    for low_H, high_H in zip(low_HC.T, high_HC.T, strict=True):
        axes.fill_between(
            step_H, low_H, high_H, color=ORANGE, alpha=0.25, linewidth=0, label=interval
        )
    for (name, value_HC), colour in zip(each.point_HC.items(), _BASELINES, strict=False):
        axes.plot(step_H, value_HC, color=colour, linewidth=0.9, linestyle="--", label=name)
    axes.plot(
        step_H, middle_HC, color=ORANGE, linewidth=1.4, label=f"{quantiles[middle]:g} quantile"
    )
    if each.truth_HC is not None:
        axes.plot(
            step_H, each.truth_HC, color=_TRUTH, linewidth=1.0, linestyle=":", label="true values"
        )
    axes.set_ylabel(", ".join(each.columns), fontsize="small")
    axes.set_xlim(-0.5, step_H[-1] + 0.5)


def forecast_rows(each: ForecastExcerpt) -> Iterator[list[Any]]:
    """Yield a row for each channel and step of a forecast, for a CSV file: the truth is empty if it is unknown."""
    dates = [str(date) for date in each.dates_H]
    for channel, column in enumerate(each.columns):
        truth_H = [""] * len(dates)
        if each.truth_HC is not None:
            truth_H = each.truth_HC[:, channel].tolist()
        value_HQ = np.column_stack(
            [each.mean_HC[:, channel], each.quantile_QHC[:, :, channel].T]
        ).tolist()
        for step, (date, values, truth) in enumerate(zip(dates, value_HQ, truth_H, strict=True), 1):
            yield [each.name, column, step, date, *values, truth]


@dataclass(frozen=True)
class WrittenForecasts:
    """What is kept of all forecasts, whose values are in a file.

    Attributes:
        scores: scores of the forecasts whose actual values are known.
        source: source of the quantiles.
        pictured: some forecasts, evenly over all.
        stored: all forecasts, or those pictured if there are too many to keep.
    """

    scores: ScoreAccumulator
    source: str
    pictured: list[ForecastExcerpt]
    stored: list[ForecastExcerpt]


def write_forecasts(
    batches: Iterable[ForecastBatch],
    total: int,
    quantiles: Sequence[float],
    table: Path,
    *,
    most: int,
    progress: bool,
) -> WrittenForecasts:
    """Score forecasts batch by batch, and write each into a CSV file.

    Args:
        batches: forecasts, computed as they are read.
        total: number of forecasts.
        quantiles: their probabilities.
        table: file to write.
        most: maximum number of forecasts to keep.
        progress: show a progress bar.
    """
    pictured = {round(i * (total - 1) / (PICTURE_SERIES - 1)) for i in range(PICTURE_SERIES)}
    scores = ScoreAccumulator(quantiles)
    source = ""
    kept: dict[int, ForecastExcerpt] = {}
    number = 0
    columns = [f"q{q:g}" for q in quantiles]
    header = ["series", "column", "step", "date", "mean", *columns, "truth"]
    with (
        csv_rows(table, header) as write,
        tqdm(total=total, desc="forecast", leave=False, disable=not progress) as bar,
    ):
        for batch in batches:
            source = batch.forecast.distribution.source
            if batch.batch.truth_BHC is not None:
                scores.add(
                    batch.forecast.distribution, batch.quantile_BQHC, batch.batch, batch.point_BHC
                )
            for each in batch.excerpts():
                for row in forecast_rows(each):
                    write(row)
                if total <= most or number in pictured:
                    kept[number] = each
                number += 1
            bar.update(len(batch.batch.names))
    return WrittenForecasts(
        scores, source, [kept[i] for i in sorted(pictured)], list(kept.values())
    )


def score_rows(score: ForecastScore, total: int, horizon: int) -> dict[str, str]:
    """Return the rows of the table of scores.

    Args:
        score: score of some windows.
        total: number of all windows.
        horizon: number of steps of each.
    """
    rows = {
        "MSE": with_error(score.mse, score.mse_error),
        "MAE": with_error(score.mae, score.mae_error),
        "CRPS": with_error(score.crps, score.crps_error),
    }
    low = score.quantiles[0]
    high = score.quantiles[-1]
    if low < high:
        coverage = with_error(score.inside, score.inside_error, ".1%")
        rows[f"{low:g} to {high:g} quantile, {high - low:.0%}"] = f"holds {coverage}"
    shares = zip(score.quantiles, score.below, strict=True)
    rows["values at most a quantile"] = ", ".join(
        f"{q:g}: {with_error(share, None, '.1%')}" for q, share in shares
    )
    for name, peer in score.against.items():
        skills = [
            with_error(skill, None, "+.3f")
            for skill in (peer.skill_mse, peer.skill_mae, peer.skill_crps)
        ]
        rows[f"against {name}"] = f"{peer.mse:.4f}, {peer.mae:.4f}; {' '.join(skills)}"
    rows["against"] = "MSE, MAE; skill: 1 - the model's MSE, MAE, CRPS / its"
    rows["of"] = f"{score.windows:,} of {total:,} windows, {horizon} steps, standardised"
    return rows


def warnings_of(score: ForecastScore, total: int) -> list[str]:
    """Return a warning if the windows are too few to distinguish the model from baselines."""
    near = [name for name, peer in score.against.items() if not abs(peer.z_score) >= MIN_Z_SCORE]
    if not near or score.windows >= total:
        return []
    return [
        f"{score.windows:,} of {total:,} windows do not distinguish the model from {', '.join(near)}: their MSE differ "
        f"by less than {MIN_Z_SCORE:g} standard errors, window by window; windows=0 takes all"
    ]


def draw_patches(
    excerpts: Sequence[SeriesExcerpt], path: Path, *, title: str, context: int = 0
) -> Path:
    """Draw series with their patches as alternating bands, and the boundary probabilities below.

    Args:
        excerpts: series, from top to bottom.
        path: PNG file in an existing folder; it is replaced atomically.
        title: title of the figure, without markup; none if it is empty.
        context: number of leading steps which are not predicted.

    Returns:
        ``path``.

    Raises:
        ValueError: if there is no series.
        OSError: if the file cannot be written.
    """
    if not excerpts:
        raise ValueError("no series to draw")

    def draw(figure: Figure) -> None:
        entries = draw_windows(figure, excerpts, context)
        legend_below(figure, list(entries.values()), list(entries))

    return draw_picture(path, 0.8 + 1.7 * len(excerpts), title, draw)


def draw_windows(figure: Figure, excerpts: Sequence[SeriesExcerpt], context: int) -> dict[str, Any]:
    """Fill an empty figure with series, from top to bottom, each above its boundary probabilities.

    Args:
        figure: empty figure.
        excerpts: at least one series; its name is its title.
        context: number of leading steps which are not predicted.

    Returns:
        The handles of the legend by name.
    """
    axes = figure.subplots(
        2 * len(excerpts), 1, height_ratios=[3, 1] * len(excerpts), squeeze=False
    )[:, 0]
    longest = max(len(excerpt.value) for excerpt in excerpts)
    for excerpt, above, below in zip(excerpts, axes[::2], axes[1::2], strict=True):
        value_NC = np.array(excerpt.value, dtype=float)  # None becomes NaN
        draw_values(
            above,
            value_NC,
            excerpt.action,
            title=excerpt.name,
            context=context,
            gold_N=excerpt.gold,
        )
        draw_probabilities(below, excerpt.boundary_prob)
    for each in axes:  # all share the axis below the last
        each.set_xlim(-0.5, longest - 0.5)
        each.tick_params(labelbottom=each is axes[-1])
    axes[-1].set_xlabel("step")
    entries = series_legend(context=context > 0) | {"boundary probability": Patch(color=BLUE)}
    if any(excerpt.gold is not None for excerpt in excerpts):
        entries["true change"] = change_handle()
    return entries


def draw_held_out_patches(trained: LoadedRun, corpus: Corpus, path: Path, *, title: str) -> None:
    """Draw a few held-out windows of a run with their patches into a PNG file; see ``DataKind.draw_picture``."""
    count = 4
    batch = corpus.validation(count)
    scores = evaluate_sequences(trained.components, batch, EvalOptions(count))
    excerpts = make_excerpts(batch, scores.boundary_prob_BT, scores.action_BT)
    draw_patches(excerpts, path, title=title, context=trained.config.data.options.context)
