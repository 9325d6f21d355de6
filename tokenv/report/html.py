"""Boundary probabilities as a web page that needs nothing but itself."""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from tokenv.report.characters import Character, visible
from tokenv.report.theme import BLUE, DARK, LIGHT, PALETTE, ink, level


def segment_page(
    passages: Mapping[str, Iterable[Character]],
    *,
    title: str,
    facts: Mapping[str, str],
    scale: tuple[float, float] = (0.0, 1.0),
) -> str:
    """Draw passages coloured by boundary probability, with a thin line at each boundary.

    Args:
        passages: Heading → text, in order; up to some 100 kB together keeps the page quick.
        title: The page's title.
        facts: Name → value of the small table on top: run, boundary rate, bits per byte and so on.
        scale: The probabilities that get the first and the last colour; those beyond are clipped, and the
            legend says so.

    Returns:
        One HTML document, to be written as UTF-8. It loads nothing and runs no script.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    return render(
        "report/segment.html.jinja",
        title=visible(title),
        facts=[(visible(name), visible(value)) for name, value in facts.items()],
        passages=[(visible(heading), coloured(text, scale)) for heading, text in passages.items()],
        **legend(scale),
    )


def render(template: str, **values: Any) -> str:
    """Fill a template; whatever text comes in is escaped.

    Args:
        template: Its file, from the package's own folder on, such as ``report/segment.html.jinja``.
        values: What its variables stand for.

    Returns:
        The document.
    """
    return _environment().get_template(template).render(**values)


def legend(scale: tuple[float, float]) -> dict[str, list[Any]]:
    """What ``passage.jinja`` draws the colours and their legend from.

    Args:
        scale: The probabilities that get the first and the last colour.

    Returns:
        ``palette``, pairs of background and text colour, and ``labels``, five from left to right.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    low, high = scale
    level(low, scale)  # refuses a bad scale even where there is no text to colour
    ticks = [f"{low + (high - low) * i / 4:.3g}" for i in range(5)]
    return {
        "palette": [(colour, ink(colour)) for colour in PALETTE],
        "labels": [("≤ " if low > 0 else "") + ticks[0], *ticks[1:4], ("≥ " if high < 1 else "") + ticks[4]],
    }


def coloured(characters: Iterable[Character], scale: tuple[float, float]) -> list[tuple[str, str, str]]:
    """Style classes, tooltip and text of each character, for ``passage.jinja`` to draw."""
    return [(_classes(c, scale), _tip(c), visible(c.text)) for c in characters]


def _classes(char: Character, scale: tuple[float, float]) -> str:
    names = f"p{level(char.probability, scale)}"
    return names + " b" if char.boundary else names


def _tip(char: Character) -> str:
    last = char.end - 1
    place = f"byte {last}" if char.start == last else f"bytes {char.start}–{last}"
    return f"π = {_digits(char.probability)} · {place}" + (" · boundary" if char.boundary else "")


def _digits(probability: float) -> str:
    # Two decimals would show a probability of 0.002, usual where boundaries are rare, as none at all.
    return f"{probability:.2f}" if 0.1 <= probability <= 0.9 else f"{probability:.4f}"


@cache
def _environment() -> Environment:
    folder = files("tokenv")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.globals |= {"light": LIGHT, "dark": DARK, "accent": BLUE.lower()}
    return made
