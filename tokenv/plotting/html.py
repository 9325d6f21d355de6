"""Boundary probabilities as a web page which loads no other file."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from tokenv.plotting.characters import Character, escape
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
        title=escape(title),
        facts=[(escape(name), escape(value)) for name, value in facts.items()],
        passages=[(escape(heading), coloured(text, scale)) for heading, text in passages.items()],
        links=list((links or {}).items()),
        tables=[(escape(name), [[*map(escape, row)] for row in rows]) for name, rows in (tables or {}).items()],
        **legend(scale),
    )


def render(template: str, **values: Any) -> str:
    """Render a template; texts are escaped.

    Args:
        template: Its file, relative to the package's folder, such as ``plotting/segment.html.jinja``.
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
    ticks = [f"{low + (high - low) * i / 4:.3g}" for i in range(5)]
    return {
        "palette": [(colour, ink(colour)) for colour in PALETTE],
        "labels": [("≤ " if low > 0 else "") + ticks[0], *ticks[1:4], ("≥ " if high < 1 else "") + ticks[4]],
    }


def coloured(characters: Iterable[Character], scale: tuple[float, float]) -> list[tuple[str, str, str]]:
    """Return style classes, tooltip and text of stretches of one colour, for ``passage.jinja``.

    Each boundary and each line break is a stretch of its own, so that a long text has few stretches.
    """
    stretches: list[list[Character]] = []
    before = ""  # classes of the last character; empty if its stretch has ended
    for char in characters:
        classes = "" if char.boundary or char.text == "\n" else _classes(char, scale)
        if not classes or classes != before:
            stretches.append([])
        stretches[-1].append(char)
        before = classes
    return [(_classes(each[-1], scale), _tip(each), "".join(escape(c.text) for c in each)) for each in stretches]


def _classes(char: Character, scale: tuple[float, float]) -> str:
    names = f"p{level(char.probability, scale)}"
    return names + " b" if char.boundary else names


def _tip(stretch: list[Character]) -> str:
    start, last = stretch[0].start, stretch[-1].end - 1
    position = f"byte {last}" if start == last else f"bytes {start}–{last}"
    low, high = (_digits(end(c.probability for c in stretch)) for end in (min, max))
    probability = low if low == high else f"{low} to {high}"
    return f"π = {probability} · {position}" + (" · boundary" if stretch[-1].boundary else "")


def _digits(probability: float) -> str:
    # Two decimals would show 0.002, which is common where boundaries are rare, as 0.00.
    return f"{probability:.2f}" if 0.1 <= probability <= 0.9 else f"{probability:.4f}"


@cache
def _environment() -> Environment:
    folder = files("tokenv")
    loader = FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8"))
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.globals |= {"light": LIGHT, "dark": DARK, "accent": BLUE.lower()}
    return pages
