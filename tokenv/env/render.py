"""What a person sees of an episode: the text, or the series, so far, with its boundaries."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

MARK, STEPS = "│", "▁▂▃▄▅▆▇█"
COLUMNS, CELL_WIDTH, CELL_HEIGHT, MARGIN = 64, 10, 20, 8
PAPER, INK, BOUNDARY, UNREAD = (255, 255, 255), (20, 20, 20), (200, 30, 30), (235, 235, 235)


def levels(symbol_NC: Tensor) -> list[int]:
    """How high a series stands at each step: its first channel's value, 0 to 7, between the least and the largest."""
    value_N = symbol_NC[:, 0, 0].double().nan_to_num()
    low, high = value_N.min(), value_N.max()
    return ((value_N - low) / (high - low).clamp(min=1e-12) * (len(STEPS) - 1)).round().int().tolist()


def as_text(symbol_N: Tensor, action: Sequence[int]) -> str:
    """One line with a mark after each symbol that ends a token.

    Args:
        symbol_N: symbols so far, bytes [N] or of series [N, C, ..].
        action: 1 where a token ends, of the first of them.
    """
    ends = [i + 1 for i, drawn in enumerate(action) if drawn]
    pieces = [slice(start, end) for start, end in zip([0, *ends], [*ends, len(symbol_N)], strict=True)]
    if symbol_N.ndim > 1:
        steps = "".join(STEPS[level] for level in levels(symbol_N))
        return MARK.join(steps[piece] for piece in pieces)
    data = bytes(symbol_N.clamp(0, 255).tolist())
    return MARK.join(_printable(data[piece].decode(errors="backslashreplace")) for piece in pieces)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_image(symbol_N: Tensor, action: Sequence[int], length: int) -> np.ndarray:
    """A picture of as many cells as the sequence will have symbols, uint8 [height, width, 3]; see ``as_text``."""
    rows = -(-length // COLUMNS)
    size = (min(length, COLUMNS) * CELL_WIDTH + 2 * MARGIN, rows * CELL_HEIGHT + 2 * MARGIN)
    picture = Image.new("RGB", size, PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    heights = levels(symbol_N) if symbol_N.ndim > 1 else None
    for i in range(length):
        x, y = MARGIN + i % COLUMNS * CELL_WIDTH, MARGIN + i // COLUMNS * CELL_HEIGHT
        if i >= len(symbol_N):
            draw.rectangle((x, y, x + CELL_WIDTH - 1, y + CELL_HEIGHT - 1), fill=UNREAD)
        elif heights is not None:
            top = y + CELL_HEIGHT - 2 - 2 * heights[i]
            draw.rectangle((x + 1, top, x + CELL_WIDTH - 3, y + CELL_HEIGHT - 2), fill=INK)
        else:
            byte = int(symbol_N[i])
            draw.text((x + 1, y), chr(byte) if 32 <= byte < 127 else "·", fill=INK, font=font)
        if i < len(action) and action[i]:
            draw.line((x + CELL_WIDTH - 1, y, x + CELL_WIDTH - 1, y + CELL_HEIGHT - 1), fill=BOUNDARY, width=2)
    return np.asarray(picture)
