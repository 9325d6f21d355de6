"""Pictures of runs and forecasts: as wide as a paper's text, with letters that can be read there."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from tokenv.evaluation.calibration import RatePoint
from tokenv.evaluation.report import draw_curves, draw_rates
from tokenv.plotting import figures
from tokenv.series.forecaster import ForecastExcerpt
from tokenv.series.patches import SeriesExcerpt
from tokenv.series.report import draw_forecasts, draw_patches

STEPS = np.arange(200)
MODEL = "a model whose name is as long as names are"


def curves(path: Path, title: str) -> None:
    names = (
        "bits_per_byte",
        "bits_per_byte_early",
        "boundary_rate",
        "neg_log_prob",
        "entropy",
        "grad_norm_lm",
    )
    metrics = {f"train/{name}": (STEPS.tolist(), (1.5 + np.sin(STEPS)).tolist()) for name in names}
    draw_curves(metrics, path, title=title, target_rate=0.2)


def patches(path: Path, title: str) -> None:
    value = np.sin(STEPS / 9)[:, None].tolist()
    action = (STEPS % 7 == 0).astype(int).tolist()
    excerpt = SeriesExcerpt(
        "series @ 0", value, [0.2] * len(STEPS), action, (STEPS % 50 == 0).tolist()
    )
    draw_patches([excerpt] * 2, path, title=title, context=32)


def rates(path: Path, title: str) -> None:
    losses = {rate: 3 - rate for rate in (0.1, 0.2, 0.4)}
    points = [
        RatePoint(way, rate, rate, loss, 0.1, 1e6 * rate, run=MODEL)
        for way in ("conditioned", "calibrated")
        for rate, loss in losses.items()
    ]
    draw_rates(points, path, unit="bits_per_byte", title=title, trained=0.2)


def forecasts(path: Path, title: str) -> None:
    history = np.sin(STEPS / 9)[:150, None]
    rest = np.sin(STEPS / 9)[150:, None]
    quantiles = np.stack([rest - 1, rest, rest + 1])
    points = dict.fromkeys(("last value", "season 24", "mean", "dlinear"), rest + 0.5)
    each = ForecastExcerpt(
        "x", ["y"], history, STEPS[:150] % 7 == 0, rest, quantiles, points, rest, None
    )
    draw_forecasts(
        [each] * 4, [0.1, 0.5, 0.9], "of 100 drawn continuations", path, title=title, context=32
    )


TITLE = "Learned $patches_1$, 日本"


@pytest.mark.parametrize(
    ("draw", "title"),
    [(curves, TITLE), (patches, TITLE), (rates, ""), (forecasts, TITLE), (forecasts, "")],
)
def test_a_picture_fits_a_paper(draw, title, tmp_path, monkeypatch):
    """Title as given, letters of 6 points and more at the width of its text, all inside, legends beside the data."""
    drawn: list[Figure] = []
    monkeypatch.setattr(figures, "png", lambda figure: drawn.append(figure) or b"")
    draw(tmp_path / "picture.png", title)
    (figure,) = drawn
    assert figure.get_figwidth() <= 7.2
    canvas = FigureCanvasAgg(figure)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        canvas.draw()
    assert figure.get_suptitle() == title
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()
    ]
    assert min(text.get_fontsize() for text in texts) > 6
    renderer = canvas.get_renderer()
    legends = [*figure.legends, *(axes.get_legend() for axes in figure.axes if axes.get_legend())]
    assert legends
    for legend in legends:
        frame = legend.get_window_extent(renderer)
        assert figure.bbox.contains(*frame.min)
        assert figure.bbox.contains(*frame.max)
        assert not any(
            frame.padded(-2).overlaps(axes.get_window_extent(renderer)) for axes in figure.axes
        )
