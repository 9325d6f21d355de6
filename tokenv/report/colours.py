"""Colours that order probabilities: from dark blue to bright yellow, also for colour-blind eyes."""

# matplotlib's cividis at 33 equal steps, copied so that text reports need no matplotlib.
_CODES = (
    "00224e 00285b 002e6a 053371 1a386f 273e6e 32436d 3b496c 434e6c 4b546c 535a6d "
    "5a5f6e 61656f 686a71 6f7073 767676 7d7c78 848279 8c8878 938e78 9b9476 a39a74 "
    "aba072 b4a76f bcae6c c4b468 cdbb63 d5c25e dec958 e7d150 f0d846 f9e03a fee838"
)
PALETTE = tuple(f"#{code}" for code in _CODES.split())


def level(probability: float, scale: tuple[float, float]) -> int:
    """Find the colour of a probability.

    Args:
        probability: In [0, 1].
        scale: The probabilities that get the first and the last colour; those beyond are clipped.

    Returns:
        An index into ``PALETTE``.

    Raises:
        ValueError: If ``scale`` is not an increasing pair within [0, 1].
    """
    low, high = scale
    if not 0.0 <= low < high <= 1.0:
        raise ValueError(f"scale must be an increasing pair within [0, 1], got ({low}, {high})")
    share = (min(max(probability, low), high) - low) / (high - low)
    return round(share * (len(PALETTE) - 1))


def ink(background: str) -> str:
    """Choose black or white, whichever is easier to read.

    Args:
        background: A colour as ``#rrggbb``.

    Returns:
        The colour for text upon it, of contrast 4.5 or more (WCAG 2).
    """
    red, green, blue = (_linear(int(background[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # Where (1 + 0.05) / (L + 0.05), white's contrast, equals (L + 0.05) / 0.05, black's.
    return "#000000" if luminance > 0.179 else "#ffffff"


def _linear(channel: float) -> float:
    """Undo the sRGB transfer curve."""
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
