"""Boundary probabilities as a web page which loads no other file."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from tokenv.plotting.characters import Character, escape, escape_line
from tokenv.plotting.theme import BLUE, DARK, LIGHT, PALETTE, ink, level


def segment_page(
    passages: Mapping[str, Iterable[Character]],
    *,
    title: str,
    facts: Mapping[str, str],
    scale: tuple[float, float] = (0.0, 1.0),
    links: Mapping[str, str] | None = None,
    tables: Mapping[str, Sequence[Sequence[str]]] | None = None,
) -> str:
    """Draw passages coloured by boundary probability, with a thin line at each boundary.

    Args:
        passages: Heading → text, in order; up to some 100 kB together keeps the page quick.
        title: Title of the page.
        facts: Name → value of the small table at the top: run, boundary rate, bits per byte and so on.
        scale: Probabilities of the first and the last colour; values outside are clipped, as the legend says.
        links: Name → address of further pages; none if None.
        tables: Heading → rows of cells, of which the first has the names of the columns; they follow the text.

    Returns:
        HTML document, to be written as UTF-8. It loads nothing and runs no script.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    return render(
        "plotting/segment.html.jinja",
        title=title,
        facts=facts,
        passages=[(heading, coloured(text, scale)) for heading, text in passages.items()],
        links=links or {},
        tables=tables or {},
        **legend(scale),
    )


def render(template: str, **values: Any) -> str:
    """Render a template; texts are escaped, control characters in them, too.

    Args:
        template: Its file, relative to the package's folder, such as ``plotting/segment.html.jinja``. Its filters
            ``line`` and ``data_url`` write a name on one line, and a PNG as an address which holds it.
        values: Values of its variables.
    """
    return _environment().get_template(template).render(**values)


def legend(scale: tuple[float, float]) -> dict[str, list[Any]]:
    """Return the variables from which ``passage.jinja`` draws colours and legend.

    Args:
        scale: Probabilities of the first and the last colour.

    Returns:
        ``palette``, pairs of background and text colour, and ``labels``, five from left to right.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    low, high = scale
    level(low, scale)  # checks the scale where there is no text to colour, too
    labels = [f"{low + (high - low) * i / 4:.3g}" for i in range(5)]
    if low > 0:
        labels[0] = f"≤ {labels[0]}"
    if high < 1:
        labels[4] = f"≥ {labels[4]}"
    return {"palette": [(colour, ink(colour)) for colour in PALETTE], "labels": labels}


def coloured(
    characters: Iterable[Character], scale: tuple[float, float]
) -> list[tuple[str, str, str]]:
    """Return style classes, tooltip and text of stretches of one colour, for ``passage.jinja``.

    Each boundary and each line break is a stretch of its own, so that a long text has few stretches.
    """

    def find_stretch(char: Character) -> tuple[str, int]:
        alone = -1
        if char.boundary or char.text == "\n":
            alone = char.start
        return _classes(char, scale), alone

    result = []
    for (classes, _), group in groupby(characters, find_stretch):
        stretch = list(group)
        text = "".join(char.text for char in stretch)
        result.append((classes, _tip(stretch), text))
    return result


def _classes(char: Character, scale: tuple[float, float]) -> str:
    return f"p{level(char.probability, scale)}{' b' * char.boundary}"


def _tip(stretch: list[Character]) -> str:
    position = f"byte {stretch[0].start}"
    last = stretch[-1].end - 1
    if last > stretch[0].start:
        position = f"bytes {stretch[0].start}–{last}"
    probabilities = [char.probability for char in stretch]
    probability = _digits(min(probabilities))
    high = _digits(max(probabilities))
    if high != probability:
        probability = f"{probability} to {high}"
    return f"π = {probability} · {position}{' · boundary' * stretch[-1].boundary}"


def _digits(probability: float) -> str:
    if 0.1 <= probability <= 0.9:
        return f"{probability:.2f}"
    return f"{probability:.4f}"  # 0.002 is common where boundaries are rare


@cache
def _environment() -> Environment:
    folder = files("tokenv")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    pages = Environment(
        loader=loader,
        autoescape=True,
        finalize=_escape_text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"line": escape_line, "data_url": _data_url}
    pages.globals |= {"light": LIGHT, "dark": DARK, "accent": BLUE.lower()}
    return pages


def _escape_text(value: Any) -> Any:
    """Return what a template writes for a value; text that is HTML already is not changed."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return escape(value)
    return value


def _data_url(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode("ascii")
