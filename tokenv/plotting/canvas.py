"""What pictures are drawn on: figures, PNG for light and for dark pages, legends that fit."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from tokenv.plotting.characters import escape_line
from tokenv.plotting.theme import DARK, LIGHT, style
from tokenv.storage.atomic import write_atomically

_WIDTH, _DPI, _LETTER = 5.6, 180, 0.062  # inches, dots an inch, inches of one letter of a legend
_LONGEST = 30  # letters of a name in a picture


def titled_figure(width: float, height: float, *, dpi: int, title: str) -> Figure:
    """An empty figure of so many inches, with a title that is written literally."""
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    figure.suptitle(title, parse_math=False)
    return figure


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save_png(figure: Figure, path: Path) -> Path:
    """Write a picture in an existing folder; one that is there is replaced in one step.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, png(figure))
    return path


@dataclass(frozen=True)
class Picture:
    """One picture.

    Attributes:
        name: of its file, without suffix.
        caption: what it shows, in words.
        light: PNG for a light page.
        dark: PNG for a dark page.
    """

    name: str
    caption: str
    light: bytes
    dark: bytes


def short(name: str) -> str:
    """A name on one line, its end left out where it is long."""
    name = escape_line(name)
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


def draw_both(name: str, caption: str, height: float, draw: Callable[[Figure], None]) -> Picture:
    """Draw a picture for both pages.

    Args:
        name: of the picture.
        caption: of the picture.
        height: in inches.
        draw: fills an empty figure; ``mpl.rcParams["text.color"]`` is then the page's ink.
    """
    drawn = []
    for page in (LIGHT, DARK):
        with mpl.rc_context(style(page)), warnings.catch_warnings():
            # A name in a script that the fonts lack shows as boxes; the page beside it shows the name.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
            draw(figure)
            drawn.append(png(figure))
    return Picture(name, caption, *drawn)


def legend_below(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """A legend below everything, in as many columns as fit."""
    columns = legend_columns(names)
    # A label that begins with an underscore would be taken for "not in the legend": the names are set afterwards.
    legend = figure.legend(handles, ["x"] * len(names), loc="outside lower center", ncols=columns)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def legend_columns(names: Sequence[str]) -> int:
    """As many columns as fit, none shorter than the others by more than one."""
    for rows in range(1, len(names)):
        columns = math.ceil(len(names) / rows)
        widest = [max(map(len, column)) for column in np.array_split(np.array(names, dtype=object), columns)]
        if sum(0.55 + _LETTER * letters for letters in widest) <= _WIDTH:
            return columns
    return 1
