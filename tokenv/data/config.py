"""Configuration of the data: what to read and how to cut it into sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenv.core import trust
from tokenv.core.errors import UserError

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
CUTS = ("chunk", "document")
KINDS = ("text", "series")
SERIES_SUFFIXES = (".csv", ".parquet")
SPLITS = ("auto", "fractions")


def _check_choice(key: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{key} is {value!r}; expected {' or '.join(choices)}: choose one")


def _check_integers(section: str, config: Any, least: dict[str, int]) -> None:
    for name, low in least.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UserError(f"{section}.{name} is {value!r}; expected an integer of at least {low}: raise it")


@dataclass(frozen=True)
class SeriesConfig:
    """Options which only series have: reading, normalisation and split.

    Attributes:
        context: Leading steps of every sequence, whose mean and standard deviation normalise it; they earn no
            likelihood themselves.
        columns: Value columns, in a list or with commas between; an empty list means all but the date column.
        date: The date column, by which rows must be sorted; null where there is none.
        joint: Whether a symbol holds all columns of a step; if not, every column is a series of its own.
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
            names = [name.strip() for name in self.columns.split(",") if name.strip()]
            object.__setattr__(self, "columns", names)
        if not isinstance(self.columns, list | tuple) or not all(isinstance(name, str) for name in self.columns):
            raise UserError(f"data.series.columns is {self.columns!r}; expected names: write \"['HUFL', 'OT']\"")
        if len(set(self.columns)) < len(self.columns):
            raise UserError(f"data.series.columns is {self.columns!r}; expected every name once: drop the others")
        if self.joint and not self.columns:
            raise UserError("data.series.joint is true and data.series.columns names none; expected their names")
        _check_choice("data.series.split", self.split, SPLITS)
        if not 0 <= self.test < 1:
            raise UserError(f"data.series.test is {self.test}; expected a fraction from 0 to below 1: try 0.2")
        if not 0 < self.floor < float("inf"):
            raise UserError(f"data.series.floor is {self.floor}; expected a positive number: try 0.1")
        least = {"context": 1, "stride": 1, "tolerance": 0, "count": 1, "length": 2, "dwell": 4}
        _check_integers("data.series", self, least)

    @property
    def channels(self) -> int:
        """Number of values of one symbol."""
        return len(self.columns) if self.joint else 1


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

    kind: str = "text"
    source: str = "python"
    hub_config: str | None = None
    hub_split: str = "train"
    column: str = "text"
    cut: str = "chunk"
    seq_len: int = 512
    validation: float = 0.02
    validation_source: str | None = None
    seed: int = 0
    group_duplicates: bool = field(default=True, metadata={"stored_default": False})
    shuffle_buffer: int = 10_000
    streams: int = 16
    lexicon_size: int = field(default=100, metadata={"was": "words_lexicon"})
    words_documents: int = 2000
    series: SeriesConfig = field(default_factory=SeriesConfig)

    @property
    def tolerance(self) -> int:
        """Largest distance in symbols at which a boundary counts as a true one."""
        return self.series.tolerance if self.kind == "series" else 0

    def __post_init__(self) -> None:
        _check_choice("data.kind", self.kind, KINDS)
        for name in ("source", "hub_split", "column"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or value == HUB_PREFIX:
                raise UserError(f"data.{name} is {value!r}; expected a non-empty string: write it out")
        _check_choice("data.cut", self.cut, CUTS)
        least = {"seq_len": 2, "seed": 0, "shuffle_buffer": 1, "streams": 1, "lexicon_size": 2, "words_documents": 1}
        _check_integers("data", self, least)
        if isinstance(self.validation, bool) or not isinstance(self.validation, int | float):
            raise UserError(f"data.validation is {self.validation!r}; expected a number: try 0.02")
        if not 0 < self.validation < 1:
            raise UserError(
                f"data.validation is {self.validation}; expected a fraction strictly between 0 and 1: "
                "try 0.02, or set data.validation_source to validate on other data"
            )
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
            trust.check_source(source)
