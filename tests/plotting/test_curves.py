import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from tokenv.evaluation.report import draw_curves
from tokenv.plotting.figures import png, running_mean

X = list(range(0, 200_000, 1000))
ALL = {
    name: (X, [1.0 + 0.1 * (i % 7) for i in range(len(X))])
    for name in (
        "train/bits_per_byte",
        "train/bits_per_byte_early",
        "validation/bits_per_byte",
        "train/boundary_rate",
        "validation/boundary_rate",
        "train/neg_log_prob",
        "train/entropy",
        "train/grad_norm_lm",
        "train/grad_norm_policy",
    )
}


def quadrants(path):
    image = imread(path)
    assert image.shape == (960, 1440, 4)
    assert np.isfinite(image).all()
    return [half for rows in np.split(image, 2) for half in np.split(rows, 2, axis=1)]


def colourful(image) -> int:
    rgb = image[..., :3]
    return int((np.ptp(rgb, axis=-1) > 0.3).sum())


def test_every_panel_is_drawn_and_no_other_file_left(tmp_path):
    path = draw_curves(ALL, tmp_path / "curves.png", title="run $1_x", target_rate=0.2)
    assert path == tmp_path / "curves.png"
    assert all(colourful(part) > 200 for part in quadrants(path))
    assert [p.name for p in tmp_path.iterdir()] == ["curves.png"]


@pytest.mark.parametrize(
    "name",
    ["validation/bits_per_byte", "train/boundary_rate", "train/entropy", "train/grad_norm_lm"],
)
def test_one_metric_alone_colours_one_panel(tmp_path, name):
    parts = quadrants(
        draw_curves({name: ALL[name]}, tmp_path / "c.png", title="t", target_rate=0.2)
    )
    assert sum(colourful(part) > 0 for part in parts) == 1


@pytest.mark.parametrize(
    "values",
    [[], [np.nan] * 3, [1.0, np.inf, -np.inf], [0.0, -1.0, 2.0], [0.0, 0.0], [1e308, -1e308, 1.0]],
)
def test_values_which_cannot_be_drawn_are_omitted(tmp_path, values):
    metrics = {name: (range(len(values)), values) for name in ALL}
    quadrants(draw_curves(metrics, tmp_path / "c.png", title="t"))


def test_unknown_metrics_are_ignored(tmp_path):
    parts = quadrants(draw_curves({"other": ([1], [2])}, tmp_path / "c.png", title="t"))
    assert all(colourful(part) == 0 for part in parts)


def test_the_place_beside_an_odd_last_panel_is_empty(tmp_path):
    metrics = ALL | {"train/boundary_enrichment": ALL["train/entropy"]}
    image = imread(draw_curves(metrics, tmp_path / "c.png", title="t"))
    assert image.shape == (1440, 1440, 4)
    assert colourful(image[960:, :720]) > 200
    below_the_panel_above = image[1280:, 720:]
    assert (below_the_panel_above == 1).all()


def test_failed_write_leaves_nothing_behind(tmp_path):
    target = tmp_path / "c.png"
    target.mkdir()
    with pytest.raises(OSError, match=r"c\.png"):
        draw_curves(ALL, target, title="t")
    assert [p.name for p in tmp_path.iterdir()] == ["c.png"]


def test_running_mean_is_centred_and_skips_gaps():
    y = np.array([1.0, 2.0, 6.0, np.nan, np.nan, np.nan, 4.0])
    np.testing.assert_allclose(running_mean(y, 3), [1.5, 3.0, 4.0, 6.0, np.nan, 4.0, 4.0])


def test_no_warning_prints_what_controls_a_terminal():
    """Matplotlib warns of a character which its fonts lack, and names it as it is; warnings are errors here."""
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.suptitle("a\x1b[31mb\x07\n\u4e2d")
    assert png(figure)[:4] == b"\x89PNG"
