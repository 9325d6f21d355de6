"""Forecasts in a comparison: the scores of ``tokenv forecast``, pairs with peers, reports, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import yaml
from comparisons import a_comparison, a_method, of_series, rows
from pages import Page

from tokenv.cli.main import run_command
from tokenv.compare.config import CompareOptions, EvaluationRequest
from tokenv.compare.report.page import comparison_page, write_reports
from tokenv.compare.run_evaluation import evaluate_run, load_evaluation
from tokenv.compare.score_statistics import Scores, add_reversed_pairs, estimate_difference
from tokenv.core.errors import UserError
from tokenv.series.comparison_report import draw_forecasts
from tokenv.series.config import ForecastRequest
from tokenv.series.series_comparison import Forecasts, compare_forecasts

WINDOWS = 40
STEPWISE = {"codec": {"direct": False}, "data": {"options": {"context": 8}}}


def forecasts(offset=0.0, horizon=8, seed=0):
    """Errors of made-up forecasts: of the method larger by ``offset``, of its peers always the same."""
    generator = np.random.default_rng(seed)
    common_W = np.random.default_rng(99).gamma(2.0, 0.2, WINDOWS)
    error = {
        name: (common_W + offset + 0.01 * generator.normal(size=WINDOWS)).tolist()
        for name in ("mse", "mae", "crps")
    }
    peers = {
        name: {score: (common_W + more).tolist() for score in ("mse", "mae")}
        for name, more in (("last value", 3.0), ("dlinear", 0.05))
    }
    inside = np.full(WINDOWS, 0.75).tolist()
    return Forecasts(
        horizon, 100, [w // 4 for w in range(WINDOWS)], error | {"inside": inside}, peers
    )


def methods(**offsets):
    """Methods of two seeds whose forecasts are off by so much."""
    compared_methods = []
    for name, offset in offsets.items():
        made = of_series(a_method(name))
        runs = [
            replace(
                run,
                evaluation=replace(
                    run.evaluation, forecast=forecasts(offset + 0.001 * run.seed, seed=run.seed)
                ),
            )
            for run in made.runs
        ]
        compared_methods.append(replace(made, runs=runs))
    return compared_methods


def by_seed(runs):
    return {name: {run.seed: run.evaluation for run in group} for name, group in runs.items()}


@pytest.fixture(scope="module")
def compared():
    of = methods(learned=0.0, fixed=0.2)
    forecasts_compared = compare_forecasts(by_seed({method.name: method.runs for method in of}), "")
    return a_comparison(of, of_kind=forecasts_compared)


def test_pairs_are_those_of_the_windows_and_seeds(compared):
    compared_forecasts = compared.of_kind
    assert list(compared_forecasts.table.forecaster) == [
        "learned",
        "dlinear",
        "fixed",
        "last value",
    ]
    learned, fixed = (
        np.array([run.evaluation.forecast.error["mse"] for run in method.runs])
        for method in compared.methods
    )
    cluster_W = np.arange(WINDOWS) // 4
    expected = estimate_difference(
        Scores(learned, cluster_W, (0, 1)), Scores(fixed, cluster_W, (0, 1))
    )
    pair = compared_forecasts.differences["mse"]["learned", "fixed"]
    assert (pair.mean, pair.seed_error, pair.low, pair.p) == (
        expected.mean,
        expected.seed_error,
        expected.low,
        expected.p,
    )
    peer_W = np.array(compared.methods[0].runs[0].evaluation.forecast.peers["dlinear"]["mse"])
    against = compared_forecasts.differences["mse"]["learned", "dlinear"]
    assert against.mean == pytest.approx((learned - peer_W).mean())
    assert against.seed_error == pytest.approx(learned.mean(1).std(ddof=1) / 2**0.5)
    assert set(compared_forecasts.differences["mse"]) == {
        ("learned", "fixed"),
        *((name, peer) for name in ("learned", "fixed") for peer in ("last value", "dlinear")),
    }
    best, dlinear = compared_forecasts.table.to_dict("records")[:2]
    assert best["skill against dlinear"] == pytest.approx(1 - best["mse"] / dlinear["mse"])
    assert dlinear["crps"] == dlinear["mae"]
    assert (
        add_reversed_pairs(compared_forecasts.differences["mse"])["fixed", "learned"].mean
        == -pair.mean
    )


def test_a_report_shows_methods_and_peers(compared, tmp_path, monkeypatch):
    def drawn(comparison):
        """Nothing else, which takes long."""
        return {"forecasts": draw_forecasts(comparison.of_kind, {})} if comparison.of_kind else {}

    monkeypatch.setattr("tokenv.compare.report.page.draw_pictures", drawn)
    page = Page(comparison_page(compared, drawn(compared)))
    assert "Forecasts of 8 steps, 40 of 100 test windows" in page.headings
    assert {"MSE ± seeds", "80% interval holds", "skill: dlinear", "75.0%"} <= set(page.cells)
    paths = write_reports({"a": compared, "b": compared}, tmp_path)
    assert {
        "forecasts.csv",
        "1-a-forecasts.csv",
        "1-a-forecast-pairs.csv",
        "1-a-forecasts.png",
    } <= {path.name for path in paths}
    every = rows(tmp_path / "forecasts.csv")
    assert [row["forecaster"] for row in every] == 2 * ["learned", "dlinear", "fixed", "last value"]
    best = compared.of_kind.table.loc[0]
    assert float(every[0]["mse"]) == best.mse
    assert float(every[0]["mae_seed_error"]) == best.mae_seed_error
    assert [row["is_method"] for row in every[:2]] == ["True", "False"]
    pairs = rows(tmp_path / "1-a-forecast-pairs.csv")
    assert len(pairs) == 3 * 5
    summary = Page((tmp_path / "report.html").read_text())
    assert "Forecasts of test windows" in summary.headings
    bare = a_comparison(
        [replace(method, runs=of_series(a_method("m")).runs) for method in compared.methods]
    )
    assert not [
        path for path in write_reports({"": bare}, tmp_path / "bare") if "forecast" in path.name
    ]


def test_runs_that_forecast_other_windows_are_refused():
    (one,) = methods(learned=0.0)
    (other,) = methods(fixed=0.2)
    runs = [
        replace(run, evaluation=replace(run.evaluation, forecast=forecasts(horizon=4)))
        for run in other.runs
    ]
    with pytest.raises(
        UserError, match=r"forecasts 4 steps of 40 test windows and .* 8 of 40: expected the same"
    ):
        compare_forecasts(by_seed({"a": one.runs, "b": runs}), "")
    unasked = [
        replace(run, evaluation=replace(run.evaluation, forecast=None)) for run in other.runs
    ]
    assert compare_forecasts(by_seed({"a": one.runs, "b": unasked}), "") is None


@pytest.fixture
def settings(tiny_settings, tmp_path, monkeypatch):
    """Return the settings of a tiny run on bursts which forecasts 6 steps, as a comparison's common settings."""
    monkeypatch.chdir(tmp_path)
    data = {
        "kind": "series",
        "source": "bursts",
        "seq_len": 24,
        "validation": 0.2,
        "options": {"context": 18, "count": 4, "length": 200},
    }
    return tiny_settings | {
        "data": data,
        "codec": {"name": "series", "horizon": 6, "direct": True},
        "train": tiny_settings["train"] | {"symbols": 400, "warmup_symbols": 0},
        "validation": {"every_symbols": 2000, "sequences": 4, "batch_size": 4},
    }


def test_the_scores_are_those_of_the_command(settings, tmp_path):
    words = [
        f"{section}.{key}={value}" for section, of in settings.items() for key, value in of.items()
    ]
    run_command("train", ["with", *words])
    command = [
        "with",
        "run=runs/1",
        "horizon=6",
        "direct=True",
        "windows=30",
        "peers=dlinear",
        "checkpoint=latest",
    ]
    scores = run_command("forecast", command)
    evaluation_request = EvaluationRequest(0, 260, forecast=ForecastRequest(windows=30))
    forecast = evaluate_run(tmp_path / "runs" / "1", evaluation_request).forecast
    for name in ("mse", "mae", "crps", "inside"):
        assert np.mean(forecast.error[name]) == pytest.approx(scores[name], rel=1e-12)
    assert forecast.peers.keys() == scores["against"].keys()
    for name, errors in forecast.peers.items():
        assert np.mean(errors["mse"]) == pytest.approx(scores["against"][name]["mse"], rel=1e-12)
    assert (len(forecast.cluster), forecast.total, forecast.horizon) == (
        scores["windows"],
        scores["of"],
        6,
    )
    assert load_evaluation(tmp_path / "runs" / "1", evaluation_request).forecast == forecast
    assert load_evaluation(tmp_path / "runs" / "1", EvaluationRequest(0, 260)) is None


@pytest.mark.parametrize(
    ("forecast", "common", "message"),
    [
        ({"horizon": 5}, {}, r"methods\.a: horizon = 5: expected 6, all that a model with codec\.direct=True predicts"),
        ({"horizon": 9}, STEPWISE, "direct head reaches 6 steps"),
        ({"horizon": 30}, STEPWISE, "horizon = 30: expected 1 to"),
        ({}, {"codec": {"direct": False, "horizon": 0}}, r"forecast\.horizon is null and codec\.horizon = 0"),
        ({}, {"data": {"kind": "text", "source": "python"}, "codec": {"name": "bytes"}},
         r"forecast with data\.kind = 'text': expected series"),
        ({"season": 19}, {}, "season = 19: expected 1 to 18"),
        ({"peers": ["arima"]}, {}, r"forecast\.peers = \['arima'\]: expected names among dlinear"),
        ({"windows": -1}, {}, r"forecast\.windows = -1: expected a whole number of at least 0"),
        ({"horizont": 6}, {}, r"unknown key forecast\.horizont"),
    ],
)  # fmt: skip
def test_what_cannot_be_forecast_is_refused_at_once(settings, tmp_path, forecast, common, message):
    values = {
        "base": "tiny.yaml",
        "common": common,
        "seeds": [0],
        "methods": {"a": {}},
        "forecast": forecast,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(settings))
    (tmp_path / "comparison.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=message):
        run_command("compare", ["with", "comparison.yaml", "-u"])


def test_draws_are_not_calibrated():
    with pytest.raises(UserError, match=r"forecast\.direct = False: expected direct forecasts"):
        CompareOptions(methods={"a": {}}, calibrate=True, forecast=ForecastRequest(direct=False))
