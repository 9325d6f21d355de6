"""Appearance and wording of all reports: colours of lines, pages and probabilities; names of symbols and units."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# Okabe and Ito's colour-blind-safe set, without those which have little contrast on a white or on a dark page.
BLUE, ORANGE, GREEN, PINK, AMBER, SKY = LINES = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
)
GREY = "#8a8a8a"
MARKERS = "osD^vPX*<>ph"


class Page(NamedTuple):
    """Colours of a page: background, text, secondary text, rules of tables, and the grid of pictures."""

    ground: str
    ink: str
    faint: str
    rule: str
    grid: str


LIGHT = Page("#fff", "#1b1b1b", "#5f6368", "#d5d7da", "#e4e4e4")
DARK = Page("#121416", "#e6e6e6", "#9aa0a6", "#3a3d41", "#303438")


def style(page: Page) -> Any:  # matplotlib's own type lists all keys
    """Return Matplotlib's settings for a picture on a page."""
    ink_keys = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    return {
        "axes.axisbelow": True,
        "axes.facecolor": page.ground,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": page.ground,
        "font.size": 9,
        "grid.color": page.grid,
        "grid.linewidth": 0.6,
        "legend.columnspacing": 1.4,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "legend.handlelength": 2.6,
        "lines.linewidth": 1.5,
        "lines.markersize": 4.5,
        "text.parse_math": False,
        **dict.fromkeys(ink_keys, page.ink),
    }


# Matplotlib's cividis at 33 equal steps, copied so that text reports need no Matplotlib.
_CODES = (
    "00224e 00285b 002e6a 053371 1a386f 273e6e 32436d 3b496c 434e6c 4b546c 535a6d "
    "5a5f6e 61656f 686a71 6f7073 767676 7d7c78 848279 8c8878 938e78 9b9476 a39a74 "
    "aba072 b4a76f bcae6c c4b468 cdbb63 d5c25e dec958 e7d150 f0d846 f9e03a fee838"
)
PALETTE = tuple(f"#{code}" for code in _CODES.split())


def colour_ends(probabilities: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the colour scale: 1st and 99th percentile, which show a narrow range of probabilities, too.

    Args:
        probabilities: Probabilities to colour.

    Returns:
        Two probabilities; (0, 1) if there are none or if all are equal.
    """
    if not probabilities:
        return (0.0, 1.0)
    low, high = map(float, np.quantile(probabilities, [0.01, 0.99]))
    return (low, high) if high - low > 1e-3 else (0.0, 1.0)


def level(probability: float, scale: tuple[float, float]) -> int:
    """Return the colour of a probability.

    Args:
        probability: Probability in [0, 1].
        scale: Probabilities of the first and the last colour; values outside are clipped.

    Returns:
        Index into ``PALETTE``.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    low, high = scale
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"scale must be an increasing pair within [0, 1], got ({low}, {high})")
    share = (min(max(probability, low), high) - low) / (high - low)
    return round(share * (len(PALETTE) - 1))


def ink(background: str) -> str:
    """Return black or white, whichever has more contrast.

    Args:
        background: Colour as ``#rrggbb``.

    Returns:
        Colour for text on it, of contrast 4.5 or more (WCAG 2).
    """
    red, green, blue = (_linear(int(background[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # Where (1 + 0.05) / (L + 0.05), white's contrast, equals (L + 0.05) / 0.05, black's.
    return "#000000" if luminance > 0.179 else "#ffffff"


def _linear(channel: float) -> float:
    """Undo the sRGB transfer curve."""
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def in_words(unit: str) -> str:
    """Return a unit in words: ``bits per byte`` for ``bits_per_byte``."""
    return unit.replace("_", " ")


def format_short(value: float) -> str:
    """Return a number with three digits, without exponent from 100 on; a dash if it is not finite."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def with_error(value: float, error: float | None, form: str = ".4f") -> str:
    """Return a value and its standard error: without an error (None or NaN) the value alone, a dash for NaN."""
    if math.isnan(value):
        return "–"
    if error is None or math.isnan(error):
        return format(value, form)
    return f"{value:{form}} ± {error:{form.removeprefix('+')}}"
