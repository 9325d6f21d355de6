"""Forecasts of data frames in the conventions of Nixtla's libraries: continue, cross-validate, conformalise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from tokenv.config.schema import Config
from tokenv.core.errors import COUNT, UserError, check_value
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import resolve_rate
from tokenv.library.model import Model
from tokenv.series.config import SAMPLES, DirectHeadConfig, Frequency
from tokenv.series.contexts import Array, ForecastContexts, last_windows
from tokenv.series.forecaster import ForecastExcerpt, check_forecast, make_forecasts
from tokenv.series.scores import SampleForecast
from tokenv.series.tables import DATE, IDENTIFIER, TARGET, check_frame, identifier_text, read_frame
from tokenv.series.windows import Series

CUTOFF = "cutoff"
MODEL = "tokenv"  # the column of forecasts
SAMPLE = "sample_id"


@dataclass(frozen=True)
class FrameColumns:
    """Names of a frame's columns, as Nixtla's libraries take them.

    Attributes:
        id_col: name of a series.
        time_col: date of a step.
        target_col: value.
    """

    id_col: str = IDENTIFIER
    time_col: str = DATE
    target_col: str = TARGET

    def read(self, argument: str, frame: Any) -> pd.DataFrame:
        """Return a frame with the names which tokenv reads, its index as columns.

        Raises:
            UserError: it is no data frame, or has no column of a name which was given.
        """
        frame = check_frame(argument, frame)
        names = {self.id_col: IDENTIFIER, self.time_col: DATE, self.target_col: TARGET}
        names = {given: name for given, name in names.items() if given != name}
        if missing := [
            given for given in names if given not in (*frame.columns, *frame.index.names)
        ]:
            raise UserError(
                f"{argument} has no column {missing[0]!r} but {', '.join(map(str, frame.columns))}: expected those of "
                "id_col, time_col and target_col"
            )
        return check_frame(argument, frame.rename(columns=names).rename_axis(index=names))

    def write(self, table: pd.DataFrame) -> pd.DataFrame:
        """Return a frame of results with the names which were given."""
        return table.rename(
            columns={IDENTIFIER: self.id_col, DATE: self.time_col, TARGET: self.target_col}
        )


def _check_levels(level: float | Sequence[float]) -> list[float]:
    """Return coverages in percent.

    Raises:
        UserError: one is not between 0 and 100, or there is none.
    """
    levels = [float(each) for each in np.atleast_1d(level)]
    if not levels or not all(0 < each < 100 for each in levels):
        raise UserError(
            f"level = {level}: expected coverages in percent, above 0 and below 100, such as [80, 95]"
        )
    return levels


def _quantile_columns(
    level: float | Sequence[float] | None, quantiles: Sequence[float]
) -> dict[str, float]:
    """Return the columns of intervals and quantiles with their probabilities, ascending.

    Raises:
        UserError: a coverage is not between 0 and 100, or a probability not between 0 and 1.
    """
    columns = {}
    if level is not None:
        for each in _check_levels(level):
            tail = (100 - each) / 200
            columns[f"{MODEL}-lo-{each:g}"] = tail
            columns[f"{MODEL}-hi-{each:g}"] = 1 - tail
    for probability in quantiles:
        if not 0 < probability < 1:
            raise UserError(
                f"quantiles = {list(quantiles)}: expected numbers in (0, 1), such as [0.1, 0.5, 0.9]"
            )
        columns[f"{MODEL}-q-{100 * probability:g}"] = probability
    return dict(sorted(columns.items(), key=lambda column: column[1]))


def _channel_frames(
    each: ForecastExcerpt, series: Series, columns: Mapping[Any, Array], end: int
) -> list[pd.DataFrame]:
    """Return a data frame for every channel of a forecast, whose history ends after ``end`` steps of its series.

    Args:
        each: forecast.
        series: its series.
        columns: values of every column of results, [H, C] each.
        end: steps of the history.
    """
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
        content = {IDENTIFIER: name, DATE: dates}
        if each.truth_HC is not None:
            content |= {CUTOFF: cutoff, TARGET: each.truth_HC[:, channel]}
        content |= {column: value[..., channel] for column, value in columns.items()}
        frames.append(pd.DataFrame(content))
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

    Arguments and columns are named as in Nixtla's libraries. The methods of ``Model`` for texts raise a ``UserError``.
    """

    def forecast(
        self,
        df: pd.DataFrame,
        h: int = 96,
        *,
        freq: Frequency = None,
        X_df: pd.DataFrame | None = None,
        level: float | Sequence[float] | None = None,
        quantiles: Sequence[float] = (),
        id_col: str = IDENTIFIER,
        time_col: str = DATE,
        target_col: str = TARGET,
        samples: int = 100,
        direct: bool | None = None,
        seed: int = 0,
        rate: float | None = None,
    ) -> pd.DataFrame:
        """Continue series from their last rows.

        Args:
            df: table with a row for each step: long, with the columns ``unique_id``, ``ds`` and ``y``; or wide, with a
                column for each series (those in the run's ``data.options.columns``, or all) besides the dates, which
                are the column in ``data.options.date`` or a ``DatetimeIndex``. Series may differ in length, and the
                rows of a long table may have any order.
            h: number of steps H to forecast.
            freq: frequency of the dates, as pandas names them (``"B"``, ``"MS"``, a business calendar) or steps between
                numbers; None for the run's ``data.options.freq``, or else to infer it.
            X_df: covariates of the steps to forecast, for a model with ``data.options.future_covariates``: rows like
                those of ``df``, without values. Past covariates are further columns of ``df``.
            level: coverage of central intervals in percent, or several.
            quantiles: probabilities in (0, 1).
            id_col: name of the column ``unique_id``.
            time_col: name of the column ``ds``.
            target_col: name of the column ``y``.
            samples: number of continuations per forecast if values are sampled one after another.
            direct: whether to take exact quantiles of each step from the direct head; None if the head covers the
                horizon.
            seed: the same seed gives the same result.
            rate: boundaries per step, for a model trained for a range; None for the mean of the range.

        Returns:
            A row for each series and step: ``unique_id`` (of the frame's type), ``ds`` (following dates, or numbers of
            steps without dates), the expected value ``tokenv``, ``tokenv-lo-80`` and ``tokenv-hi-80`` for each level,
            and a column such as ``tokenv-q-10`` for each quantile. The series are in the frame's order.

        Raises:
            UserError: the horizon exceeds the direct head or leaves no history, or the frame lacks columns, repeats
                dates or (a wide one) disorders them, has irregular steps or too short a series, or future covariates
                are missing.
        """
        names = FrameColumns(id_col, time_col, target_col)
        direct = self._check(h, samples, direct)
        columns = _quantile_columns(level, quantiles)
        df = names.read("df", df)
        contexts = self._last_windows(df, h, freq, names, X_df)
        table = self._table(contexts, columns, samples, direct, EvalOptions(seed=seed, rate=rate))
        return names.write(_with_identifiers_of(df, table))

    def simulate(
        self,
        df: pd.DataFrame,
        h: int = 96,
        *,
        n_paths: int = 100,
        freq: Frequency = None,
        id_col: str = IDENTIFIER,
        time_col: str = DATE,
        target_col: str = TARGET,
        seed: int = 0,
        rate: float | None = None,
    ) -> pd.DataFrame:
        """Draw continuations of series, value by value, so that steps of a path depend on one another.

        Args:
            df: see ``forecast``.
            h: number of steps H of a path.
            n_paths: number of paths of each series.
            freq: see ``forecast``.
            id_col: see ``forecast``.
            time_col: see ``forecast``.
            target_col: see ``forecast``.
            seed: the same seed gives the same result.
            rate: see ``forecast``.

        Returns:
            A row for each series, path and step: ``unique_id``, ``ds``, the path's number ``sample_id`` from 0, and its
            value ``tokenv``.

        Raises:
            UserError: see ``forecast``; or the model has only its direct head, or reads covariates.
        """
        names = FrameColumns(id_col, time_col, target_col)
        self._check(h, n_paths, direct=False)
        df = names.read("df", df)
        contexts = self._last_windows(df, h, freq, names)
        table = self._table(
            contexts, {}, n_paths, False, EvalOptions(seed=seed, rate=rate), paths=True
        )
        paths = table.melt([IDENTIFIER, DATE], var_name=SAMPLE, value_name=MODEL)
        paths = _by_identifier(paths.astype({SAMPLE: int}))
        return names.write(_with_identifiers_of(df, paths))

    def cross_validation(
        self,
        df: pd.DataFrame,
        h: int = 96,
        n_windows: int = 1,
        *,
        step_size: int | None = None,
        freq: Frequency = None,
        level: float | Sequence[float] | None = None,
        quantiles: Sequence[float] = (),
        id_col: str = IDENTIFIER,
        time_col: str = DATE,
        target_col: str = TARGET,
        samples: int = 100,
        direct: bool | None = None,
        seed: int = 0,
        rate: float | None = None,
        refit: Callable[[pd.DataFrame], SeriesModel] | None = None,
    ) -> pd.DataFrame:
        """Forecast the last windows of series, whose values are known (rolling-origin cross-validation).

        A model reads nothing after a window's cutoff. Unless it is trained again (``refit``), whether the values were
        part of its training is the caller's to know.

        Args:
            df: see ``forecast``.
            h: number of steps to forecast in every window.
            n_windows: number of windows of every series; the last one ends with the series.
            step_size: steps from one cutoff to the next; None for ``h``, so that windows do not overlap.
            freq: see ``forecast``.
            level: see ``forecast``.
            quantiles: see ``forecast``.
            id_col: see ``forecast``.
            time_col: see ``forecast``.
            target_col: see ``forecast``.
            samples: see ``forecast``.
            direct: see ``forecast``.
            seed: the same seed gives the same result.
            rate: see ``forecast``.
            refit: function called for every window with the rows of ``df`` up to its cutoff, which returns the model
                that forecasts this window; None to forecast all with this model.

        Returns:
            The columns of ``forecast`` for each series, window and step, with ``cutoff`` (the last date which the model
            has read) and the true ``y``. Without dates, ``ds`` and ``cutoff`` are numbers of rows from 0.
            ``tokenv.conformal_intervals`` takes it.

        Raises:
            UserError: see ``forecast``; or a series is too short for so many windows.
        """
        names = FrameColumns(id_col, time_col, target_col)
        direct = self._check(h, samples, direct)
        columns = _quantile_columns(level, quantiles)
        check_value("n_windows", n_windows, COUNT)
        if step_size is None:
            step_size = h
        check_value("step_size", step_size, COUNT)
        df = names.read("df", df)
        config = self._config_with(freq)
        recordings = read_frame(df, config.data.options)
        contexts = last_windows(recordings, config, h, windows=n_windows, step=step_size)
        if refit is None:
            options = EvalOptions(seed=seed, rate=rate)
            table = self._table(contexts, columns, samples, direct, options)
            return names.write(_with_identifiers_of(df, table))
        tables = []
        for later in reversed(range(0, n_windows * step_size, step_size)):
            model = refit(names.write(_without_last(df, later + h)))
            tables.append(
                model.cross_validation(
                    _without_last(df, later),
                    h,
                    freq=freq,
                    level=level,
                    quantiles=quantiles,
                    samples=samples,
                    direct=direct,
                    seed=seed,
                    rate=rate,
                )
            )
        return names.write(_by_identifier(pd.concat(tables)))

    def _check(self, h: int, samples: int, direct: bool | None) -> bool:
        """Check the arguments of a forecast, and return whether the direct head makes it."""
        config = self.config
        check_value("h", h, COUNT)
        check_value("samples", samples, SAMPLES)
        if direct is None:
            head = DirectHeadConfig.of(config.codec)
            direct = head.direct or head.horizon >= h
        check_forecast(config, h, samples=samples, direct=direct, held_out=False)
        return direct

    def _config_with(self, freq: Frequency) -> Config:
        """Return the run's configuration, with another frequency of the dates if one is given."""
        config = self.config
        if freq is None:
            return config
        options = replace(config.data.options, freq=freq)
        return replace(config, data=replace(config.data, options=options))

    def _last_windows(
        self,
        df: pd.DataFrame,
        h: int,
        freq: Frequency,
        names: FrameColumns,
        X_df: pd.DataFrame | None = None,
    ) -> ForecastContexts:
        """Return the series' ends, with the covariates of the next steps."""
        config = self._config_with(freq)
        options = config.data.options
        if X_df is not None:
            X_df = replace(names, target_col=TARGET).read("X_df", X_df)
            expected = options.future_covariates
            missing = [column for column in expected if column not in X_df]
            if missing or not expected:
                raise UserError(
                    f"X_df has the columns {', '.join(map(str, X_df.columns))}: expected those of "
                    f"data.options.future_covariates = {expected!r}, and dates as in df"
                )
            df = pd.concat([df, X_df])
        return last_windows(read_frame(df, options), config, h)

    def _table(
        self,
        contexts: ForecastContexts,
        quantiles: Mapping[str, float],
        samples: int,
        direct: bool,
        options: EvalOptions,
        *,
        paths: bool = False,
    ) -> pd.DataFrame:
        """Return the forecasts of all histories, in the order of the series and their histories.

        Columns are the mean and those of ``quantiles``, or with ``paths`` one for each drawn continuation.
        """
        components = self._trained.components
        options = replace(options, rate=resolve_rate(components, self.config, options.rate))
        parts: list[list[pd.DataFrame]] = []
        for forecasts in make_forecasts(
            components, contexts, {}, [*quantiles.values()], options, samples=samples, direct=direct
        ):
            distribution = forecasts.forecast.distribution
            for row, each in enumerate(forecasts.excerpts()):
                columns: dict[Any, Array] = {MODEL: each.mean_HC}
                columns |= zip(quantiles, each.quantile_QHC, strict=True)
                if paths:
                    assert isinstance(distribution, SampleForecast)
                    columns = dict(enumerate(distribution.sample_BSHC[row]))
                end = int(contexts.end_P[len(parts)])
                parts.append(_channel_frames(each, forecasts.batch.series[row], columns, end))
        order = np.lexsort((contexts.end_P, contexts.series_P))
        by_channel = [pd.concat(part, ignore_index=True) for part in parts]
        table = pd.concat([by_channel[index] for index in order], ignore_index=True)
        return _by_identifier(table)  # joint series: one channel after the other


def _without_last(frame: pd.DataFrame, steps: int) -> pd.DataFrame:
    """Return a frame without the last steps of every series, its rows in their order."""
    if IDENTIFIER not in frame:
        return frame.iloc[: len(frame) - steps]
    frame = frame.reset_index(drop=True)
    of_series = frame.sort_values(DATE, kind="stable").groupby(IDENTIFIER, observed=True)
    return frame[of_series.cumcount(ascending=False).sort_index() >= steps]


def _by_identifier(table: pd.DataFrame) -> pd.DataFrame:
    """Sort rows by series, in the order in which they first appear."""
    names = table[IDENTIFIER].unique().tolist()
    return table.sort_values(
        IDENTIFIER, key=lambda name: name.map(names.index), kind="stable", ignore_index=True
    )


def conformal_intervals(
    forecast: pd.DataFrame,
    calibration: pd.DataFrame,
    *,
    level: float | Sequence[float] = 80,
    lower: str = MODEL,
    upper: str = MODEL,
    id_col: str = IDENTIFIER,
    time_col: str = DATE,
    target_col: str = TARGET,
) -> pd.DataFrame:
    """Give forecasts intervals which cover what they promise at every step (split conformal prediction).

    The score of a forecast which is known is ``s = max(lower - y, y - upper)``; with a point forecast as both columns,
    ``|y - tokenv|`` (Lei et al. 2018, arXiv 1604.04173). With n scores of a series at one step of the horizon, s* is
    the ``ceil((n + 1) level / 100)``-th smallest, and the interval of that step is ``[lower - s*, upper + s*]``. With
    quantiles as columns this is conformalised quantile regression (Romano, Patterson, Candès 2019, arXiv 1905.03222).
    If the windows of calibration and future were exchangeable, the interval of every step would contain the truth with
    probability at least ``level`` percent; series drift, and windows depend on one another, so measure it on further
    windows.

    Args:
        forecast: forecasts of any model, with the columns ``unique_id``, ``ds``, ``lower`` and ``upper``, and
            ``cutoff`` if a series has several windows.
        calibration: earlier forecasts of the same series with the same columns, ``cutoff`` and the truth, ``y``, such
            as ``SeriesModel.cross_validation`` returns. Rows without truth are ignored.
        level: coverage in percent, in (0, 100), or several.
        lower: column of the lower bound.
        upper: column of the upper bound; the same as ``lower`` for point forecasts.
        id_col: name of the column ``unique_id``.
        time_col: name of the column ``ds``.
        target_col: name of the column ``y``.

    Returns:
        ``forecast`` with the columns ``tokenv-lo-80`` and ``tokenv-hi-80`` for every level, in place of those which
        it may have: with the name of a column of point forecasts instead of ``tokenv``.

    Raises:
        UserError: a column is missing, or a series has too few known windows at a step for a level.
    """
    levels = _check_levels(level)
    names = FrameColumns(id_col, time_col, target_col)
    forecast = replace(names, target_col=TARGET).read("forecast", forecast)
    calibration = names.read("calibration", calibration)
    columns = [IDENTIFIER, DATE, lower, upper]
    step = _steps_of_horizon("forecast", forecast, columns)
    known_step = _steps_of_horizon("calibration", calibration, [*columns, CUTOFF, TARGET])
    truth = calibration[TARGET].to_numpy(float)
    score = np.maximum(calibration[lower] - truth, truth - calibration[upper]).to_numpy()
    scores = {
        place: np.sort(of_place.dropna())
        for place, of_place in pd.Series(score).groupby(
            [calibration[IDENTIFIER].to_numpy(), known_step]
        )
    }
    half = (forecast[upper] - forecast[lower]) / 2  # an interval shrinks to its middle at most
    model = lower
    if lower != upper:
        model = MODEL
    places = list(zip(forecast[IDENTIFIER], step, strict=True))
    result = forecast.copy()
    no_score = np.zeros(0)
    for each in levels:
        margin = {place: _margin(place, scores.get(place, no_score), each) for place in set(places)}
        width = np.maximum([margin[place] for place in places], -half)
        result[f"{model}-lo-{each:g}"] = forecast[lower] - width
        result[f"{model}-hi-{each:g}"] = forecast[upper] + width
    return names.write(result)


def _steps_of_horizon(name: str, table: pd.DataFrame, columns: list[str]) -> Array:
    """Return each row's step of its forecast, from 1, by the order of dates; check that a table has the columns."""
    if missing := [column for column in columns if column not in table]:
        raise UserError(
            f"{name} has no column {', '.join(map(repr, missing))} but {', '.join(map(str, table.columns))}: "
            "expected the columns of SeriesModel.cross_validation; name the bounds with lower= and upper="
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
