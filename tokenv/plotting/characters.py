"""Text with boundary decisions as characters, and text escaped for terminals and files."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

# Control, format and separator characters and lone surrogates: invisible, or acted on by terminals.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


@dataclass(frozen=True)
class Character:
    r"""One displayed character of a byte string.

    Attributes:
        text: The character, or an escape such as ``\x1b`` for one which has no visible form. Newline and tab are not
            escaped.
        probability: The policy's boundary probability π after the character, in [0, 1].
        boundary: Whether a boundary was drawn on any of its bytes.
        start: Offset of its first byte.
        end: Offset one past its last byte.
    """

    text: str
    probability: float
    boundary: bool
    start: int
    end: int


def characters(
    data: bytes, probability: Sequence[float], boundary: Sequence[bool]
) -> list[Character]:
    r"""Split bytes into UTF-8 characters, each with one probability and one decision.

    A character of several bytes takes the probability of its last byte (the paper's appendix B) and has a
    boundary if any of its bytes has one. A byte which is not part of valid UTF-8 becomes a character ``\xNN``.

    Args:
        data: The text, any N bytes.
        probability: N boundary probabilities, one after each byte.
        boundary: N drawn decisions, one after each byte.

    Returns:
        The characters in order; their byte ranges are contiguous and cover ``data``.

    Raises:
        ValueError: If the three lengths differ or a probability is NaN or outside [0, 1].
    """
    if not len(data) == len(probability) == len(boundary):
        raise ValueError(
            f"one probability and one decision per byte: got {len(data)} bytes, "
            f"{len(probability)} probabilities and {len(boundary)} decisions"
        )
    probabilities = [float(p) for p in probability]
    for i, p in enumerate(probabilities):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"the probability at byte {i} is {p}, not in [0, 1]")

    result = []
    start = 0
    # a byte which is not valid is a lone surrogate
    for character in data.decode("utf-8", "surrogateescape"):
        end = start + len(character.encode("utf-8", "surrogateescape"))
        text = escape(character)
        if "\udc80" <= character <= "\udcff":
            text = f"\\x{data[start]:02x}"
        drawn = any(bool(b) for b in boundary[start:end])
        result.append(Character(text, probabilities[end - 1], drawn, start, end))
        start = end
    return result


def escape(text: str) -> str:
    r"""Replace characters which are invisible, or control a terminal, by a visible form.

    Args:
        text: Any string.

    Returns:
        ``text`` with control and format characters, line separators and lone surrogates written as ``\xNN``
        (ASCII), ``\uNNNN`` or ``\UNNNNNNNN``. Newline and tab are not replaced. Applying it twice changes nothing
        more.
    """
    if text.isprintable():
        return text
    return "".join(map(_escape_character, text))


def escape_line(name: str) -> str:
    """Return a name on one line, escaped."""
    return " ".join(escape(name).split())


def _escape_character(c: str) -> str:
    if c in "\n\t" or unicodedata.category(c) not in _HIDDEN:
        return c
    code = ord(c)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"
