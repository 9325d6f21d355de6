"""A text with its boundaries, coloured: in the terminal, and as a web page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from tokenv.evaluation.boundary_stats import CLASSES, CONTEXT, BoundaryStats
from tokenv.evaluation.loaded_run import Segmentation
from tokenv.plotting.characters import Character, characters
from tokenv.plotting.console import coloured_text, console
from tokenv.plotting.html import segment_page
from tokenv.plotting.theme import colour_ends
from tokenv.storage.atomic import write_atomically

TITLE = "Token boundaries"
PAGE_CHARACTERS = 100_000  # of a web page; more make a browser slow


def passage_of(cut: Segmentation) -> list[Character]:
    """The characters that a reader sees of a segmented text."""
    return characters(cut.text, cut.probability_N, cut.boundary_N)


def show(passage: list[Character], shown: int | None = None) -> None:
    """Print the first ``shown`` characters of a passage, coloured; all of them if None."""
    console().print(coloured_text(passage[:shown], scale=scale_of(passage)))
    if shown is not None and len(passage) > shown:
        console().print(f"... and {len(passage) - shown:,} characters more")


def page(title: str, passage: list[Character], step: int) -> str:
    """A passage as a web page.

    Args:
        title: of the passage.
        passage: at least one character.
        step: of the model that drew the boundaries.
    """
    return segment_page({title: passage}, title=TITLE, facts=facts_of(passage, step), scale=scale_of(passage))


def facts_of(passage: list[Character], step: int) -> dict[str, str]:
    """What a page tells of a passage and of the model that drew its boundaries."""
    drawn = sum(character.boundary for character in passage)
    return {"checkpoint": f"step {step}", "boundaries per character": f"{drawn / len(passage):.3f}"}


def habits_tables(found: BoundaryStats) -> dict[str, list[list[str]]]:
    """What a policy has learned, as tables of a page."""
    return {
        "Boundaries by class of byte": [
            ["byte", "of all bytes", "boundaries a byte"],
            *([name, f"{share:.1%}", f"{rate:.3f}"] for name, (share, rate) in found.classes.items()),
        ],
        "Most frequent tokens": [
            ["token", "times"],
            *([readable(token), f"{count:,}"] for token, count in found.tokens),
        ],
        f"Where boundaries are most probable: the last {CONTEXT} bytes": [
            ["bytes", "mean π", "times"],
            *([readable(text), f"{mean:.3f}", f"{count:,}"] for text, mean, count in found.contexts),
        ],
    }


def growth_table(found: Mapping[int, BoundaryStats]) -> dict[str, list[list[str]]]:
    """How boundaries by class of byte came about, as a table of a page; nothing of one moment alone.

    Args:
        found: training symbols to habits in the same text.
    """
    if len(found) < 2:
        return {}
    names = [name for name in CLASSES if any(name in habits.classes for habits in found.values())]
    rates = {name: [habits.classes.get(name, (0.0, math.nan))[1] for habits in found.values()] for name in names}
    return {
        "Boundaries a byte, after so many bytes of training": [
            ["byte", *(f"{symbols:,}" for symbols in found)],
            *([name, *("–" if math.isnan(rate) else f"{rate:.3f}" for rate in of)] for name, of in rates.items()),
        ]
    }


def readable(text: bytes) -> str:
    """Bytes on one line, with blanks that show."""
    return text.decode(errors="backslashreplace").replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥")


def write_pages(
    path: Path,
    passages: Mapping[str, list[Character]],
    facts: Mapping[str, str],
    tables: Mapping[str, list[list[str]]] | None = None,
) -> list[Path]:
    """Write passages of one text, coloured, as web pages that lead to one another.

    Args:
        path: of the first page; the second of ``a.html`` is ``a-2.html``.
        passages: heading to the whole text, which is as long in each.
        facts: the table on every page.
        tables: below the text of every page.

    Returns:
        The pages.
    """
    length = max(map(len, passages.values()))
    starts = range(0, length, PAGE_CHARACTERS)
    paths = [path if number == 1 else path.with_stem(f"{path.stem}-{number}") for number in range(1, len(starts) + 1)]
    scale = scale_of(*passages.values())
    for number, (start, own) in enumerate(zip(starts, paths, strict=True)):
        stop = min(start + PAGE_CHARACTERS, length)
        here = {heading: passage[start:stop] for heading, passage in passages.items()}
        more = {"characters": f"{start + 1:,} to {stop:,} of {length:,}"} if len(paths) > 1 else {}
        near = {"previous page": number - 1, "next page": number + 1}
        links = {name: paths[at].name for name, at in near.items() if 0 <= at < len(paths)}
        drawn = segment_page(here, title=TITLE, facts={**facts, **more}, scale=scale, links=links, tables=tables)
        write_atomically(own, drawn)
    return paths


def scale_of(*passages: list[Character]) -> tuple[float, float]:
    """Ends of the colour scale; the first boundary of each is forced."""
    return colour_ends([character.probability for passage in passages for character in passage[1:] or passage])
