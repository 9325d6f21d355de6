"""Configuration of the data: what to read and how to cut it into sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tokenv.core import trust
from tokenv.core.errors import COUNT, UserError, at_least, bounds, check_bounds, choice

BUILT_IN = {  # texts that need no file
    "python": "the interpreter's standard library, as source text",
    "prose": "the interpreter's documentation, in English",
    "words": "a synthetic language without spaces, whose word ends are known",
}
SYNTHETIC_SERIES = {  # series that need no file, with known change points
    "regimes": "sections with a level, a persistence and a noise of their own",
    "bursts": "calm sections, and short ones in which the series swings wildly",
    "chirps": "sections of a sine whose frequency is their own, with no jump in between",
    "echoes": "quiet sections that end in a brief pulse, which a slow response answers a section later",
}
HUB_PREFIX = "hub:"
SERIES_SUFFIXES = (".csv", ".parquet")


NAME = bounds("a text which is not empty", lambda value: isinstance(value, str) and value not in ("", HUB_PREFIX))
COLUMN_KEYS = ("columns", "past_covariates", "future_covariates")
HELD_OUT = bounds(
    "a fraction strictly between 0 and 1, such as 0.02 (data.validation_source names other data to validate on)",
    lambda value: isinstance(value, int | float) and 0 < value < 1,
)


@dataclass(frozen=True)
class SeriesConfig:
    """Options which only series have: reading, normalisation and split.

    Attributes:
        context: Leading steps of every sequence, whose mean and standard deviation normalise it; they earn no
            likelihood themselves.
        columns: Value columns, in a list or with commas between; an empty list means all but the date column.
        date: The date column, by which rows must be sorted; null where there is none. A table without the default may
            have `timestamp`, `datetime` or `ds` in its place.
        joint: Whether a symbol holds all columns of a step; if not, every column is a series of its own.
        past_covariates: Columns which are read beside every series but not predicted, and are known up to the present.
        future_covariates: The same, known for the next `future_steps` steps, such as a calendar, a price or a plan.
        future_steps: Steps ahead for which future covariates are known: `model.horizon`.
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
    joint: bool = False
    past_covariates: list[str] | str = field(default_factory=list, repr=False)
    future_covariates: list[str] | str = field(default_factory=list, repr=False)
    future_steps: int = field(default=0, metadata=at_least(0), repr=False)
    split: str = field(default="auto", metadata=choice("auto", "fractions"))
    test: float = field(default=0.2, metadata=bounds("a fraction from 0 to below 1", lambda value: 0 <= value < 1))
    stride: int = field(default=1, metadata=COUNT)
    floor: float = field(default=0.1, metadata=bounds("a positive number", lambda value: 0 < value < math.inf))
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
            if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
                raise UserError(f"data.series.{key} is {names!r}; expected names: write \"['HUFL', 'OT']\"")
            if len(set(names)) < len(names):
                raise UserError(f"data.series.{key} is {names!r}; expected every name once: drop the others")
        named = [*self.columns, *self.covariates]
        if twice := [name for name in self.covariates if named.count(name) > 1 or name == self.date]:
            raise UserError(
                f"data.series.past_covariates is {self.past_covariates!r} and data.series.future_covariates "
                f"{self.future_covariates!r}; {twice[0]!r} is a column of another kind, too: name every column once"
            )
        if self.joint and not self.columns:
            raise UserError("data.series.joint is true and data.series.columns names none; expected their names")
        check_bounds(self, "data.series.")

    @property
    def channels(self) -> int:
        """Number of predicted values of one symbol."""
        return len(self.columns) if self.joint else 1

    @property
    def covariates(self) -> list[str]:
        """Columns which are read but not predicted, those of the past first."""
        return [*self.past_covariates, *self.future_covariates]


@dataclass(frozen=True)
class DataConfig:
    """Source of the documents or series, and how they become sequences.

    Attributes:
        source: `python` (the interpreter's standard library), `prose` (its documentation), `words` (a
            synthetic language with known boundaries), a path to a local file or folder, or
            `hub:owner/name` for a data set streamed from the Hugging Face hub (`hub:FOLDER` streams local files
            instead of holding them in memory). Of series: `regimes`, `bursts`,
            `chirps` or `echoes` (synthetic, with known change points), a .csv or .parquet file, or `hub:owner/name`.
        kind: `text` or `series`; the codec must be for the same.
        hub_config: The hub data set's configuration, such as `sample-10BT`.
        hub_split: The hub data set's split.
        column: The text column of .jsonl, .json, .parquet and hub data.
        cut: `chunk` joins the documents by newlines and cuts the stream every `seq_len` bytes; `document`
            takes the first `seq_len` bytes of every document that is long enough.
        seq_len: Symbols in a sequence: bytes, or steps of a series.
        validation: Fraction of the documents, or of a series' steps, held out for validation; of streamed data the
            fraction of its shards, at least one, or, where there are fewer than 20, of its documents, at least 0.05.
        validation_source: Another local source to validate on, instead of holding documents out.
        seed: Seed of the split, of the document order and of the synthetic language.
        group_duplicates: Whether near-duplicate documents, which share a fifth of their 32-byte windows, are all
            trained on or all held out; of streamed data only equal documents are.
        shuffle_buffer: Documents shuffled together at a time when streaming from the hub, all streams taken together.
        streams: Streams that a data set streamed from the hub is cut into, so that processes of one run read only their
            own: at most so many, the largest number that divides an update's sequences.
        lexicon_size: Distinct words of the synthetic language.
        words_documents: Documents written in the synthetic language.
        series: Options which only series have.

    Raises:
        UserError: a value is out of range.
    """

    kind: str = field(default="text", metadata=choice("text", "series"))
    source: str = field(default="python", metadata=NAME)
    hub_config: str | None = None
    hub_split: str = field(default="train", metadata=NAME)
    column: str = field(default="text", metadata=NAME)
    cut: str = field(default="chunk", metadata=choice("chunk", "document"))
    seq_len: int = field(default=512, metadata=at_least(2))
    validation: float = field(default=0.02, metadata=HELD_OUT)
    validation_source: str | None = None
    seed: int = field(default=0, metadata=at_least(0))
    group_duplicates: bool = True
    shuffle_buffer: int = field(default=10_000, metadata=COUNT)
    streams: int = field(default=16, metadata=COUNT)
    lexicon_size: int = field(default=100, metadata=at_least(2))
    words_documents: int = field(default=2000, metadata=COUNT)
    series: SeriesConfig = field(default_factory=SeriesConfig)

    @property
    def tolerance(self) -> int:
        """Largest distance in symbols at which a boundary counts as a true one."""
        return self.series.tolerance if self.kind == "series" else 0

    def __post_init__(self) -> None:
        check_bounds(self, "data.")
        self._check_source()
        if self.validation_source is not None and self.validation_source.startswith(HUB_PREFIX):
            raise UserError(
                f"data.validation_source is {self.validation_source!r}; expected a local path or one of "
                f"{', '.join(BUILT_IN)}: drop it to hold out documents of the hub data set itself"
            )

    def _check_source(self) -> None:
        holds_series = self.source in SYNTHETIC_SERIES or self.source.endswith(".csv")
        if self.kind == "text" and holds_series:
            raise UserError(
                f"data.source is {self.source!r}, a series, and data.kind is 'text'; expected documents: set "
                "data.kind=series and codec.name=series"
            )
        if self.kind == "text":
            return
        if not holds_series and not self.source.endswith(SERIES_SUFFIXES) and not self.source.startswith(HUB_PREFIX):
            raise UserError(
                f"data.source is {self.source!r}; expected of a series one of {', '.join(SYNTHETIC_SERIES)}, a "
                f"{' or '.join(SERIES_SUFFIXES)} file or {HUB_PREFIX}owner/name: choose one, or set data.kind=text"
            )
        if self.validation_source is not None:
            raise UserError(
                f"data.validation_source is {self.validation_source!r}; a series is held out by time: leave it out"
            )
        if self.series.context >= self.seq_len:
            raise UserError(
                f"data.series.context is {self.series.context}; expected less than data.seq_len = {self.seq_len}, or "
                "no step is left to predict: lower it"
            )
        if self.series.joint and self.source in SYNTHETIC_SERIES:
            raise UserError(f"data.series.joint is true; {self.source!r} has a single channel: leave it out")


def check_sources(config: DataConfig) -> None:
    """Raise an error if only a stored run, not the user, has named the local data: see ``tokenv.core.trust``.

    Raises:
        UserError: the user has named it neither now nor in an earlier command.
    """
    for source in (config.source, config.validation_source):
        if source is not None and source not in BUILT_IN and source not in SYNTHETIC_SERIES:
            trust.check_path(source)
