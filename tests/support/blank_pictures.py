"""Stand in for drawing, which takes longer than a tiny run, in tests which do not look at pictures."""

import io

from matplotlib.figure import Figure
from PIL import Image


def blank_png(figure: Figure) -> bytes:
    """Return an empty picture of a figure's size, for ``tokenv.plotting.figures.png``."""
    buffer = io.BytesIO()
    Image.new("L", figure.canvas.get_width_height()).save(buffer, "png")
    return buffer.getvalue()
