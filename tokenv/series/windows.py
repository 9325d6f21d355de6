"""Series: split by time, cut into windows, and normalised.

A symbol is float64 [C, 5]: for every channel the value (NaN where missing), the location and the scale of the
window, 1 where the value's likelihood counts, else 0, and the last value before it that is not missing (the
location, where there is none). Location and scale are the mean and standard deviation of the window's first `context`
steps, which do not count, so that no value which counts is normalised by its own future (reversible
instance normalisation, Kim et al. 2022, made causal). Covariates are K further rows of a symbol, which do not count
and keep their scale: the level of a plan or of a price matters, and the codec standardises them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tokenv.core.errors import UserError
from tokenv.core.sequences import SequenceBatch
from tokenv.data.config import HUB_PREFIX, DataConfig, check_sources
from tokenv.data.stream import InMemoryBlocks, low_discrepancy_order
from tokenv.series.config import SYNTHETIC_SERIES, SeriesConfig
from tokenv.series.synthetic import synthetic_series
from tokenv.series.tables import Recording, read_hub, read_table

Array = np.ndarray[Any, Any]
ETT_ROWS_PER_HOUR = {"ETTh": 1, "ETTm": 4}
ETT_MONTHS = (12, 4, 4)
ROUNDING = 1e-12  # a standard deviation of less than this share of the mean is a rounding error


class SplitBorders(NamedTuple):
    """Ends of the training, validation and test steps of a series."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class Series:
    """Series of C channels.

    Attributes:
        name: description of its origin.
        columns: names of the C channels.
        value_LC: values, float64 [L, C], NaN where missing.
        borders: split of the steps.
        mean_C: mean of the training steps, by which the literature standardises; 0 where there is no value.
        std_C: standard deviation of the training steps; 1 where it is 0 or unknown.
        gold_L: True at the last step before a change, bool [L]; None if unknown.
        date_L: dates of the steps; None if unknown.
        covariate_LK: symbols of the covariates, float64 [L, K, 5]; None if there are none. See `covariate_symbols`.
    """

    name: str
    columns: list[str]
    value_LC: Array
    borders: SplitBorders
    mean_C: Array
    std_C: Array
    gold_L: Array | None = None
    date_L: list[Any] | None = None
    covariate_LK: Array | None = None

    def standardise(self, value: Array) -> Array:
        """Standardise values by the mean and standard deviation of the training steps: [.., C] -> [.., C]."""
        return (value - self.mean_C) / self.std_C


def moments(value_NC: Array, axis: int = 0) -> tuple[Array, Array]:
    """Return mean and standard deviation along an axis without missing values; NaN where there is no value."""
    valid = ~np.isnan(value_NC)
    count = valid.sum(axis).astype(np.float64)
    count[count == 0] = np.nan
    mean = np.where(valid, value_NC, 0.0).sum(axis) / count
    deviation = np.where(valid, value_NC - np.expand_dims(mean, axis), 0.0)
    return mean, np.sqrt(np.square(deviation).sum(axis) / count)


def normalise_window(
    value_BNC: Array, context: int, *, mean_BC: Array, std_BC: Array, floor: float
) -> Array:
    """Convert windows of values into symbols.

    Args:
        value_BNC: values [B, N, C], NaN where missing.
        context: leading steps which determine location and scale, and do not count.
        mean_BC: location [B, C] where the context holds no value.
        std_BC: positive scale [B, C] where the context holds no value.
        floor: least scale, in units of `std_BC`.

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
    symbol_BNC5[..., 4] = _last_values(value_BNC, location_BC)
    return symbol_BNC5


def covariate_symbols(recording: Recording, config: SeriesConfig) -> Array | None:
    """Convert a recording's covariates into symbols, float64 [L, K, 5]; None if there are none.

    Symbol i holds the past covariates of step i and the future covariates of step i + `config.future_steps`, or of
    the last row. So a model which has read symbols up to i knows all future covariates up to that step.
    """
    if recording.covariate_MK is None:
        return None
    length = len(recording.value_LC)
    past_MP, future_MF = np.split(recording.covariate_MK, [len(config.past_covariates)], axis=1)
    ahead_L = np.minimum(np.arange(length) + config.future_steps, len(future_MF) - 1)
    value_LK = np.concatenate([past_MP[:length], future_MF[ahead_L]], 1)
    zero_LK = np.zeros_like(value_LK)
    last_LK = _last_values(value_LK[None], zero_LK[None, 0])[0]
    return np.stack([value_LK, zero_LK, zero_LK + 1, zero_LK, last_LK], -1)


def _standardisation(value_LC: Array) -> tuple[Array, Array]:
    """Return location and scale of steps, 0 and 1 where they have no value or no spread: [L, C] -> [C] each."""
    mean_C, std_C = moments(value_LC)
    varies_C = std_C > ROUNDING * np.abs(mean_C)
    return np.where(np.isnan(mean_C), 0.0, mean_C), np.where(varies_C, std_C, 1.0)


def frame_windows(series: Sequence[Series], spans: Sequence[slice], config: SeriesConfig) -> Array:
    """Cut windows of one length N out of B series, and convert them into symbols, float64 [B, N, C + K, 5]."""
    pairs = list(zip(series, spans, strict=True))
    symbol_BNC5 = normalise_window(
        np.stack([each.value_LC[span] for each, span in pairs]),
        config.context,
        mean_BC=np.stack([each.mean_C for each in series]),
        std_BC=np.stack([each.std_C for each in series]),
        floor=config.floor,
    )
    covariates = [each.covariate_LK[span] for each, span in pairs if each.covariate_LK is not None]
    if not covariates:
        return symbol_BNC5
    return np.concatenate([symbol_BNC5, np.stack(covariates)], 2)


def _last_values(value_BNC: Array, first_BC: Array) -> Array:
    """Return the last value before each step which is not missing; `first_BC` where there is none."""
    before_BNC = np.concatenate([first_BC[:, None], value_BNC[:, :-1]], 1)
    step_BNC = np.where(np.isnan(before_BNC), 0, np.arange(before_BNC.shape[1])[None, :, None])
    return np.take_along_axis(before_BNC, np.maximum.accumulate(step_BNC, 1), 1)


@dataclass(frozen=True)
class Windows:
    """All P windows of N steps of one side of the split.

    Attributes:
        series: series from which the windows are cut.
        config: how they are cut and normalised.
        series_P: index of a window's series, int64 [P].
        start_P: first step of a window, int64 [P].
        group_P: group of dependent windows, which batches report as the document, int64 [P].
    """

    series: list[Series]
    config: DataConfig
    series_P: Array
    start_P: Array
    group_P: Array

    def __len__(self) -> int:
        return len(self.series_P)

    def take(self, index_B: Array) -> SequenceBatch:
        """Return the windows with indices `index_B` (integers [B]), in that order."""
        chosen = [self.series[index] for index in self.series_P[index_B]]
        spans = [slice(start, start + self.config.seq_len) for start in self.start_P[index_B]]
        pairs = list(zip(chosen, spans, strict=True))
        symbol = frame_windows(chosen, spans, self.config.options)
        golds = [series.gold_L[span] for series, span in pairs if series.gold_L is not None]
        gold_BN = None
        if golds:
            gold_BN = torch.from_numpy(np.stack(golds))
        return SequenceBatch(
            symbol_BN=torch.from_numpy(symbol),
            origin=[f"{series.name} @ {span.start}" for series, span in pairs],
            gold_BN=gold_BN,
            document_B=torch.from_numpy(self.group_P[index_B]),
        )


class SeriesData:
    """Series, split by time into training, validation and test windows.

    Windows for validation and testing follow one another such that every step counts once (but for the last few,
    where no whole window is left); their contexts may begin before the border. Windows without any value that counts
    are dropped.

    Attributes:
        series: series of the data; every column is one of its own, unless `data.options.joint`.
        fingerprint: hex digest of the values and of how they are split and cut.

    Raises:
        UserError: a column holds no value, or either side is too short for a single window.
    """

    def __init__(self, recordings: list[Recording], config: DataConfig) -> None:
        self.config = config
        self.series: list[Series] = []
        for recording in recordings:
            borders = split_borders(config.source, len(recording.value_LC), config)
            self.series += series_of(recording, borders, config.options)
        if not self.series:
            raise UserError(f"data source {config.source!r} holds no series: point to another")
        self._train = self.windows("training")
        self._validation = self.windows("validation")
        header = (
            config.seq_len,
            config.seed,
            config.validation,
            config.options,
            [s.name for s in self.series],
        )
        digest = hashlib.blake2b(repr(header).encode(), digest_size=16)
        for series in self.series:
            digest.update(np.ascontiguousarray(series.value_LC).tobytes())
            if series.covariate_LK is not None:
                digest.update(series.covariate_LK.tobytes())
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
            ValueError: the test steps are too few for a window.
        """
        windows = self.windows("test")
        return windows.take(low_discrepancy_order(len(windows))[:max_sequences])

    def covariate_moments(self) -> tuple[Array, Array]:
        """Return the covariates' mean and standard deviation over the training steps of all series, [K] each."""
        known = [
            s.covariate_LK[: s.borders.train, :, 0]
            for s in self.series
            if s.covariate_LK is not None
        ]
        return _standardisation(np.concatenate(known))

    def windows(
        self, side: str, *, before: int | None = None, stride: int | None = None
    ) -> Windows:
        """Cut the `training`, `validation` or `test` steps into windows.

        Args:
            side: side of the split.
            before: leading steps of a validation or test window which may lie before the border; None for the context.
            stride: steps between the beginnings of two validation or test windows; None for `seq_len - before`.

        Raises:
            ValueError: the steps are too few for a window.
        """
        config = self.config
        length = config.seq_len
        context = config.options.context
        if before is None:
            before = context
        indices = []
        starts = []
        for index, series in enumerate(self.series):
            border = series.borders
            if side == "training":
                start_W = np.arange(0, border.train - length + 1, config.options.stride)
            else:
                begin, end = border[:2] if side == "validation" else border[1:]
                start_W = np.arange(
                    max(begin - before, 0), end - length + 1, stride or length - before
                )
            count_L = (~np.isnan(series.value_LC)).any(1).cumsum()  # steps with a value
            start_W = start_W[count_L[start_W + length - 1] > count_L[start_W + context - 1]]
            indices.append(np.full(len(start_W), index))
            starts.append(start_W)
        series_P = np.concatenate(indices).astype(np.int64)
        start_P = np.concatenate(starts).astype(np.int64)
        if not len(series_P):
            raise UserError(self._describe_too_short(side))
        # Columns recorded at the same time depend on one another; so do sections of one synthetic series.
        group_P = series_P if config.source in SYNTHETIC_SERIES else start_P
        return Windows(self.series, config, series_P, start_P, group_P)

    def _describe_too_short(self, side: str) -> str:
        config = self.config
        longest = max(self.series, key=lambda series: len(series.value_LC))
        border = longest.borders
        return (
            f"data source {config.source!r} has no {side} window: its longest series, {longest.name!r}, has "
            f"{len(longest.value_LC)} steps, of which {border.train} are for training, "
            f"{border.validation - border.train} for validation and {border.test - border.validation} for testing; "
            f"expected at least one window of data.seq_len {config.seq_len} steps (beyond training "
            f"data.options.context {config.options.context} of them may lie before) with a value in it: give more, "
            "lower data.seq_len, or change data.validation and data.options.test"
        )


def load_series(config: DataConfig) -> SeriesData:
    """Read or generate series, split them by time and cut them into windows.

    Raises:
        MissingFileError: a file does not exist.
        UserError: the data cannot be read as series, is too little for a training and a validation window, or is a
            file which only a stored run names (see `tokenv.data.config.check_sources`).
    """
    check_sources(config)
    options = config.options
    source = config.source
    if source in SYNTHETIC_SERIES:
        value_SL, gold_SL = synthetic_series(
            source, options.count, options.length, options.dwell, config.seed
        )
        recordings = [
            Recording(f"{source} {s}", [""], value_L[:, None], gold_L=gold_L)
            for s, (value_L, gold_L) in enumerate(zip(value_SL, gold_SL, strict=True))
        ]
    elif source.startswith(HUB_PREFIX):
        recordings = read_hub(
            source.removeprefix(HUB_PREFIX), config.hub_config, config.hub_split, options
        )
    else:
        recordings = read_table(Path(source).expanduser(), options)
    return SeriesData(recordings, config)


def split_borders(source: str, length: int, config: DataConfig) -> SplitBorders:
    """Split a series of `length` steps by time.

    Raises:
        UserError: the fractions leave nothing to train on.
    """
    per_hour = ETT_ROWS_PER_HOUR.get(Path(source).stem[:4])
    if (
        config.options.split == "auto"
        and per_hour is not None
        and not source.startswith(HUB_PREFIX)
    ):
        ends = np.cumsum([months * 30 * 24 * per_hour for months in ETT_MONTHS])
        return SplitBorders(*(min(int(end), length) for end in ends))
    if config.validation + config.options.test >= 1:
        raise UserError(
            f"data.validation is {config.validation} and data.options.test {config.options.test}; expected less than 1 "
            "together, the rest is for training: lower one"
        )
    test = int(length * config.options.test)
    validation = int(length * config.validation)
    return SplitBorders(length - test - validation, length - test, length)


def series_of(recording: Recording, borders: SplitBorders, config: SeriesConfig) -> list[Series]:
    """Return a series for every column of a recording, or one joint series, each with all covariates.

    Raises:
        UserError: a column holds no value.
    """
    for column, value_L in zip(recording.columns, recording.value_LC.T, strict=True):
        if np.isnan(value_L).all() and len(value_L):
            origin = f"series {recording.name!r}"
            if column:
                origin = f"column {column!r} of {recording.name}"
            raise UserError(
                f"{origin} holds no value: leave it out, or name others in data.options.columns"
            )
    parts = [
        (f"{recording.name} {column}".rstrip(), slice(c, c + 1))
        for c, column in enumerate(recording.columns)
    ]
    if config.joint:
        parts = [(recording.name, slice(None))]
    all_series = []
    covariate_LK = covariate_symbols(recording, config)
    for name, columns in parts:
        value_LC = recording.value_LC[:, columns]
        mean_C, std_C = _standardisation(value_LC[: borders.train])
        all_series.append(
            Series(
                name=name,
                columns=recording.columns[columns],
                value_LC=value_LC,
                borders=borders,
                mean_C=mean_C,
                std_C=std_C,
                gold_L=recording.gold_L,
                date_L=recording.date_L,
                covariate_LK=covariate_LK,
            )
        )
    return all_series
