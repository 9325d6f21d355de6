"""Histories to forecast from: test windows with known ends, or the ends of recorded series; read in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.data.stream import low_discrepancy_order
from tokenv.series.config import SYNTHETIC_SERIES, DirectHeadConfig, SeriesConfig
from tokenv.series.tables import Recording, extend_dates
from tokenv.series.windows import Series, SeriesData, SplitBorders, frame_windows, series_of

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ContextBatch:
    """B histories of one length.

    Attributes:
        names: name of each history.
        series: series of each history.
        symbol_BL: framed symbols with K covariates, [B, L, C + K, 5].
        date_BN: dates of history and horizon, N = L + H; None for a series without dates.
        truth_BHC: true values of the horizon; None if unknown.
        cluster_B: number of each window's cluster: windows of one cluster are dependent, because they overlap or lie in
            the same time.
    """

    names: list[str]
    series: list[Series]
    symbol_BL: Tensor
    date_BN: list[list[Any] | None]
    truth_BHC: Array | None
    cluster_B: Tensor

    @property
    def channel_BL(self) -> Tensor:
        """Framed symbols of the C predicted channels alone, [B, L, C, 5]."""
        return self.symbol_BL[:, :, : len(self.series[0].columns)]

    def standardise(self, value_BHC: Array) -> Array:
        """Return values in standard deviations from the mean, both those of each series' training steps."""
        return np.stack(
            [
                series.standardise(value)
                for series, value in zip(self.series, value_BHC, strict=True)
            ]
        )


@dataclass(frozen=True)
class ForecastContexts:
    """Histories in series, after which H steps are forecast.

    Attributes:
        series: all series.
        options: how histories are framed.
        horizon: number of steps H.
        series_P: int64 [P], index of the series of each of P histories.
        start_P: first step of each history.
        end_P: step after the last one of each history.
        cluster_P: see ``ContextBatch``.
        known: whether the H steps after each history are known.
        total: number of all histories, of which these may be a subset.
    """

    series: list[Series]
    options: SeriesConfig
    horizon: int
    series_P: Array
    start_P: Array
    end_P: Array
    cluster_P: Array
    known: bool
    total: int

    def __len__(self) -> int:
        return len(self.series_P)

    def batches(self, size: int) -> Iterator[ContextBatch]:
        """Yield all histories in order, in batches of one length and at most ``size``."""
        length_P = self.end_P - self.start_P
        runs = np.split(np.arange(len(self)), np.flatnonzero(np.diff(length_P)) + 1)
        for run_R in runs:
            for first in range(0, len(run_R), size):
                yield self._take(run_R[first : first + size])

    def _take(self, index_B: Array) -> ContextBatch:
        chosen = [self.series[index] for index in self.series_P[index_B]]
        spans = [
            slice(start, end)
            for start, end in zip(self.start_P[index_B], self.end_P[index_B], strict=True)
        ]
        symbol = frame_windows(chosen, spans, self.options)
        names = [series.name for series in chosen]
        truth_BHC = None
        if self.known:
            names = [f"{name} @ {span.start}" for name, span in zip(names, spans, strict=True)]
            ahead = [slice(span.stop, span.stop + self.horizon) for span in spans]
            truth = [series.value_LC[steps] for series, steps in zip(chosen, ahead, strict=True)]
            truth_BHC = np.stack(truth)
        return ContextBatch(
            names=names,
            series=chosen,
            symbol_BL=torch.from_numpy(symbol),
            date_BN=[self._dates(series, span) for series, span in zip(chosen, spans, strict=True)],
            truth_BHC=truth_BHC,
            cluster_B=torch.from_numpy(self.cluster_P[index_B]),
        )

    def _dates(self, series: Series, span: slice) -> list[Any] | None:
        """Return the dates of a history and of its horizon."""
        if series.date_L is None:
            return None
        if self.known:
            return series.date_L[span.start : span.stop + self.horizon]
        return series.date_L[span.start :] + extend_dates(
            series.date_L, self.horizon, self.options.freq
        )


def history_steps(config: Config, horizon: int, *, held_out: bool = True) -> int:
    """Return the steps of history which a model reads before a forecast: all which its sequences leave.

    Args:
        config: configuration of the run.
        horizon: number of steps to forecast.
        held_out: whether the histories are test windows, whose length is that of the training sequences.

    Raises:
        UserError: ``horizon`` is below 1, leaves no step between the context and the forecast, or does not fit a model
            which has only its direct head: that needs its own horizon for test windows, and no more elsewhere.
    """
    history = config.data.seq_len - horizon
    context = config.data.options.context
    head = DirectHeadConfig.of(config.codec)
    predicted = head.horizon
    if head.direct:
        if held_out and horizon != predicted:
            raise UserError(
                f"horizon = {horizon}: expected {predicted}, all that a model with codec.direct=True predicts"
            )
        if not 1 <= horizon <= predicted:
            raise UserError(
                f"horizon = {horizon}: expected 1 to {predicted}, which this model, with codec.direct=True, predicts"
            )
        return config.data.seq_len - predicted
    if horizon < 1 or history <= context:
        most = config.data.seq_len - context - 1
        raise UserError(
            f"horizon = {horizon}: expected 1 to {most}, data.seq_len - data.options.context - 1 with "
            f"data.seq_len = {config.data.seq_len} and data.options.context = {context}: train a model with a longer "
            "data.seq_len"
        )
    return history


def last_windows(
    recordings: Sequence[Recording],
    config: Config,
    horizon: int,
    *,
    windows: int = 0,
    step: int = 1,
) -> ForecastContexts:
    """Return the ends of recorded series, one for every column, or for all columns if the run's series are joint.

    Args:
        recordings: recordings read with the run's options.
        config: configuration of the run.
        horizon: number of steps H to forecast.
        windows: histories W of every series whose next H steps are known, the last one ending H steps before the
            series does (rolling-origin cross-validation); 0 for the series' ends, after which nothing is known.
        step: steps from one of these histories to the next.

    Raises:
        UserError: a recording is too short, or a column holds no value.
    """
    history = history_steps(config, horizon, held_out=False)
    options = config.data.options
    origin_W = horizon + step * np.arange(windows)[::-1]  # steps before the series' end
    if not windows:
        origin_W = np.zeros(1, int)
    series: list[Series] = []
    for recording in recordings:
        _check_length(recording, options, history, int(origin_W[0]), windows)
        if not windows:
            _check_future(recording, options, horizon)
        length = len(recording.value_LC)
        known = length - int(origin_W[0])
        of_recording = series_of(recording, SplitBorders(known, known, length), options)
        # the columns' names identify the series of a single table
        if len(recordings) == 1 and not options.joint:
            of_recording = [
                replace(each, name=each.columns[0] or each.name) for each in of_recording
            ]
        series += of_recording
    length_S = np.array([len(each.value_LC) for each in series])
    end_P = (length_S[:, None] - origin_W).ravel()
    # those of one length are read together
    order_P = np.argsort(np.minimum(end_P, history), kind="stable")
    end_P = end_P[order_P]
    series_P = order_P // len(origin_W)
    return ForecastContexts(
        series=series,
        options=options,
        horizon=horizon,
        series_P=series_P,
        start_P=np.maximum(end_P - history, 0),
        end_P=end_P,
        cluster_P=series_P,
        known=windows > 0,
        total=len(end_P),
    )


def _check_length(
    recording: Recording, options: SeriesConfig, history: int, held_out: int, windows: int
) -> None:
    """Raise an error unless a recording has more rows than the first history does not know and a context."""
    length = len(recording.value_LC)
    if length - held_out >= min(options.context + 1, history):
        return
    besides = fewer = ""
    if windows:
        besides = f", besides the {held_out} of {windows} windows"
        fewer = ", choose fewer windows"
    raise UserError(
        f"{recording.name} has {length} rows: expected more than the data.options.context = {options.context} that the "
        f"model reads first{besides}, and preferably its full history of {history}: provide more rows{fewer}, or leave "
        "the recording out"
    )


def _check_future(recording: Recording, options: SeriesConfig, horizon: int) -> None:
    """Raise an error unless all future covariates of the horizon are known."""
    if not options.future_covariates:
        return
    assert recording.covariate_MK is not None
    ahead = len(recording.covariate_MK) - len(recording.value_LC)
    if ahead < horizon:
        raise UserError(
            f"{recording.name} knows {', '.join(options.future_covariates)} for {ahead} rows after the last value: "
            f"expected the {horizon} of horizon: append rows with only their dates and these covariates"
        )


def held_out_windows(
    data: SeriesData, horizon: int, count: int = 0, *, side: str = "test"
) -> ForecastContexts:
    """Return the windows whose last ``horizon`` steps are held out, one for every step, as in the literature.

    Args:
        data: series.
        horizon: number of steps H to forecast in every window.
        count: largest number of windows, evenly over all of them; 0 for all.
        side: side of the split, ``test`` or ``validation``.

    Raises:
        UserError: the held-out steps are too few for a window.
    """
    length = data.config.seq_len
    windows = data.windows(side, before=length - horizon, stride=1)
    chosen_P = np.sort(low_discrepancy_order(len(windows))[: count or None])
    series_P = windows.series_P[chosen_P]
    start_P = windows.start_P[chosen_P]
    # columns recorded at the same time depend on one another
    cluster_P = start_P // length * len(data.series)
    if data.config.source in SYNTHETIC_SERIES:
        cluster_P += series_P  # these are independent
    return ForecastContexts(
        series=data.series,
        options=data.config.options,
        horizon=horizon,
        series_P=series_P,
        start_P=start_P,
        end_P=start_P + length - horizon,
        cluster_P=cluster_P,
        known=True,
        total=len(windows),
    )
