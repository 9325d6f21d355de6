"""The options of series as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenv.core.errors import (
    COUNT,
    COUNT_OR_NULL,
    UserError,
    at_least,
    bounds,
    check_bounds,
    choice,
)

if TYPE_CHECKING:
    from pandas.tseries.offsets import BaseOffset

SYNTHETIC_SERIES = {  # series that need no file, with known change points
    "regimes": "sections with a level, a persistence and a noise of their own",
    "bursts": "calm sections, and short ones in which the series swings wildly",
    "chirps": "sections of a sine whose frequency is their own, with no jump in between",
    "echoes": "quiet sections that end in a brief pulse, which a slow response answers a section later",
}
SUFFIXES = (".csv", ".parquet")
Frequency: TypeAlias = "str | int | BaseOffset | None"
COLUMN_KEYS = ("columns", "past_covariates", "future_covariates")


def _is_frequency(value: Frequency) -> bool:
    """Return whether dates can follow one another by this step."""
    if value is None:
        return True
    if isinstance(value, int):
        return value > 0
    from pandas.tseries.frequencies import to_offset  # takes half a second

    try:
        to_offset(value)
    except (TypeError, ValueError):
        return False
    return True


FREQUENCY = bounds("a frequency of pandas, such as B or 15min, a step, or null", _is_frequency)


@dataclass(frozen=True)
class SeriesConfig:
    """Time series: how they are read, normalised and split by time.

    Attributes:
        context: Leading steps of every sequence, whose mean and standard deviation normalise it; they earn no
            likelihood themselves.
        columns: Value columns, in a list or with commas between; an empty list means all but the date column.
        date: The date column, by which rows must be sorted; null where there is none. A table without the default may
            have `timestamp`, `datetime` or `ds` in its place.
        freq: Frequency of the dates as pandas names it, such as `B`, `MS` or `15min`, or the step between numbers; null
            to infer it.
        joint: Whether a symbol holds all columns of a step; if not, every column is a series of its own.
        past_covariates: Columns which are read beside every series but not predicted, and are known up to the present.
        future_covariates: The same, known for the next `future_steps` steps, such as a calendar, a price or a plan.
        future_steps: Steps ahead for which future covariates are known: `codec.horizon`.
        split: `auto` (for files named ETTh* and ETTm* the literature's 12, 4 and 4 months of 30 days, for others
            fractions) or `fractions`; always by time.
        test: Fraction of the steps reserved for testing, after those for training and validation.
        stride: Steps between the beginnings of two training windows.
        floor: Least scale of a sequence, in standard deviations of the training range.
        tolerance: Steps that a boundary may be off a true one and still count as found.
        count: Number of synthetic series.
        length: Steps of a synthetic series.
        dwell: Mean steps between two changes of a synthetic series.

    Raises:
        UserError: a value is out of range.
    """

    context: int = field(default=32, metadata=COUNT)
    columns: list[str] | str = field(default_factory=list)
    date: str | None = "date"
    freq: str | int | None = field(default=None, repr=False, metadata=FREQUENCY)
    joint: bool = False
    past_covariates: list[str] | str = field(default_factory=list, repr=False)
    future_covariates: list[str] | str = field(default_factory=list, repr=False)
    future_steps: int = field(default=0, metadata=at_least(0), repr=False)
    split: str = field(default="auto", metadata=choice("auto", "fractions"))
    test: float = field(
        default=0.2, metadata=bounds("a fraction from 0 to below 1", lambda value: 0 <= value < 1)
    )
    stride: int = field(default=1, metadata=COUNT)
    floor: float = field(
        default=0.1, metadata=bounds("a positive number", lambda value: 0 < value < math.inf)
    )
    tolerance: int = field(default=2, metadata=at_least(0))
    count: int = field(default=64, metadata=COUNT)
    length: int = field(default=2048, metadata=at_least(2))
    dwell: int = field(default=24, metadata=at_least(4))

    def __post_init__(self) -> None:
        for key in COLUMN_KEYS:
            names = getattr(self, key)
            if isinstance(names, str):
                names = [name.strip() for name in names.split(",") if name.strip()]
                object.__setattr__(self, key, names)
            if not isinstance(names, list | tuple) or not all(
                isinstance(name, str) for name in names
            ):
                raise UserError(
                    f"data.options.{key} is {names!r}; expected names: write \"['HUFL', 'OT']\""
                )
            if len(set(names)) < len(names):
                raise UserError(
                    f"data.options.{key} is {names!r}; expected every name once: drop the others"
                )
        named = [*self.columns, *self.covariates]
        if twice := [
            name for name in self.covariates if named.count(name) > 1 or name == self.date
        ]:
            raise UserError(
                f"data.options.past_covariates is {self.past_covariates!r} and data.options.future_covariates "
                f"{self.future_covariates!r}; {twice[0]!r} is a column of another kind, too: name every column once"
            )
        if self.joint and not self.columns:
            raise UserError(
                "data.options.joint is true and data.options.columns names none; expected their names"
            )
        check_bounds(self, "data.options.")

    @property
    def channels(self) -> int:
        """Number of predicted values of one symbol."""
        return len(self.columns) if self.joint else 1

    @property
    def covariates(self) -> list[str]:
        """Columns which are read but not predicted, those of the past first."""
        return [*self.past_covariates, *self.future_covariates]


@dataclass(frozen=True)
class DirectHeadConfig:
    """What the section ``codec`` says of the direct head; see ``tokenv.series.codec.SeriesCodec``."""

    horizon: int = 0
    direct: bool = False
    linear_path: int = 0

    @classmethod
    def of(cls, codec: Mapping[str, Any]) -> DirectHeadConfig:
        """Read a section, which may have other options, too."""
        options = {item.name: codec[item.name] for item in fields(cls) if item.name in codec}
        return cls(**options)


# Metadata of options of forecasts.
PEERS = ("dlinear",)
SAMPLES = at_least(2)
WINDOWS = at_least(0)
SEASON = bounds("a number of steps, such as 24, or null to estimate it", COUNT_OR_NULL["accepts"])
PEER_NAMES = bounds(
    f"names among {', '.join(PEERS)}",
    lambda names: not isinstance(names, str) and all(name in PEERS for name in names),
)


@dataclass(frozen=True)
class ForecastRequest:
    """Forecasts of test windows to score, as ``tokenv forecast`` does.

    Attributes:
        horizon: steps to forecast; None for all which a run's direct head predicts.
        windows: number of test windows, evenly spaced over the test steps; 0 for one per step.
        direct: whether to use the direct head; else continuations are drawn value by value.
        samples: number of drawn continuations per forecast.
        season: steps of a season; None to estimate it from the training steps.
        peers: further models beside the naive baselines.

    Raises:
        UserError: a number is too small, or a peer model is unknown.
    """

    horizon: int | None = field(default=None, metadata=COUNT_OR_NULL)
    windows: int = field(default=1400, metadata=WINDOWS)
    direct: bool = True
    samples: int = field(default=25, metadata=SAMPLES)
    season: int | None = field(default=None, metadata=SEASON)
    peers: list[str] = field(default_factory=lambda: ["dlinear"], metadata=PEER_NAMES)

    def __post_init__(self) -> None:
        check_bounds(self, "forecast.")

    def check_calibrated(self) -> None:
        """Raise an error unless these forecasts can be made at a shifted rate, by runs which are calibrated."""
        if not self.direct:
            raise UserError(
                "calibrate = True with forecast.direct = False: expected direct forecasts, which alone are made at a "
                "shifted rate, or no calibration"
            )
