"""The words by which messages, tables and pages call one kind of data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Terminology:
    """Names for one kind of data.

    Attributes:
        data: name of the data.
        symbol: name of one symbol.
        token: name of the symbols between two boundaries.
        tokens: plural of ``token``.
        document: name of a group of sequences which depend on one another.
        true_boundaries: name of the boundaries which the data know, if they do.
    """

    data: str
    symbol: str
    token: str
    tokens: str
    document: str
    true_boundaries: str


TEXT = Terminology("text", "byte", "token", "tokens", "document", "true tokens")
