"""Series: split by time, cut into windows, and framed.

A symbol is float64 [C, 5]: for every channel the value (NaN where missing), the location and the scale of the
window's frame, 1 where the value's likelihood counts, else 0, and the last value before it that is not missing (the
location, where there is none). The frame is the mean and standard deviation of the
window's first `context` steps, which do not count, so that nothing that counts is normalised by its own future
(reversible instance normalisation, Kim et al. 2022, made causal).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenv.core.errors import UserError
from tokenv.data.chunks import SequenceBatch
from tokenv.data.config import HUB_PREFIX, DataConfig, check_sources
from tokenv.data.in_memory import InMemoryBlocks, low_discrepancy_order
from tokenv.data.series.config import SYNTHETIC_SERIES
from tokenv.data.series.synthetic import synthetic_series
from tokenv.data.series.tables import Recording, read_hub, read_table

Array = np.ndarray[Any, Any]
ETT_ROWS_PER_HOUR = {"ETTh": 1, "ETTm": 4}
ETT_MONTHS = (12, 4, 4)
CONSTANT = 1e-12  # a standard deviation of less than so much of the mean is rounding


class SplitBorders(NamedTuple):
    """Where the training, validation and test steps of a series end."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class Series:
    """One series of C channels.

    Attributes:
        name: For people.
        columns: The C channels' names.
        value_LC: float64 [L, C], NaN where missing.
        borders: Its split.
        mean_C: Mean of the training steps, by which the literature standardises; 0 where there is no value.
        std_C: Standard deviation of the training steps; 1 where it is 0 or unknown.
        gold_L: bool [L], True at the last step before a change; None if unknown.
        date_L: Dates of the steps; None if unknown.
    """

    name: str
    columns: list[str]
    value_LC: Array
    borders: SplitBorders
    mean_C: Array
    std_C: Array
    gold_L: Array | None = None
    date_L: list[Any] | None = None

    def standardise(self, value: Array) -> Array:
        """Values in standard deviations from the mean, both of the training steps: [.., C] -> [.., C]."""
        return (value - self.mean_C) / self.std_C


def moments(value_NC: Array, axis: int = 0) -> tuple[Array, Array]:
    """Mean and standard deviation along an axis, missing values left out; NaN where there is no value."""
    seen = ~np.isnan(value_NC)
    count = seen.sum(axis).astype(np.float64)
    count[count == 0] = np.nan
    mean = np.where(seen, value_NC, 0.0).sum(axis) / count
    deviation = np.where(seen, value_NC - np.expand_dims(mean, axis), 0.0)
    return mean, np.sqrt(np.square(deviation).sum(axis) / count)


def normalise_window(value_BNC: Array, context: int, *, mean_BC: Array, std_BC: Array, floor: float) -> Array:
    """Make symbols of values.

    Args:
        value_BNC: Values [B, N, C], NaN where missing.
        context: Leading steps that give location and scale, and do not count.
        mean_BC: Location [B, C] where the context holds no value.
        std_BC: Positive [B, C]: the scale where the context holds no value.
        floor: Least scale, in units of `std_BC`.

    Returns:
        Symbols, float64 [B, N, C, 5].
    """
    location_BC, scale_BC = moments(value_BNC[:, :context], axis=1)
    location_BC = np.where(np.isnan(location_BC), mean_BC, location_BC)
    scale_BC = np.where(np.isnan(scale_BC), std_BC, np.maximum(scale_BC, floor * std_BC))
    symbol_BNC5 = np.empty((*value_BNC.shape, 5))
    symbol_BNC5[..., 0] = value_BNC
    symbol_BNC5[..., 1] = location_BC[:, None]
    symbol_BNC5[..., 2] = scale_BC[:, None]
    symbol_BNC5[..., 3] = (np.arange(value_BNC.shape[1]) >= context)[:, None]
    symbol_BNC5[..., 4] = _last(value_BNC, location_BC)
    return symbol_BNC5


def _last(value_BNC: Array, first_BC: Array) -> Array:
    """The last value before each step that is not missing; `first_BC` where there is none."""
    before_BNC = np.concatenate([first_BC[:, None], value_BNC[:, :-1]], 1)
    step_BNC = np.where(np.isnan(before_BNC), 0, np.arange(before_BNC.shape[1])[None, :, None])
    return np.take_along_axis(before_BNC, np.maximum.accumulate(step_BNC, 1), 1)


@dataclass(frozen=True)
class Windows:
    """All P windows of N steps of one side of the split.

    Attributes:
        series: The series.
        config: How they are cut and framed.
        place_P: int64 [P], the series that a window is of.
        start_P: int64 [P], its first step.
        group_P: int64 [P], what batches report as the document: windows of one group depend on one another.
    """

    series: list[Series]
    config: DataConfig
    place_P: Array
    start_P: Array
    group_P: Array

    def __len__(self) -> int:
        return len(self.place_P)

    def take(self, index_B: Array) -> SequenceBatch:
        """Return the windows at `index_B` (integers [B]), in that order."""
        length, options = self.config.seq_len, self.config.series
        chosen = [
            (self.series[p], slice(s, s + length))
            for p, s in zip(self.place_P[index_B], self.start_P[index_B], strict=True)
        ]
        symbol = normalise_window(
            np.stack([series.value_LC[span] for series, span in chosen]),
            options.context,
            mean_BC=np.stack([series.mean_C for series, _ in chosen]),
            std_BC=np.stack([series.std_C for series, _ in chosen]),
            floor=options.floor,
        )
        golds = [series.gold_L[span] for series, span in chosen if series.gold_L is not None]
        return SequenceBatch(
            symbol_BN=torch.from_numpy(symbol),
            origin=[f"{series.name} @ {span.start}" for series, span in chosen],
            gold_BN=torch.from_numpy(np.stack(golds)) if golds else None,
            document_B=torch.from_numpy(self.group_P[index_B]),
        )


class SeriesData:
    """Series, split by time into training, validation and test windows.

    Windows for validation and testing follow one another such that every step counts once (but for the last few,
    where no whole window is left); their contexts reach back over the border. Windows without any value that counts
    are left out.

    Attributes:
        series: The series; every column is one of its own, unless `data.series.joint`.
        fingerprint: Hex digest of the values and of how they are split and cut.

    Raises:
        UserError: If a column holds no value, or either side is too short for a single window.
    """

    def __init__(self, recordings: list[Recording], config: DataConfig) -> None:
        self.config = config
        self.series = [series for recording in recordings for series in _series_of(recording, config)]
        if not self.series:
            raise UserError(f"data source {config.source!r} holds no series: point to another")
        self._train = self.windows("training")
        self._validation = self.windows("validation")
        header = (config.seq_len, config.seed, config.validation, config.series, [s.name for s in self.series])
        digest = hashlib.blake2b(repr(header).encode(), digest_size=16)
        for series in self.series:
            digest.update(np.ascontiguousarray(series.value_LC).tobytes())
        self.fingerprint = digest.hexdigest()

    def blocks(self, seed: int) -> InMemoryBlocks:
        """Return the endless epochs over the training windows, each in a random order."""
        return InMemoryBlocks(self._train, self.config.seed, seed)

    def validation(self, max_sequences: int | None) -> SequenceBatch:
        """Return the validation windows, or `max_sequences` of them that lie evenly over the whole."""
        return self._validation.take(low_discrepancy_order(len(self._validation))[:max_sequences])

    def test(self, max_sequences: int | None = None) -> SequenceBatch:
        """Return the test windows, or `max_sequences` of them that lie evenly over the whole.

        Raises:
            ValueError: If the test steps are too few for a window.
        """
        windows = self.windows("test")
        return windows.take(low_discrepancy_order(len(windows))[:max_sequences])

    def windows(self, side: str, *, before: int | None = None, stride: int | None = None) -> Windows:
        """Cut the `training`, `validation` or `test` steps into windows.

        Args:
            side: Of the split.
            before: Beyond training: leading steps of a window that may lie before the border; None for the context.
            stride: Beyond training: steps between two windows' beginnings; None for `seq_len - before`.

        Raises:
            ValueError: If the steps are too few for a window.
        """
        config = self.config
        length, context = config.seq_len, config.series.context
        before = context if before is None else before
        synthetic = config.source in SYNTHETIC_SERIES
        places, starts, groups = [], [], []
        for place, series in enumerate(self.series):
            border = series.borders
            if side == "training":
                start_W = np.arange(0, border.train - length + 1, config.series.stride)
            else:
                begin, end = (border.train, border.validation) if side == "validation" else border[1:]
                start_W = np.arange(max(begin - before, 0), end - length + 1, stride or length - before)
            whole = (~np.isnan(series.value_LC)).any(1).cumsum()
            start_W = start_W[whole[start_W + length - 1] > whole[start_W + context - 1]]
            places.append(np.full(len(start_W), place))
            starts.append(start_W)
            # Columns recorded at the same time depend on one another; so do sections of one synthetic series.
            groups.append(places[-1] if synthetic else start_W)
        place_P, start_P, group_P = (np.concatenate(x).astype(np.int64) for x in (places, starts, groups))
        if not len(place_P):
            raise UserError(self._too_short(side))
        return Windows(self.series, config, place_P, start_P, group_P)

    def _too_short(self, side: str) -> str:
        config, longest = self.config, max(self.series, key=lambda series: len(series.value_LC))
        border = longest.borders
        return (
            f"data source {config.source!r} has no {side} window: its longest series, {longest.name!r}, has "
            f"{len(longest.value_LC)} steps, of which {border.train} are for training, "
            f"{border.validation - border.train} for validation and {border.test - border.validation} for testing; "
            f"expected at least one window of data.seq_len {config.seq_len} steps (beyond training data.series.context "
            f"{config.series.context} of them may lie before) with a value in it: give more, lower data.seq_len, or "
            "change data.validation and data.series.test"
        )


def load_series(config: DataConfig) -> SeriesData:
    """Read or generate series, split them by time and cut them into windows.

    Raises:
        MissingFileError: If a file does not exist.
        UserError: If the data cannot be read as series, is too little for a training and a validation window, or is a
            file that only a stored run names (see `tokenv.data.config.check_sources`).
    """
    check_sources(config)
    options, source = config.series, config.source
    if source in SYNTHETIC_SERIES:
        value_SL, gold_SL = synthetic_series(source, options.count, options.length, options.dwell, config.seed)
        recordings = [
            Recording(f"{source} {s}", [""], value_L[:, None], gold_L=gold_L)
            for s, (value_L, gold_L) in enumerate(zip(value_SL, gold_SL, strict=True))
        ]
    elif source.startswith(HUB_PREFIX):
        recordings = read_hub(source.removeprefix(HUB_PREFIX), config.hub_config, config.hub_split, options)
    else:
        recordings = read_table(Path(source).expanduser(), options)
    return SeriesData(recordings, config)


def split_borders(source: str, length: int, config: DataConfig) -> SplitBorders:
    """Split a series of `length` steps by time.

    Raises:
        UserError: If the fractions leave nothing to train on.
    """
    per_hour = ETT_ROWS_PER_HOUR.get(Path(source).stem[:4])
    if config.series.split == "auto" and per_hour is not None and not source.startswith(HUB_PREFIX):
        ends = np.cumsum([months * 30 * 24 * per_hour for months in ETT_MONTHS])
        return SplitBorders(*(min(int(end), length) for end in ends))
    if config.validation + config.series.test >= 1:
        raise UserError(
            f"data.validation is {config.validation} and data.series.test {config.series.test}; expected less than 1 "
            "together, the rest is for training: lower one"
        )
    test = int(length * config.series.test)
    validation = int(length * config.validation)
    return SplitBorders(length - test - validation, length - test, length)


def _series_of(recording: Recording, config: DataConfig) -> list[Series]:
    borders = split_borders(config.source, len(recording.value_LC), config)
    return series_of(recording, borders, joint=config.series.joint)


def series_of(recording: Recording, borders: SplitBorders, *, joint: bool) -> list[Series]:
    """Make a series of every column of a recording, or one of all.

    Raises:
        UserError: If a column holds no value.
    """
    for column, value_L in zip(recording.columns, recording.value_LC.T, strict=True):
        if np.isnan(value_L).all() and len(value_L):
            what = f"column {column!r} of {recording.name}" if column else f"series {recording.name!r}"
            raise UserError(f"{what} holds no value: leave it out, or name others in data.series.columns")
    made = []
    for columns in [slice(None)] if joint else [slice(c, c + 1) for c in range(len(recording.columns))]:
        value_LC = recording.value_LC[:, columns]
        mean_C, std_C = moments(value_LC[: borders.train])
        varies_C = std_C > CONSTANT * np.abs(mean_C)
        made.append(
            Series(
                name=recording.name if joint else f"{recording.name} {recording.columns[columns][0]}".rstrip(),
                columns=recording.columns[columns],
                value_LC=value_LC,
                borders=borders,
                mean_C=np.where(np.isnan(mean_C), 0.0, mean_C),
                std_C=np.where(varies_C, std_C, 1.0),
                gold_L=recording.gold_L,
                date_L=recording.date_L,
            )
        )
    return made
