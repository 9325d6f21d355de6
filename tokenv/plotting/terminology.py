"""How a comparison speaks of what it compares: of text, and of series."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Terminology:
    """What things are called.

    Attributes:
        data: what is read.
        symbol: one of it.
        token: symbols between two boundaries.
        tokens: several of these.
        document: sequences that depend on one another are of the same.
    """

    data: str
    symbol: str
    token: str
    tokens: str
    document: str


TEXT = Terminology("text", "byte", "token", "tokens", "document")
SERIES = Terminology("series", "step", "patch", "patches", "group")
TERMINOLOGY = {"text": TEXT, "series": SERIES}  # by data.kind


def in_words(unit: str) -> str:
    """A unit as people write it: ``bits per byte`` of ``bits_per_byte``."""
    return unit.replace("_", " ")
