"""Forecasts of data frames in the conventions of Nixtla's libraries: continue, cross-validate, conformalise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from tokenv.core.errors import COUNT, UserError, check_value
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import resolve_rate
from tokenv.library.model import Model
from tokenv.series.config import SAMPLES, DirectHeadConfig
from tokenv.series.contexts import Array, ForecastContexts, last_windows
from tokenv.series.forecaster import ForecastExcerpt, check_forecast, make_forecasts
from tokenv.series.tables import DATE, IDENTIFIER, TARGET, check_frame, identifier_text, read_frame
from tokenv.series.windows import Series

CUTOFF = "cutoff"


def _channel_frames(
    each: ForecastExcerpt, series: Series, quantiles: Sequence[float], end: int
) -> list[pd.DataFrame]:
    """Return a data frame for every channel of a forecast, whose history ends after ``end`` steps of its series."""
    horizon = len(each.mean_HC)
    # of a series without dates
    dates: Any = range(1, horizon + 1)
    if each.truth_HC is not None:
        dates = range(end, end + horizon)
    cutoff: Any = end - 1
    if each.date_N is not None:
        dates = each.dates_H
        cutoff = each.date_N[-horizon - 1]
    names = series.columns if len(series.columns) > 1 else [series.name]
    frames = []
    for channel, name in enumerate(names):
        columns = {IDENTIFIER: name, DATE: dates}
        if each.truth_HC is not None:
            columns |= {CUTOFF: cutoff, TARGET: each.truth_HC[:, channel]}
        columns["mean"] = each.mean_HC[:, channel]
        for q, value_HC in zip(quantiles, each.quantile_QHC, strict=True):
            columns[f"q{q:g}"] = value_HC[:, channel]
        frames.append(pd.DataFrame(columns))
    return frames


def _with_identifiers_of(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return forecasts whose ``unique_id`` has the values and the type of the frame's, or of its columns' names."""
    long = IDENTIFIER in frame
    given = frame[IDENTIFIER].unique() if long else frame.columns
    value_of = {identifier_text(value): value for value in given}
    names = table[IDENTIFIER]
    if not set(names) <= set(value_of):  # channels of a long frame's series
        return table
    identifiers = names.map(value_of)
    if long:
        identifiers = identifiers.astype(frame[IDENTIFIER].dtype)
    return table.assign(**{IDENTIFIER: identifiers})


class SeriesModel(Model):
    """Trained model of series, which forecasts them. ``tokenv.load`` returns it for a run of series.

    The methods of ``Model`` for texts raise a ``UserError``.
    """

    def forecast(
        self,
        frame: pd.DataFrame,
        horizon: int = 96,
        *,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9),
        samples: int = 100,
        direct: bool | None = None,
        seed: int = 0,
        rate: float | None = None,
        future: pd.DataFrame | None = None,
    ) -> pd.DataFrame:
        """Continue series from their last rows.

        Args:
            frame: table with a row for each step: long, with the columns ``unique_id``, ``ds`` and ``y``; or wide, with
                a column for each series (those in the run's ``data.options.columns``, or all) besides the dates, which
                are the column in ``data.options.date`` or a ``DatetimeIndex``. Series may differ in length, and the
                rows of a long table may have any order.
            horizon: number of steps to forecast.
            quantiles: probabilities in (0, 1), ascending.
            samples: number of continuations per forecast if values are sampled one after another.
            direct: whether to take exact quantiles of each step from the direct head; None if the head covers the
                horizon.
            seed: the same seed gives the same result.
            rate: boundaries per step, for a model trained for a range; None for the mean of the range.
            future: covariates of the steps to forecast, for a model with ``data.options.future_covariates``: rows like
                those of ``frame``, without values. Past covariates are further columns of ``frame``.

        Returns:
            A row for each series and step: ``unique_id`` (of the frame's type), ``ds`` (following dates at the series'
            frequency, or numbers of steps without dates), ``mean``, and a column such as ``q0.1`` for each quantile.
            The series are in the frame's order.

        Raises:
            UserError: if the horizon exceeds the direct head or leaves no history, or the
                frame lacks columns, repeats dates or (a wide one) disorders them, has irregular steps or too short a
                series, or future covariates are missing.
        """
        direct = self._check(horizon, quantiles, samples, direct)
        options = self.config.data.options
        frame = check_frame("frame", frame)
        if future is not None:
            future = check_frame("future", future)
            expected = options.future_covariates
            missing = [column for column in expected if column not in future]
            if missing or not expected:
                raise UserError(
                    f"future has the columns {', '.join(map(str, future.columns))}: expected those of "
                    f"data.options.future_covariates = {expected!r}, and dates as in frame"
                )
            frame = pd.concat([frame, future])
        contexts = last_windows(read_frame(frame, options), self.config, horizon)
        table = self._table(contexts, quantiles, samples, direct, EvalOptions(seed=seed, rate=rate))
        return _with_identifiers_of(frame, table)

    def cross_validate(
        self,
        frame: pd.DataFrame,
        horizon: int = 96,
        windows: int = 1,
        *,
        step: int | None = None,
        quantiles: Sequence[float] = (0.1, 0.5, 0.9),
        samples: int = 100,
        direct: bool | None = None,
        seed: int = 0,
        rate: float | None = None,
    ) -> pd.DataFrame:
        """Forecast the last windows of series, whose values are known (rolling-origin cross-validation).

        The model is not trained again, and reads nothing after a window's cutoff. Whether the values were part of its
        training is the caller's to know.

        Args:
            frame: see ``forecast``.
            horizon: number of steps to forecast in every window.
            windows: number of windows of every series; the last one ends with the series.
            step: steps from one cutoff to the next; None for ``horizon``, so that windows do not overlap.
            quantiles: see ``forecast``.
            samples: see ``forecast``.
            direct: see ``forecast``.
            seed: the same seed gives the same result.
            rate: see ``forecast``.

        Returns:
            A row for each series, window and step: ``unique_id``, ``ds``, ``cutoff`` (the last date which the model
            has read), the true ``y``, ``mean``, and a column such as ``q0.1`` for each quantile. Without dates, ``ds``
            and ``cutoff`` are numbers of rows from 0. ``tokenv.conformal_intervals`` takes it.

        Raises:
            UserError: see ``forecast``; or a series is too short for so many windows.
        """
        direct = self._check(horizon, quantiles, samples, direct)
        check_value("windows", windows, COUNT)
        if step is None:
            step = horizon
        check_value("step", step, COUNT)
        frame = check_frame("frame", frame)
        recordings = read_frame(frame, self.config.data.options)
        contexts = last_windows(recordings, self.config, horizon, windows=windows, step=step)
        table = self._table(contexts, quantiles, samples, direct, EvalOptions(seed=seed, rate=rate))
        return _with_identifiers_of(frame, table)

    def _check(
        self, horizon: int, quantiles: Sequence[float], samples: int, direct: bool | None
    ) -> bool:
        """Check the arguments of a forecast, and return whether the direct head makes it."""
        config = self.config
        probabilities = list(quantiles)
        if probabilities != sorted(set(probabilities)) or not all(0 < q < 1 for q in probabilities):
            raise UserError(
                f"quantiles = {probabilities}: expected ascending numbers in (0, 1), as [0.1, 0.5, 0.9]"
            )
        check_value("horizon", horizon, COUNT)
        check_value("samples", samples, SAMPLES)
        if direct is None:
            head = DirectHeadConfig.of(config.codec)
            direct = head.direct or head.horizon >= horizon
        check_forecast(config, horizon, samples=samples, direct=direct, held_out=False)
        return direct

    def _table(
        self,
        contexts: ForecastContexts,
        quantiles: Sequence[float],
        samples: int,
        direct: bool,
        options: EvalOptions,
    ) -> pd.DataFrame:
        """Return the forecasts of all histories, in the order of the series and their histories."""
        components = self._trained.components
        options = replace(options, rate=resolve_rate(components, self.config, options.rate))
        parts: list[list[pd.DataFrame]] = []
        for forecasts in make_forecasts(
            components, contexts, {}, quantiles, options, samples=samples, direct=direct
        ):
            for series, each in zip(forecasts.batch.series, forecasts.excerpts(), strict=True):
                end = int(contexts.end_P[len(parts)])
                parts.append(_channel_frames(each, series, quantiles, end))
        order = np.lexsort((contexts.end_P, contexts.series_P))
        by_channel = [pd.concat(part, ignore_index=True) for part in parts]
        table = pd.concat([by_channel[index] for index in order], ignore_index=True)
        names = table[IDENTIFIER].unique().tolist()  # joint series: one channel after the other
        return table.sort_values(
            IDENTIFIER, key=lambda name: name.map(names.index), kind="stable", ignore_index=True
        )


def conformal_intervals(
    forecast: pd.DataFrame,
    calibration: pd.DataFrame,
    *,
    level: float | Sequence[float] = 80,
    lower: str = "mean",
    upper: str = "mean",
) -> pd.DataFrame:
    """Give forecasts intervals which cover what they promise at every step (split conformal prediction).

    The score of a forecast which is known is ``s = max(lower - y, y - upper)``; with a point forecast as both columns,
    ``|y - mean|`` (Lei et al. 2018, arXiv 1604.04173). With n scores of a series at one step of the horizon, s* is the
    ``ceil((n + 1) level / 100)``-th smallest, and the interval of that step is ``[lower - s*, upper + s*]``. With
    quantiles as columns this is conformalised quantile regression (Romano, Patterson, Candès 2019, arXiv 1905.03222).
    If the windows of calibration and future were exchangeable, the interval of every step would contain the truth with
    probability at least ``level`` percent; series drift, and windows depend on one another, so measure it on further
    windows.

    Args:
        forecast: forecasts of any model, with the columns ``unique_id``, ``ds``, ``lower`` and ``upper``, and
            ``cutoff`` if a series has several windows.
        calibration: earlier forecasts of the same series with the same columns, ``cutoff`` and the truth, ``y``, such
            as ``SeriesModel.cross_validate`` returns. Rows without truth are ignored.
        level: coverage in percent, in (0, 100), or several.
        lower: column of the lower bound.
        upper: column of the upper bound; the same as ``lower`` for point forecasts.

    Returns:
        ``forecast`` with the columns ``mean-lo-80`` and ``mean-hi-80`` for every level, as Nixtla's libraries name
        them: with the name of a column of point forecasts instead of ``mean``.

    Raises:
        UserError: a column is missing, or a series has too few known windows at a step for a level.
    """
    levels = np.atleast_1d(level)
    if not len(levels) or not all(0 < each < 100 for each in levels):
        raise UserError(
            f"level = {level}: expected coverages in percent, above 0 and below 100, such as [80, 95]"
        )
    columns = [IDENTIFIER, DATE, lower, upper]
    step = _steps_of_horizon("forecast", forecast, columns)
    known_step = _steps_of_horizon("calibration", calibration, [*columns, CUTOFF, TARGET])
    truth = calibration[TARGET].to_numpy(float)
    score = np.maximum(calibration[lower] - truth, truth - calibration[upper]).to_numpy()
    scores = {
        place: np.sort(of_place.dropna())
        for place, of_place in pd.Series(score).groupby([calibration[IDENTIFIER].array, known_step])
    }
    half = (forecast[upper] - forecast[lower]) / 2  # an interval shrinks to its middle at most
    model = lower
    if lower != upper:
        model = "mean"
    places = list(zip(forecast[IDENTIFIER], step, strict=True))
    result = forecast.copy()
    no_score = np.zeros(0)
    for each in levels:
        margin = {place: _margin(place, scores.get(place, no_score), each) for place in set(places)}
        width = np.maximum([margin[place] for place in places], -half)
        result[f"{model}-lo-{each:g}"] = forecast[lower] - width
        result[f"{model}-hi-{each:g}"] = forecast[upper] + width
    return result


def _steps_of_horizon(name: str, table: pd.DataFrame, columns: list[str]) -> Array:
    """Return each row's step of its forecast, from 1, by the order of dates; check that a table has the columns."""
    if missing := [column for column in columns if column not in table]:
        raise UserError(
            f"{name} has no column {', '.join(map(repr, missing))} but {', '.join(map(str, table.columns))}: "
            "expected the columns of SeriesModel.cross_validate; name the bounds with lower= and upper="
        )
    forecasts = [column for column in (IDENTIFIER, CUTOFF) if column in table]
    ordered = table.reset_index(drop=True).sort_values(DATE, kind="stable")
    step = ordered.groupby(forecasts, observed=True).cumcount() + 1
    return np.asarray(step.sort_index())


def _margin(place: tuple[Any, int], score_n: Array, level: float) -> float:
    """Return the score at the rank which split conformal prediction takes, of ascending scores of a series' step."""
    rank = math.ceil((len(score_n) + 1) * level / 100)
    if rank > len(score_n):
        least = math.ceil(level / (100 - level))
        name, step = place
        raise UserError(
            f"calibration has {len(score_n)} known windows of series {name!r} at step {step}: expected at least "
            f"{least} for level = {level:g}: cross-validate with more windows"
        )
    return float(score_n[rank - 1])
