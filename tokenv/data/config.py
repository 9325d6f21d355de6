"""Configuration of the data: what to read and how to cut it into sequences."""

from dataclasses import dataclass, field
from typing import Any

from tokenv.core import trust
from tokenv.core.errors import COUNT, UserError, at_least, bounds, check_bounds, choice
from tokenv.data.kinds import build_kind, option_hint

BUILT_IN = {  # texts that need no file
    "python": "the interpreter's standard library, as source text",
    "prose": "the interpreter's documentation, in English",
    "words": "a synthetic language without spaces, whose word ends are known",
}
HUB_PREFIX = "hub:"


NAME = bounds(
    "a text which is not empty",
    lambda value: isinstance(value, str) and value not in ("", HUB_PREFIX),
)
HELD_OUT = bounds(
    "a fraction strictly between 0 and 1, such as 0.02 (data.validation_source names other data to validate on)",
    lambda value: isinstance(value, int | float) and 0 < value < 1,
)


@dataclass(frozen=True)
class DataConfig:
    """Source of the data, and how it becomes sequences.

    Attributes:
        source: `python` (the interpreter's standard library), `prose` (its documentation), `words` (a
            synthetic language with known boundaries), a path to a local file or folder, or
            `hub:owner/name` for a data set streamed from the Hugging Face hub (`hub:FOLDER` streams local files
            instead of holding them in memory). What else it may be, `tokenv list datasets` says.
        kind: `text`, or the name of another kind, such as `series`; the codec must be for the same.
        hub_config: The hub data set's configuration, such as `sample-10BT`.
        hub_split: The hub data set's split.
        column: The text column of .jsonl, .json, .parquet and hub data.
        cut: `chunk` joins the documents by newlines and cuts the stream every `seq_len` bytes; `document`
            takes the first `seq_len` bytes of every document that is long enough.
        seq_len: Symbols in a sequence, such as bytes.
        validation: Fraction of the documents, or of the symbols, held out for validation; of streamed data the
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
        options: Options which only this kind of data has: `tokenv list data series` shows those of series.

    Raises:
        UserError: a value is out of range.
    """

    kind: str = field(default="text", metadata={"expected": "a name that tokenv list data shows"})
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
    options: Any = field(
        default_factory=dict,
        metadata={"hint": option_hint, "expected": "a section with keys of its own"},
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", build_kind(self.kind, self.options))
        check_bounds(self, "data.")
        self.options.check_source(self)
        if self.validation_source is not None and self.validation_source.startswith(HUB_PREFIX):
            raise UserError(
                f"data.validation_source is {self.validation_source!r}; expected a local path or one of "
                f"{', '.join(BUILT_IN)}: drop it to hold out documents of the hub data set itself"
            )


def check_sources(config: DataConfig) -> None:
    """Raise an error if only a stored run, not the user, has named the local data: see ``tokenv.core.trust``.

    Raises:
        UserError: the user has not named it, and it is not in the current folder.
    """
    for source in (config.source, config.validation_source):
        if source is not None and source not in BUILT_IN and source not in config.options.sources:
            trust.check_path(source)
