"""A report on series: in their unit, with their windows, with a test column."""

import io
from dataclasses import replace

import numpy as np
import pytest
from comparisons import (
    ALL_OF_SERIES,
    WINDOWS,
    a_comparison,
    a_comparison_of_series,
    a_method,
    changed,
    of_series,
    rows,
)
from matplotlib.image import imread
from pages import Page

from tokenv.compare.report.aggregate import sort_methods
from tokenv.compare.report.page import comparison_page, write_report
from tokenv.compare.report.pictures import draw_pictures
from tokenv.compare.report.report_tables import print_comparison


@pytest.fixture(scope="module")
def comparison():
    methods = [a_method("learned", 2.31), a_method("uniform", 2.5)]
    return a_comparison_of_series([*methods, a_method("random", 2.3)])


@pytest.fixture(scope="module")
def written(comparison, tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    return folder, write_report(comparison, folder)


def test_the_report_of_series_speaks_of_series(comparison, written, capsys):
    _, paths = written
    tables = ["methods.csv", "runs.csv", "pairs.csv", "patch-lengths.csv"]
    pictures = [f"{name}.png" for name in (*ALL_OF_SERIES, *WINDOWS)]
    assert [path.name for path in paths] == ["report.html", *pictures, *tables]
    source = paths[0].read_text(encoding="utf-8")
    page = Page(source)
    assert page.texts == []
    assert page.headings[-2:] == ["The same windows with the boundaries of every method", "Notes"]
    headers = {
        "nats per value ± seeds",
        "error over groups",
        "test ± seeds",
        "boundaries / step",
        "change points",
    }
    assert headers <= set(page.cells)
    # validation and test of the best
    assert {"−0.6950 ± 0.0050", "−0.1950 ± 0.0050"} <= set(page.cells)
    assert source.count("data:image/png;base64,") == 2 * (len(ALL_OF_SERIES) + len(WINDOWS))
    print_comparison(comparison)
    shown = capsys.readouterr().out
    assert "nats per value ± seeds" in shown
    assert "test ± seeds" in shown
    assert "random has the lowest nats per value: −0.6950 ± 0.0050" in shown


def test_tables_of_series_read_back_equal(comparison, written):
    folder, _ = written
    for method, row in zip(sort_methods(comparison), rows(folder / "methods.csv"), strict=True):
        assert (row["method"], float(row["nats_per_value"])) == (method.name, method.loss)
        assert float(row["test_nats_per_value"]) == pytest.approx(
            np.mean([run.evaluation.loss_test for run in method.runs])
        )
        assert float(row["change_points_f1"]) == comparison.mean(method.name, "change points f1")
    runs = [run for method in sort_methods(comparison) for run in method.runs]
    for run, row in zip(runs, rows(folder / "runs.csv"), strict=True):
        assert (float(row["nats_per_value"]), float(row["test_nats_per_value"])) == (
            run.loss,
            run.evaluation.loss_test,
        )
    assert rows(folder / "patch-lengths.csv")[0].keys() == {"method", "steps", "share"}


def test_a_test_loss_that_is_unknown_is_a_dash(tmp_path):
    unknown = a_comparison([of_series(a_method("m"), loss_test=None)])
    assert "– ± –" in Page(comparison_page(unknown, {})).cells
    assert "test ± seeds" not in Page(comparison_page(a_comparison([a_method("m")]), {})).cells
    write_report(unknown, tmp_path)
    assert rows(tmp_path / "methods.csv")[0]["test_nats_per_value"] == "nan"


def test_a_window_has_a_row_for_every_method_that_knows_it(comparison):
    first, *others = comparison.methods
    bare = replace(
        first, runs=[changed(run, windows=run.evaluation.windows[:1]) for run in first.runs]
    )
    pictures = draw_pictures(replace(comparison, methods=[bare, *others]))
    heights = [imread(io.BytesIO(pictures[name].light)).shape[0] for name in WINDOWS]
    assert heights[0] > heights[1]
    assert pictures["window-1"].caption.startswith("series 3 @ 40, as the first seed")
