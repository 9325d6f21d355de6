"""Boundary probabilities as background colours in a terminal."""

from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from tokenv.report.characters import Character, visible
from tokenv.report.theme import PALETTE, ink, level

_STYLES = tuple(Style(color=ink(colour), bgcolor=colour) for colour in PALETTE)


def coloured_text(chars: Iterable[Character], *, scale: tuple[float, float] = (0.0, 1.0), mark: str = "│") -> Text:
    """Colour text by boundary probability, from blue (low) to yellow (high).

    Args:
        chars: What `tokenv.report.characters.characters` returned.
        scale: The probabilities that get the first and the last colour; those beyond are clipped.
        mark: Written after each character with a boundary, so that boundaries show without colour too.

    Returns:
        Text for a rich console. Nothing in it is taken for markup, and control characters are replaced by
        visible forms; a newline shows as ``↵`` before it breaks the line.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    result = Text(overflow="fold", tab_size=4)
    for char in chars:
        style = _STYLES[level(char.probability, scale)]
        newline = char.text == "\n"
        result.append("↵" if newline else visible(char.text), style)
        if char.boundary:
            result.append(mark)
        if newline:
            result.append("\n")
    return result
