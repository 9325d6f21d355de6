"""What only series have: the `data.series` part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenv.core.errors import UserError

SYNTHETIC_SERIES = {  # series that need no file, with known change points
    "regimes": "sections with a level, a persistence and a noise of their own",
    "bursts": "calm sections, and short ones in which the series swings wildly",
    "chirps": "sections of a sine whose frequency is their own, with no jump in between",
    "echoes": "quiet sections that end in a brief pulse, which a slow response answers a section later",
}
SPLITS = ("auto", "fractions")


@dataclass(frozen=True)
class SeriesConfig:
    """How series are read, framed and cut.

    Attributes:
        context: Leading steps of every sequence, whose mean and standard deviation normalise it; they earn no
            likelihood themselves.
        columns: Value columns, in a list or with commas between; none named means all but the date column.
        date: The date column, by which rows must be sorted; null where there is none.
        joint: Whether a symbol holds all columns of a step; if not, every column is a series of its own.
        split: `auto` (for files named ETTh* and ETTm* the literature's 12, 4 and 4 months of 30 days, for others
            fractions) or `fractions`; always by time.
        test: Fraction of the steps kept for testing, after those for training and validation.
        stride: Steps between the beginnings of two training windows.
        floor: Least scale of a sequence, in standard deviations of the training range.
        tolerance: Steps that a boundary may be off a true one and still count as found.
        count: Synthetic series.
        length: Steps of a synthetic series.
        dwell: Mean steps between two changes of a synthetic series.

    Raises:
        UserError: If a value is out of range.
    """

    context: int = 32
    columns: list[str] | str = field(default_factory=list)
    date: str | None = "date"
    joint: bool = False
    split: str = "auto"
    test: float = 0.2
    stride: int = 1
    floor: float = 0.1
    tolerance: int = 2
    count: int = 64
    length: int = 2048
    dwell: int = 24

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            named = [name.strip() for name in self.columns.split(",") if name.strip()]
            object.__setattr__(self, "columns", named)
        if not isinstance(self.columns, list | tuple) or not all(isinstance(name, str) for name in self.columns):
            raise UserError(f"data.series.columns is {self.columns!r}; expected names: write \"['HUFL', 'OT']\"")
        if len(set(self.columns)) < len(self.columns):
            raise UserError(f"data.series.columns is {self.columns!r}; expected every name once: drop the others")
        if self.joint and not self.columns:
            raise UserError("data.series.joint is true and data.series.columns names none; expected their names")
        if self.split not in SPLITS:
            raise UserError(f"data.series.split is {self.split!r}; expected {' or '.join(SPLITS)}: choose one")
        if not 0 <= self.test < 1:
            raise UserError(f"data.series.test is {self.test}; expected a fraction from 0 to below 1: try 0.2")
        if not 0 < self.floor < float("inf"):
            raise UserError(f"data.series.floor is {self.floor}; expected a positive number: try 0.1")
        least = {"context": 1, "stride": 1, "tolerance": 0, "count": 1, "length": 2, "dwell": 4}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise UserError(f"data.series.{name} is {value!r}; expected an integer of at least {low}: raise it")

    @property
    def channels(self) -> int:
        """Values of one symbol."""
        return len(self.columns) if self.joint else 1
