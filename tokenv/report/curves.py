"""Training curves as one picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tokenv.report.saving import save_png
from tokenv.report.words import in_words

_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"  # of Okabe and Ito's colour-blind-safe set
_SMOOTHING = 50  # a running mean spans one part in so many of its curve
_HUGE = 1e100  # matplotlib's own arithmetic on axis limits overflows well before floats end


class _Curve(NamedTuple):
    key: str
    label: str
    colour: str


class _Panel(NamedTuple):
    ylabel: str
    curves: tuple[_Curve, ...]
    log: bool = False
    has_target: bool = False


def _loss_panel(unit: str) -> _Panel:
    curves = (
        _Curve(f"train/{unit}", "training", _BLUE),
        _Curve(f"train/{unit}_early", "early exit", _GREEN),
        _Curve(f"validation/{unit}", "validation", _ORANGE),
    )
    return _Panel(in_words(unit), curves)


_PANELS = (
    _Panel(
        "boundaries per symbol",
        (
            _Curve("train/boundary_rate", "training", _BLUE),
            _Curve("validation/boundary_rate", "validation", _ORANGE),
        ),
        has_target=True,
    ),
    _Panel(
        "nats per decision",
        (
            _Curve("train/neg_log_prob", "−log π of the decisions drawn", _BLUE),
            _Curve("train/entropy", "entropy of π", _ORANGE),
        ),
    ),
    _Panel(
        "gradient norm",
        (
            _Curve("train/grad_norm_lm", "language model", _BLUE),
            _Curve("train/grad_norm_policy", "policy", _ORANGE),
        ),
        log=True,
    ),
)


def draw_curves(
    metrics: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    *,
    title: str,
    target_rate: float | None = None,
    unit: str = "bits_per_byte",
) -> Path:
    """Draw loss, boundary rate, decision entropy and gradient norms against training symbols.

    Curves under ``train/`` are drawn faintly with their running mean on top; those under ``validation/`` as
    points joined by lines. A panel without any of its metrics says so; values that are not finite (or
    1e100 and more) are left out, as are those no logarithmic axis can show.

    Args:
        metrics: Name → (training symbols seen, values), two sequences of one length. Names not drawn here are
            ignored.
        path: The PNG to write, in an existing folder; it is replaced in one step.
        title: Written above the panels, literally.
        target_rate: Boundaries per symbol aimed at, drawn dashed.
        unit: Of the losses, as in their metrics' names.

    Returns:
        ``path``.

    Raises:
        ValueError: If ``metrics`` is empty or a metric's two sequences differ in length.
        OSError: If the file cannot be written.
    """
    if not metrics:
        raise ValueError("no metrics to draw")
    for name, (x, y) in metrics.items():
        if len(x) != len(y):
            raise ValueError(f"metric {name}: {len(x)} positions but {len(y)} values")

    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    figure.suptitle(title, parse_math=False)
    for axes, panel in zip(figure.subplots(2, 2).flat, (_loss_panel(unit), *_PANELS), strict=True):
        _draw_panel(axes, panel, metrics, target_rate)

    return save_png(figure, path)


def _draw_panel(
    axes: Axes,
    panel: _Panel,
    metrics: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    target_rate: float | None,
) -> None:
    drawn = [
        _draw_curve(axes, curve, *metrics[curve.key], log=panel.log) for curve in panel.curves if curve.key in metrics
    ]
    axes.set_ylabel(panel.ylabel)
    axes.set_xlabel("training symbols")
    axes.spines[["top", "right"]].set_visible(False)
    if not any(drawn):
        message = "nothing finite to draw" if drawn else "not recorded"
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color="0.4")
        axes.set(xticks=[], yticks=[])
        return
    if panel.has_target and target_rate is not None:
        axes.axhline(target_rate, color="0.25", linestyle="--", linewidth=1, label=f"target {target_rate:g}")
    if panel.log:
        axes.set_yscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    # Above the panel: a place inside may hide a curve, and matplotlib's search for the best one is slow.
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize="small")


def _draw_curve(axes: Axes, curve: _Curve, xs: Sequence[float], ys: Sequence[float], *, log: bool) -> bool:
    """Draw one curve; False if it has no value that can be drawn."""
    x, y = np.asarray(xs, dtype=float), np.asarray(ys, dtype=float)
    y = np.where((np.abs(x) < _HUGE) & (np.abs(y) < _HUGE) & ((y > 0) | (not log)), y, np.nan)
    if not np.isfinite(y).any():
        return False
    span = len(y) // _SMOOTHING
    if curve.key.startswith("validation/"):
        axes.plot(x, y, color=curve.colour, marker="o", markersize=4, linewidth=1.2, label=curve.label)
    elif span < 2:
        axes.plot(x, y, color=curve.colour, marker=".", markersize=3, linewidth=1.2, label=curve.label)
    else:
        axes.plot(x, y, color=curve.colour, alpha=0.25, linewidth=0.8)
        label = f"{curve.label}, {'geometric mean' if log else 'mean'} of {span} (faint: raw)"
        mean = np.exp(running_mean(np.log(y), span)) if log else running_mean(y, span)
        axes.plot(x, mean, color=curve.colour, linewidth=1.8, label=label)
    return True


def running_mean(y: np.ndarray, span: int) -> np.ndarray:
    """Mean of the ``span`` values around each; NaN values and those beyond the ends count for nothing."""
    known = np.isfinite(y)
    window = np.ones(span)
    total = np.convolve(np.where(known, y, 0.0), window, mode="same")
    count = np.convolve(known, window, mode="same")
    return np.divide(total, count, out=np.full(len(y), np.nan), where=count > 0.5)
