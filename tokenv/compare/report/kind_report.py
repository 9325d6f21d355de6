"""What only one kind of data adds to the report of a comparison."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import ClassVar, NamedTuple

import pandas as pd

from tokenv.compare.comparison import Comparison
from tokenv.compare.report.table import Cell, Column, Table
from tokenv.plotting.figures import Picture


class Matrix(NamedTuple):
    """A table of differences on a page.

    Attributes:
        title: what a cell is, for its key.
        columns: headings.
        rows: headings with a cell for each column; None for an empty one.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell | None]]]


class Summary(NamedTuple):
    """What a page of several protocols shows of a section, side by side.

    Attributes:
        table: few columns of its table; the names are in the order of the first one's mean over the protocols.
        note: note below it.
    """

    table: Table
    note: str


@dataclass(frozen=True)
class Section:
    """A section of a page; its table and conclusion are shown in the terminal, too.

    Attributes:
        name: name of the CSV file with its table, without its ending.
        heading: heading on the page.
        last: whether it follows the figures on tokens, instead of those on methods.
        conclusion: sentences.
        table: table of figures; None for none.
        note: note below the table.
        pictures: names of the pictures.
        matrix: differences; None for none.
        summary: what is shown of it where there are several protocols; None for nothing.
        files: further CSV files by name.
    """

    name: str
    heading: str
    last: bool = False
    conclusion: Sequence[str] = ()
    table: Table | None = None
    note: str = ""
    pictures: Sequence[str] = ()
    matrix: Matrix | None = None
    summary: Summary | None = None
    files: Mapping[str, pd.DataFrame] = field(default_factory=dict)


class KindReport:
    """What the report of a comparison shows of one kind of data alone; this class is for text.

    A kind of data names its class (``DataKind.report``), which is derived from this one.

    Attributes:
        notes: sentences on how to read the figures.

    Args:
        comparison: what to report.
    """

    notes: ClassVar[Sequence[str]] = (
        "BPE guidance reads ahead: the end of a BPE token depends on bytes which are not yet predicted, even with its "
        "boundaries moved right by one. Joint bits add what such boundaries cost where a policy which imitates them "
        "throughout, named beside, predicts them from the past; of causal methods they are the bits per byte.",
    )

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def add_columns(self, frame: pd.DataFrame) -> list[Column]:
        """Return further columns of the table of methods, whose means are its frame; what they need is added to it."""
        return []

    def draw(self) -> Iterator[Picture]:
        """Draw further pictures."""
        return iter(())

    def sections(self, pictures: Collection[str]) -> list[Section]:
        """Return further sections of the page.

        Args:
            pictures: names of all pictures which were drawn.
        """
        return []


def kind_report(comparison: Comparison) -> KindReport:
    """Return what the report shows of the comparison's kind of data alone."""
    target = comparison.methods[0].runs[0].config.data.options.report
    if target is None:
        return KindReport(comparison)
    return resolve_name(target)(comparison)
