"""What to read and how to cut it: the data part of a run's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenv.core.errors import UserError
from tokenv.data.series.config import SYNTHETIC_SERIES, SeriesConfig
from tokenv.storage import trust

BUILT_IN = {  # texts that need no file
    "python": "the interpreter's standard library, as source text",
    "prose": "the interpreter's documentation, in English",
    "words": "a synthetic language without spaces, whose word ends are known",
}
HUB_PREFIX = "hub:"
CUTS = ("chunk", "document")
KINDS = ("text", "series")
SERIES_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class DataConfig:
    """Where the documents come from and how they become sequences.

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
        series: What only series have.

    Raises:
        UserError: If a value is out of range.
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
        """How many symbols a boundary may be off a true one and still count."""
        return self.series.tolerance if self.kind == "series" else 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UserError(f"data.kind is {self.kind!r}; expected {' or '.join(KINDS)}: choose one")
        for name in ("source", "hub_split", "column"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or value == HUB_PREFIX:
                raise UserError(f"data.{name} is {value!r}; expected a non-empty string: write it out")
        if self.cut not in CUTS:
            raise UserError(f"data.cut is {self.cut!r}; expected {' or '.join(CUTS)}: choose one")
        self._require_integer("seq_len", 2)
        self._require_integer("seed", 0)
        self._require_integer("shuffle_buffer", 1)
        self._require_integer("streams", 1)
        self._require_integer("lexicon_size", 2)
        self._require_integer("words_documents", 1)
        if isinstance(self.validation, bool) or not isinstance(self.validation, int | float):
            raise UserError(f"data.validation is {self.validation!r}; expected a number: try 0.02")
        if not 0 < self.validation < 1:
            raise UserError(
                f"data.validation is {self.validation}; expected a fraction strictly between 0 and 1: "
                "try 0.02, or set data.validation_source to validate on other data"
            )
        self._check_kind()
        if self.validation_source is not None and self.validation_source.startswith(HUB_PREFIX):
            raise UserError(
                f"data.validation_source is {self.validation_source!r}; expected a local path or one of "
                f"{', '.join(BUILT_IN)}: drop it to hold out documents of the hub data set itself"
            )

    def _check_kind(self) -> None:
        of_series = self.source in SYNTHETIC_SERIES or self.source.endswith(".csv")
        if self.kind == "text" and of_series:
            raise UserError(
                f"data.source is {self.source!r}, a series, and data.kind is 'text'; expected documents: set "
                "data.kind=series and codec.name=series"
            )
        if self.kind != "series":
            return
        if not of_series and not self.source.endswith(SERIES_SUFFIXES) and not self.source.startswith(HUB_PREFIX):
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

    def _require_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"data.{name} is {value!r}; expected an integer of at least {least}: raise it")


def check_sources(config: DataConfig) -> None:
    """Refuse local data that only a stored run names: see ``tokenv.storage.trust``.

    Raises:
        UserError: the user has named it neither now nor in an earlier command.
    """
    for source in (config.source, config.validation_source):
        if source is not None and source not in BUILT_IN and source not in SYNTHETIC_SERIES:
            trust.check_source(source)
