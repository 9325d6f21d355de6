"""Figures: curves over training, series with their patches, legends which fit, and PNG for light and dark pages."""

import io
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from tokenv.core.atomic import write_atomically
from tokenv.plotting.characters import escape_line
from tokenv.plotting.theme import AMBER, BLUE, DARK, GREEN, LIGHT, ORANGE, PINK, SKY, Page, style

Curve: TypeAlias = tuple[Sequence[float], Sequence[float]]  # training symbols and values

_WIDTH = 5.6  # inches, of a picture on a page
_DPI = 180
_LETTER = 0.062  # inches of a letter in a legend
PAPER_WIDTH = 7.2  # inches
PAPER_DPI = 200
_MAX_NAME = 30  # letters of a name in a picture
_SMOOTHING = 50  # the running mean of a curve spans this fraction of it
_HUGE = 1e100  # Matplotlib's arithmetic on axis limits overflows far below the largest float
_BANDS = ((BLUE, 0.14), (AMBER, 0.2))  # transparent, for light and dark pages
_DASHED = (0, (4, 2))
# of channels after the first, which has the colour of text
_CHANNEL_COLOURS = (GREEN, PINK, SKY, AMBER)


def png(figure: Figure) -> bytes:
    """Return a figure as PNG."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A character which the fonts lack is drawn as a box; the warning would send it to the terminal.
        warnings.filterwarnings("ignore", message="(?s)Glyph .* missing from font")
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def save_png(figure: Figure, path: Path) -> Path:
    """Write a picture into an existing folder; an old one is replaced in one step.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomically(path, png(figure))
    return path


@dataclass(frozen=True)
class Picture:
    """A picture for light and for dark pages.

    Attributes:
        name: name of its file, without suffix.
        caption: description.
        light: PNG for a light page.
        dark: PNG for a dark page.
    """

    name: str
    caption: str
    light: bytes
    dark: bytes


def short(name: str) -> str:
    """Return a name on one line, cut after some letters."""
    name = escape_line(name)
    if len(name) <= _MAX_NAME:
        return name
    return name[: _MAX_NAME - 1] + "…"


def draw_both(name: str, caption: str, height: float, draw: Callable[[Figure], None]) -> Picture:
    """Draw a picture for light and for dark pages.

    Args:
        name: name of the picture.
        caption: description of the picture.
        height: height in inches.
        draw: function which fills an empty figure; ``mpl.rcParams["text.color"]`` is the page's colour of text.
    """
    light, dark = (_draw_page(page, _WIDTH, height, _DPI, draw) for page in (LIGHT, DARK))
    return Picture(name, caption, light, dark)


def draw_picture(path: Path, height: float, title: str, draw: Callable[[Figure], None]) -> Path:
    """Draw a picture as wide as the text of a paper, whose letters of 8 to 11 points can be read there.

    Args:
        path: PNG file in an existing folder; an old one is replaced in one step.
        height: height in inches.
        title: title above the picture, printed literally; none if it is empty.
        draw: function which fills an empty figure.

    Raises:
        OSError: the file cannot be written.
    """

    def draw_titled(figure: Figure) -> None:
        if title:
            figure.suptitle(title)
        draw(figure)

    write_atomically(path, _draw_page(LIGHT, PAPER_WIDTH, height, PAPER_DPI, draw_titled))
    return path


def _draw_page(
    page: Page, width: float, height: float, dpi: int, draw: Callable[[Figure], None]
) -> bytes:
    with mpl.rc_context(style(page)):
        figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
        draw(figure)
        return png(figure)


def legend_below(figure: Figure, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Draw a legend below everything, in as many columns as fit; a tuple of handles is drawn side by side."""
    columns = legend_columns(names, figure.get_figwidth())
    side_by_side = {tuple: HandlerTuple(ndivide=None, pad=0)}
    # Matplotlib omits labels which begin with an underscore: the names are set afterwards.
    labels = ["x"] * len(names)
    legend = figure.legend(
        handles, labels, loc="outside lower center", ncols=columns, handler_map=side_by_side
    )
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)


def legend_columns(names: Sequence[str], width: float = _WIDTH) -> int:
    """Return as many columns as fit into a width in inches, whose lengths differ by one at most."""
    for rows in range(1, len(names)):
        columns = math.ceil(len(names) / rows)
        widest = [
            max(map(len, column))
            for column in np.array_split(np.array(names, dtype=object), columns)
        ]
        if sum(0.55 + _LETTER * letters for letters in widest) <= width:
            return columns
    return 1


def drawable(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return where both are finite and not too large to be drawn, bool."""
    return np.asarray((np.abs(x) < _HUGE) & (np.abs(y) < _HUGE))


def running_mean(y: np.ndarray, span: int) -> np.ndarray:
    """Return the mean of the ``span`` values around each, without NaN values and those beyond the ends."""
    known = np.isfinite(y)
    window = np.ones(span)
    total = np.convolve(np.where(known, y, 0.0), window, mode="same")
    count = np.convolve(known, window, mode="same")
    return np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0.5)


def draw_curve(
    axes: Axes, curve: Curve, *, label: str, colour: str, log: bool = False, sparse: bool = False
) -> bool:
    """Draw one curve; a long one faintly, with its running mean on top.

    Args:
        axes: axes to draw on.
        curve: curve, of which values which are not finite are omitted.
        label: label in the legend.
        colour: colour of the line.
        log: whether the vertical axis is logarithmic: values up to 0 are omitted, the mean is geometric.
        sparse: whether there are few values, each drawn as a point.

    Returns:
        Whether it has a value which can be drawn.
    """
    x, y = (np.asarray(values, dtype=float) for values in curve)
    y = np.where(drawable(x, y) & ((y > 0) | (not log)), y, np.nan)
    if not np.isfinite(y).any():
        return False
    span = len(y) // _SMOOTHING
    if sparse:
        axes.plot(x, y, color=colour, marker="o", markersize=4, linewidth=1.2, label=label)
    elif span < 2:
        axes.plot(x, y, color=colour, marker=".", markersize=3, linewidth=1.2, label=label)
    else:
        axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
        name = "mean"
        mean = running_mean(y, span)
        if log:
            name = "geometric mean"
            mean = np.exp(running_mean(np.log(y), span))
        axes.plot(x, mean, color=colour, linewidth=1.8, label=f"{label}, {name} of {span}")
    return True


def draw_values(
    axes: Axes,
    value_NC: np.ndarray,
    boundary_T: ArrayLike,
    *,
    title: str,
    context: int = 0,
    gold_N: ArrayLike | None = None,
) -> None:
    """Draw a series over its patches as alternating bands.

    Args:
        axes: axes to draw on.
        value_NC: values [N, C], NaN where missing.
        boundary_T: whether a patch ends here [T], T <= N.
        title: title above the axes, printed literally.
        context: number of leading steps which are not predicted.
        gold_N: whether a step is the last one before a true change [N]; None if unknown.
    """
    length = len(value_NC)
    colours = (mpl.rcParams["text.color"], *_CHANNEL_COLOURS)
    ends = [*(np.flatnonzero(boundary_T) + 0.5).tolist(), length - 0.5]
    for number, (start, end) in enumerate(zip([-0.5, *ends[:-1]], ends, strict=True)):
        axes.axvspan(start, end, color=_BANDS[number % 2], linewidth=0)
    for number, value_N in enumerate(value_NC.T):
        # Markers show a value between two missing ones.
        axes.plot(
            value_N, color=colours[number % len(colours)], linewidth=1.1, marker=".", markersize=2.5
        )
    if gold_N is not None:
        for step in np.flatnonzero(gold_N):
            axes.axvline(step + 0.5, color=ORANGE, linewidth=1.3, linestyle=_DASHED)
    if context:
        axes.axvspan(
            -0.5,
            context - 0.5,
            facecolor="none",
            edgecolor="0.6",
            hatch="//",
            linewidth=0,
            alpha=0.5,
        )
    axes.set_title(title, loc="left", fontsize="small", parse_math=False)
    axes.set(xlim=(-0.5, length - 0.5))
    axes.grid(visible=False)


def date_labels(date_N: Sequence[Any], count: int = 8) -> tuple[list[int], list[str]]:
    """Return positions on a time axis and labels for them, without midnights and full minutes.

    Args:
        date_N: dates of all steps.
        count: maximal number of labels.
    """
    positions = np.unique(np.linspace(0, len(date_N) - 1, count).round().astype(int)).tolist()
    labels = [str(date_N[position]) for position in positions]
    for ending in (":00", " 00:00"):
        if all(label.endswith(ending) for label in labels):
            labels = [label.removesuffix(ending) for label in labels]
    return positions, labels


def draw_probabilities(axes: Axes, probability_T: ArrayLike) -> None:
    """Draw boundary probabilities [T] as bars."""
    heights = np.asarray(probability_T)
    axes.bar(np.arange(len(heights)), heights, width=1.0, color=BLUE)
    axes.set(ylim=(0, 1), yticks=[0, 1])
    axes.grid(visible=False)


def series_legend(*, context: bool) -> dict[str, Any]:
    """Return the entries of a legend of what ``draw_values`` draws: handles by name."""
    bands = tuple(Patch(color=colour, alpha=alpha, linewidth=0) for colour, alpha in _BANDS)
    entries: dict[str, Any] = {
        "values": Line2D(
            [], [], color=mpl.rcParams["text.color"], linewidth=1.1, marker=".", markersize=2.5
        ),
        "patches": bands,
    }
    if context:
        entries["context, not predicted"] = Patch(
            facecolor="none", edgecolor="0.6", hatch="//", linewidth=0
        )
    return entries


def change_handle() -> Line2D:
    """Return the entry of a legend for the true changes which ``draw_values`` draws."""
    return Line2D([], [], color=ORANGE, linewidth=1.3, linestyle=_DASHED)
