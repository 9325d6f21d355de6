"""Show a text with its boundaries in colour, in the terminal and as a web page."""

import math
from collections.abc import Mapping
from pathlib import Path

from tokenv.core.atomic import write_atomically
from tokenv.evaluation.boundary_stats import CLASSES, CONTEXT, BoundaryStats
from tokenv.evaluation.loaded_run import Segmentation
from tokenv.plotting.characters import Character, characters
from tokenv.plotting.console import coloured_text, console
from tokenv.plotting.html import segment_page
from tokenv.plotting.theme import colour_ends

TITLE = "Token boundaries"
PAGE_CHARACTERS = 100_000  # maximum length of a web page; browsers are slow with more

Passage = list[Character]
Tables = dict[str, list[list[str]]]


def to_passage(segmentation: Segmentation) -> Passage:
    """Return the visible characters of a segmented text."""
    return characters(segmentation.text, segmentation.probability_N, segmentation.boundary_N)


def print_passage(passage: Passage, max_chars: int | None = None) -> None:
    """Print a passage in colour, or its first ``max_chars`` characters."""
    console().print(coloured_text(passage[:max_chars], scale=colour_scale(passage)))
    if max_chars is not None and len(passage) > max_chars:
        console().print(f"... and {len(passage) - max_chars:,} characters more")


def passage_page(title: str, passage: Passage, step: int) -> str:
    """Return a passage as a web page.

    Args:
        title: title of the passage.
        passage: at least one character.
        step: step of the model which drew the boundaries.
    """
    facts = passage_facts(passage, step)
    return segment_page({title: passage}, title=TITLE, facts=facts, scale=colour_scale(passage))


def passage_facts(passage: Passage, step: int) -> dict[str, str]:
    """Return the facts which a page lists about a passage and the model which drew its boundaries."""
    boundaries = sum(character.boundary for character in passage)
    return {
        "checkpoint": f"step {step}",
        "boundaries per character": f"{boundaries / len(passage):.3f}",
    }


def boundary_tables(stats: BoundaryStats) -> Tables:
    """Return tables of a policy's boundaries for a page."""
    return {
        "Boundaries by class of byte": [
            ["byte", "of all bytes", "boundaries a byte"],
            *(
                [name, f"{share:.1%}", f"{rate:.3f}"]
                for name, (share, rate) in stats.classes.items()
            ),
        ],
        "Most frequent tokens": [
            ["token", "times"],
            *([show_whitespace(token), f"{count:,}"] for token, count in stats.tokens),
        ],
        f"Where boundaries are most probable: the last {CONTEXT} bytes": [
            ["bytes", "mean π", "times"],
            *(
                [show_whitespace(text), f"{mean:.3f}", f"{count:,}"]
                for text, mean, count in stats.contexts
            ),
        ],
    }


def training_table(stats: Mapping[int, BoundaryStats]) -> Tables:
    """Return a table of boundaries by class of byte over training; none for a single checkpoint.

    Args:
        stats: statistics of the same text by number of training symbols.
    """
    if len(stats) < 2:
        return {}
    names = [name for name in CLASSES if any(name in each.classes for each in stats.values())]
    rates = {
        name: [each.classes.get(name, (0.0, math.nan))[1] for each in stats.values()]
        for name in names
    }
    return {
        "Boundaries a byte, after so many bytes of training": [
            ["byte", *(f"{symbols:,}" for symbols in stats)],
            *(
                [name, *("–" if math.isnan(rate) else f"{rate:.3f}" for rate in each)]
                for name, each in rates.items()
            ),
        ]
    }


def show_whitespace(text: bytes) -> str:
    """Return bytes as one line with visible whitespace."""
    return (
        text.decode(errors="backslashreplace")
        .replace(" ", "␣")
        .replace("\n", "↵")
        .replace("\t", "⇥")
    )


def write_pages(
    path: Path,
    passages: Mapping[str, Passage],
    facts: Mapping[str, str],
    tables: Tables | None = None,
) -> list[Path]:
    """Write passages of one text in colour as web pages which link to one another.

    Args:
        path: path of the first page; the second of ``a.html`` is ``a-2.html``.
        passages: passages of the whole text, all of one length, by heading.
        facts: rows of the table at the top of every page.
        tables: further tables at the bottom of every page.

    Returns:
        The paths of all pages.
    """
    length = max(map(len, passages.values()))
    starts = range(0, length, PAGE_CHARACTERS)
    paths = [
        path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        for number in range(1, len(starts) + 1)
    ]
    scale = colour_scale(*passages.values())
    for number, (start, own) in enumerate(zip(starts, paths, strict=True)):
        stop = min(start + PAGE_CHARACTERS, length)
        section = {heading: passage[start:stop] for heading, passage in passages.items()}
        more = {"characters": f"{start + 1:,} to {stop:,} of {length:,}"} if len(paths) > 1 else {}
        neighbours = {"previous page": number - 1, "next page": number + 1}
        links = {name: paths[i].name for name, i in neighbours.items() if 0 <= i < len(paths)}
        html = segment_page(
            section, title=TITLE, facts={**facts, **more}, scale=scale, links=links, tables=tables
        )
        write_atomically(own, html)
    return paths


def colour_scale(*passages: Passage) -> tuple[float, float]:
    """Return the ends of the colour scale; the first boundary of each passage is left out, since it is forced."""
    return colour_ends(
        [character.probability for passage in passages for character in passage[1:] or passage]
    )
