"""What is to be gone on from: test windows, whose ends are known, or the ends of recorded series, some at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.data.config import SYNTHETIC_SERIES, SeriesConfig
from tokenv.data.series.tables import Recording, extend_dates
from tokenv.data.series.windows import Series, SeriesData, SplitBorders, normalise_window, series_of
from tokenv.data.stream import low_discrepancy_order

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class ContextBatch:
    """B histories of one length.

    Attributes:
        names: of each.
        series: that each is of.
        symbol_BL: framed symbols, [B, L, C, 5].
        date_BN: dates of history and horizon, N = L + H; None for a series without.
        truth_BHC: what came; None if unknown.
        cluster_B: windows of one number depend on one another: they overlap, or lie in the same time.
    """

    names: list[str]
    series: list[Series]
    symbol_BL: Tensor
    date_BN: list[list[Any] | None]
    truth_BHC: Array | None
    cluster_B: Tensor

    def standardise(self, value_BHC: Array) -> Array:
        """In standard deviations from the mean, both of each series' training steps."""
        mean_BC, std_BC = (np.stack([getattr(s, name) for s in self.series]) for name in ("mean_C", "std_C"))
        return (value_BHC - mean_BC[:, None]) / std_BC[:, None]


@dataclass(frozen=True)
class ForecastContexts:
    """Places in series, from which H steps are to be forecast; read a batch at a time.

    Attributes:
        series: all of them.
        options: how they are framed.
        horizon: H.
        place_P: int64 [P], the series that each of P histories is of.
        start_P: its first step.
        end_P: the step after its last; the H from there on are known, or not at all.
        cluster_P: see ``ContextBatch``.
        known: whether they are.
        total: how many histories there are, of which these may be some.
    """

    series: list[Series]
    options: SeriesConfig
    horizon: int
    place_P: Array
    start_P: Array
    end_P: Array
    cluster_P: Array
    known: bool
    total: int

    def __len__(self) -> int:
        return len(self.place_P)

    def batches(self, size: int) -> Iterator[ContextBatch]:
        """All of them in order, in batches of one length and at most ``size``."""
        length_P = self.end_P - self.start_P
        runs = np.split(np.arange(len(self)), np.flatnonzero(np.diff(length_P)) + 1)
        for run_R in runs:
            for first in range(0, len(run_R), size):
                yield self._take(run_R[first : first + size])

    def _take(self, index_B: Array) -> ContextBatch:
        spans = list(zip(self.place_P[index_B], self.start_P[index_B], self.end_P[index_B], strict=True))
        chosen, horizon = [self.series[place] for place, _, _ in spans], self.horizon
        symbol_BLC5 = normalise_window(
            np.stack([self.series[place].value_LC[start:end] for place, start, end in spans]),
            self.options.context,
            mean_BC=np.stack([series.mean_C for series in chosen]),
            std_BC=np.stack([series.std_C for series in chosen]),
            floor=self.options.floor,
        )
        truth = [self.series[place].value_LC[end : end + horizon] for place, _, end in spans] if self.known else None
        return ContextBatch(
            names=[f"{self.series[p].name} @ {start}" if self.known else self.series[p].name for p, start, _ in spans],
            series=chosen,
            symbol_BL=torch.from_numpy(symbol_BLC5),
            date_BN=[self._dates(*span) for span in spans],
            truth_BHC=None if truth is None else np.stack(truth),
            cluster_B=torch.from_numpy(self.cluster_P[index_B]),
        )

    def _dates(self, place: int, start: int, end: int) -> list[Any] | None:
        date_L = self.series[place].date_L
        if date_L is None:
            return None
        return date_L[start : end + self.horizon] if self.known else date_L[start:] + extend_dates(date_L, self.horizon)


def history_steps(config: Config, horizon: int) -> int:
    """Steps of history that a model reads before a forecast: all that its sequences leave.

    Raises:
        UserError: ``horizon`` is below 1, leaves no step between the context and the forecast, or is another than
            that of a model which predicts nothing else.
    """
    known, reach = config.data.seq_len - horizon, config.model.horizon
    if config.model.direct:
        if horizon != reach:
            raise UserError(f"horizon = {horizon}: expected {reach}, all that a model with model.direct=True predicts")
        return known
    if horizon < 1 or known <= config.data.series.context:
        most = config.data.seq_len - config.data.series.context - 1
        raise UserError(
            f"horizon = {horizon}: expected 1 to {most}, for the model was trained on sequences of data.seq_len = "
            f"{config.data.seq_len} steps, of which the first {config.data.series.context} are context: train one with "
            "a longer data.seq_len"
        )
    return known


def last_windows(recordings: Sequence[Recording], config: Config, horizon: int) -> ForecastContexts:
    """The ends of recorded series, one of every column, or of all columns where the run's are joint.

    Args:
        recordings: read with the run's options.
        config: of the run.
        horizon: steps to be forecast.

    Raises:
        UserError: a recording is too short, or a column holds no value.
    """
    wanted, options = history_steps(config, horizon), config.data.series
    series: list[Series] = []
    for recording in recordings:
        length = len(recording.value_LC)
        if length < min(options.context + 1, wanted):
            raise UserError(
                f"{recording.name} has {length} rows: expected more than the data.series.context = {options.context} "
                f"that the model reads first, and best its whole history of {wanted}: give more, or leave it out"
            )
        made = series_of(recording, SplitBorders(length, length, length), joint=options.joint)
        if len(recordings) == 1 and not options.joint:  # a table's columns are told apart by their names alone
            made = [replace(each, name=each.columns[0] or each.name) for each in made]
        series += made
    length_P = np.array([len(each.value_LC) for each in series])
    place_P = np.argsort(np.minimum(length_P, wanted), kind="stable")  # those of one length are read together
    end_P, count = length_P[place_P], len(series)
    return ForecastContexts(
        series, options, horizon, place_P, np.maximum(end_P - wanted, 0), end_P, place_P, known=False, total=count
    )


def held_out_windows(data: SeriesData, horizon: int, count: int = 0) -> ForecastContexts:
    """Windows whose last ``horizon`` steps are test steps, one a step, as the literature takes them.

    Args:
        data: the series.
        horizon: steps H of every window that are to be forecast.
        count: at most so many, evenly over all of them; 0 for all.

    Raises:
        UserError: the test steps are too few for a window.
    """
    length = data.config.seq_len
    windows = data.windows("test", before=length - horizon, stride=1)
    chosen_P = np.sort(low_discrepancy_order(len(windows))[: count or None])
    place_P, start_P = windows.series_P[chosen_P], windows.start_P[chosen_P]
    # Columns recorded at the same time depend on one another; synthetic series are independent.
    synthetic = data.config.source in SYNTHETIC_SERIES
    return ForecastContexts(
        series=data.series,
        options=data.config.series,
        horizon=horizon,
        place_P=place_P,
        start_P=start_P,
        end_P=start_P + length - horizon,
        cluster_P=start_P // length * len(data.series) + (place_P if synthetic else 0),
        known=True,
        total=len(windows),
    )
