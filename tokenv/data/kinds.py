"""Kinds of data: text, which is built in, and those which packages register as ``tokenv.data``."""

from collections import ChainMap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, ClassVar

from tokenv.core.conversion import hint_at, type_hints
from tokenv.core.errors import UserError
from tokenv.core.plugins import Registry, construct, find
from tokenv.core.terminology import TEXT, Terminology


@dataclass(frozen=True)
class DataKind:
    """Kind of data, to be subclassed: its fields are the options which only this kind has, ``data.options``.

    Attributes:
        words: names for its symbols, tokens and documents.
        codec: name of the codec which is made for it.
        sources: values of ``data.source`` which need no file, with a description each.
        suffixes: endings of the files which it reads.
        longest_token: tokens at least so long are counted together.
        references: names of deterministic agents without options, with whose boundaries validations compare those
            which are drawn.
        picture: name of the picture or page which a run draws of held-out sequences.
        draw_picture: function which draws it from a loaded run, its corpus and a path, as ``package.module:function``;
            None for pages of text.
        model: class of the model which ``tokenv.load`` returns, derived from ``tokenv.library.model.Model``, as
            ``package.module:Class``; None for ``Model`` itself.
        forecast_work: function which prepares the forecasts that ``tokenv bench with samples=…`` times, as
            ``package.module:function``. Its arguments are a run's configuration, the number of steps, and the numbers
            of samples; it returns what is forecast, in words, and by name the number of forecasts in a batch and the
            function which makes them. None if there is nothing to forecast.
        evaluation: class of what a comparison measures of a run, as ``package.module:Class``, derived from
            ``tokenv.compare.run_evaluation.RunEvaluation``; None for that of text.
        report: class of what the report of a comparison shows of it, derived from
            ``tokenv.compare.report.kind_report.KindReport``; None for that of text.
        forecast: dataclass of a comparison's section ``forecast``; None for data which are not forecast.
    """

    words: ClassVar[Terminology]
    codec: ClassVar[str]
    sources: ClassVar[Mapping[str, str]] = {}
    suffixes: ClassVar[tuple[str, ...]] = ()
    longest_token: ClassVar[int] = 64
    references: ClassVar[tuple[str, ...]] = ()
    picture: ClassVar[str] = "segments.html"
    draw_picture: ClassVar[str | None] = None
    model: ClassVar[str | None] = None
    forecast_work: ClassVar[str | None] = None
    evaluation: ClassVar[str | None] = None
    report: ClassVar[str | None] = None
    forecast: ClassVar[type | None] = None

    @property
    def boundary_tolerance(self) -> int:
        """Largest distance in symbols at which a boundary counts as a true one."""
        return 0

    @property
    def codec_options(self) -> dict[str, Any]:
        """Arguments which the codec's constructor is given if it takes them."""
        return {}

    @property
    def min_bytes(self) -> int:
        """Lower bound of the memory which the data take."""
        return 0

    @classmethod
    def claims(cls, source: str) -> bool:
        """Return whether a value of ``data.source`` is of this kind for certain."""
        return source in cls.sources

    def check_source(self, data: Any) -> None:
        """Check the data section, a ``tokenv.data.config.DataConfig``; raise a UserError if it is of no use."""

    def check_run(self, config: Any, codec: Any) -> None:
        """Check a run's configuration and its codec together; raise a UserError if they do not fit."""

    def check_forecast(self, config: Any, request: Any) -> None:
        """Check that a run can make the forecasts which a comparison requests; raise a UserError if it cannot."""
        raise UserError(
            f"forecast with data.kind = {config.data.kind!r}: expected series, or leave forecast out"
        )

    def prepare_model(self, lm: Any, dataset: Any) -> None:
        """Set what a new model, a ``tokenv.lm.unet.UNet``, takes from the data before its first update."""

    def load(self, data: Any) -> Any:
        """Read the data which a data section describes, as a ``tokenv.data.stream.Dataset``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(DataKind):
    """Text: documents of bytes, which this package itself reads."""

    words: ClassVar[Terminology] = TEXT
    codec: ClassVar[str] = "bytes"
    longest_token: ClassVar[int] = 24
    references: ClassVar[tuple[str, ...]] = ("whitespace",)

    def check_source(self, data: Any) -> None:
        """Raise an error if another kind of data has this source."""
        for name, kind in all_kinds().items():
            if kind.claims(data.source):
                raise UserError(
                    f"data.source is {data.source!r}, a {kind.words.data}, and data.kind is 'text'; expected "
                    f"documents: set data.kind={name} and codec.name={kind.codec}"
                )


DATA = Registry(
    "tokenv.data", {"text": "tokenv.data.kinds:Text"}, base="tokenv.data.kinds:DataKind"
)


def build_kind(name: str, options: Any) -> DataKind:
    """Build a kind of data with its options.

    Raises:
        UserError: there is no such kind or option, or a value is out of range.
    """
    if isinstance(options, DataKind):
        return options
    if not isinstance(options, Mapping):
        raise UserError(f"data.options = {options!r}: expected a section with keys of its own")
    return construct(f"data.options of {name}", find("data", name, DATA, "data.kind"), options)


def all_kinds() -> dict[str, type[DataKind]]:
    """Return all kinds by name, but those which cannot be imported."""
    kinds = {}
    for name in DATA.names():
        with suppress(UserError):  # of another package, whose user gets the message
            kinds[name] = find("data", name, DATA)
    return kinds  # type: ignore[return-value]


def option_hint(name: str) -> Any:
    """Return the annotation of an option of any kind, by which the command line reads its value."""
    return ChainMap(*map(type_hints, all_kinds().values())).get(name, Any)


def forecast_hint(key: str = "") -> Any:
    """Return the annotation of a comparison's section ``forecast``, or of a key in it; None where nothing forecasts."""
    options = (kind.forecast for kind in all_kinds().values() if kind.forecast is not None)
    section = next(options, NoneType)
    if key:
        return hint_at(section, key)
    return section | None
