"""A text with its boundaries, coloured: in the terminal, and as a web page."""

from __future__ import annotations

from pathlib import Path

from tokenv.report.characters import Character, characters
from tokenv.report.html import segment_page
from tokenv.report.table import console
from tokenv.report.terminal import coloured_text
from tokenv.report.theme import colour_ends
from tokenv.run.stored import Segmented, Trained


def passage_of(cut: Segmented) -> list[Character]:
    """The characters that a reader sees of a segmented text."""
    return characters(cut.text, cut.probability_N, cut.boundary_N)


def show(passage: list[Character], shown: int | None = None) -> None:
    """Print the first ``shown`` characters of a passage, coloured; all of them if None."""
    console().print(coloured_text(passage[:shown], scale=_scale(passage)))


def page(title: str, passage: list[Character], step: int, **facts: str) -> str:
    """A passage as a web page.

    Args:
        title: of the passage.
        passage: at least one character.
        step: of the model that drew the boundaries.
        facts: what else is told of it.
    """
    drawn = sum(character.boundary for character in passage)
    facts = {"checkpoint": f"step {step}", "boundaries per character": f"{drawn / len(passage):.3f}"} | facts
    return segment_page({title: passage}, title="Token boundaries", facts=facts, scale=_scale(passage))


def write_page(path: Path, title: str, passage: list[Character], trained: Trained, **facts: str) -> None:
    """Write a passage of one run, coloured, as a web page."""
    path.write_text(page(title, passage, trained.step, **facts), encoding="utf-8")


def _scale(passage: list[Character]) -> tuple[float, float]:
    """Ends of the colour scale; the first boundary is forced."""
    return colour_ends([character.probability for character in passage[1:] or passage])
