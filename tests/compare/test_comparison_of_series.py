"""Comparisons of series: in their unit, against their change points, on windows for validation and for testing."""

import csv
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tokenv.cli.main import run_command
from tokenv.compare.command import load_compared_run
from tokenv.compare.comparison import build_comparison
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.run_evaluation import evaluate_run, load_evaluation
from tokenv.compare.store import finished_run
from tokenv.config.files import flatten
from tokenv.core import keys
from tokenv.evaluation.evaluator import EvalOptions, held_out_rollouts, sequence_losses
from tokenv.evaluation.loaded_run import load_run
from tokenv.series.windows import load_series


@pytest.fixture
def store(series_settings, tmp_path, monkeypatch):
    """Return a folder with a tiny configuration of series and a recording with holes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(series_settings))
    generator = np.random.default_rng(0)
    value_L2 = 50 + generator.normal(size=(300, 2)).cumsum(0)
    value_L2[generator.random((300, 2)) < 0.3] = np.nan
    value_L2[200:230, 0] = np.nan  # windows differ much in how many values count
    lines = [
        ",".join([str(step), *("" if math.isnan(v) else str(v) for v in row)])
        for step, row in enumerate(value_L2)
    ]
    (tmp_path / "holes.csv").write_text("\n".join(["date,a,b", *lines]))
    return tmp_path / "runs"


def train(*names, **changes):
    words = [f"{key}={value}" for key, value in flatten(changes).items()]
    return run_command("train", ["with", *(names or ("tiny.yaml",)), *words])


def table(folder, name):
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_runs_compared_from_end_to_end(store, capsys):
    results = [train(agent={"name": name}) for name in ("uniform", "learned")]
    words = ["runs=['runs/1', 'runs/2']", "passages=2"]
    summaries = run_command("compare", ["with", *words])
    losses = {one["method"]: one["loss"] for one in summaries}
    assert losses == pytest.approx(
        {"uniform": results[0]["nats_per_value"], "learned": results[1]["nats_per_value"]}
    )
    shown = capsys.readouterr().out
    assert "nats per value" in shown
    assert "test" in shown
    report = store / "3"
    for row in table(report, "methods.csv"):
        result = results[["uniform", "learned"].index(row["method"])]
        assert float(row["nats_per_value"]) == pytest.approx(result["nats_per_value"], rel=1e-12)
        early = result["nats_per_value_early"]  # None: even spacing trains no early exit
        assert float(row["nats_per_value_early"]) == pytest.approx(
            math.nan if early is None else early, rel=1e-12, nan_ok=True
        )
        assert float(row["change_points_f1"]) == pytest.approx(result["boundary_f1"])
        assert float(row["change_points_recall"]) == pytest.approx(result["boundary_recall"])
        assert math.isfinite(float(row["test_nats_per_value"]))
    assert {row["steps"] for row in table(report, "patch-lengths.csv")} == {
        str(n) for n in range(1, 65)
    }
    pictures = {path.name for path in report.glob("*.png")}
    assert {"loss-steps.png", "patch-lengths.png", "window-1.png", "window-2.png"} <= pictures
    body = (report / "report.html").read_text().partition("</style>")[2]
    shown_text = re.sub('base64,[^"]*', "", body)
    assert "The same windows with the boundaries of every method" in shown_text
    assert "found within 2 steps" in shown_text
    assert not re.findall("byte|token|passage|text|document", shown_text)
    assert run_command("compare", ["with", *words, "-u"]) == summaries


@pytest.mark.parametrize("joint", [False, True])
def test_shares_of_windows_with_holes_average_to_the_runs_loss(store, joint):
    series = {"context": 4, "columns": "a,b", "joint": joint}
    result = train(data={"source": "holes.csv", "options": series})
    evaluation = evaluate_run(store / "1", EvaluationRequest(2, 260))
    assert evaluation.unit == "nats_per_value"
    assert np.mean(evaluation.loss) == pytest.approx(result["nats_per_value"], rel=1e-12)
    assert evaluation.loss_early == pytest.approx(result["nats_per_value_early"], rel=1e-12)
    assert evaluation.boundary_rate == pytest.approx(result["boundary_rate"])
    assert evaluation.agreement == {}  # nobody knows this recording's change points
    # columns at the same time are one group
    assert len(evaluation.loss) > len(set(evaluation.document)) or joint
    assert any(None in value for window in evaluation.windows for value in window.value)
    assert load_evaluation(store / "1", EvaluationRequest(2, 260)) == evaluation


@given(
    st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 50)), min_size=1, max_size=9),
    st.integers(1, 50),
)
def test_shares_average_to_the_ratio_of_the_sums(rows, loss_mask):
    """Whatever a sequence's own ratio is; one without anything that counts has none."""
    late_B, counted_B = torch.tensor([*rows, (1.0, loss_mask)], dtype=torch.float64).T
    found_B, _ = sequence_losses(late_B, late_B, counted_B)
    assert found_B.mean().item() == pytest.approx((late_B.sum() / counted_B.sum()).item(), abs=1e-9)
    plain_B, _ = sequence_losses(late_B, late_B, None)
    assert plain_B is late_B


def test_the_test_loss_is_a_mean_over_all_test_values(store):
    train(data={"source": "holes.csv"})
    evaluation = evaluate_run(store / "1", EvaluationRequest(0, 260))
    trained = load_run("runs/1", "latest")
    test = load_series(trained.config.data).test(trained.config.validation.sequences)
    nats = loss_mask = 0.0
    for td in held_out_rollouts(
        trained.components, test, EvalOptions(trained.config.validation.batch_size)
    ):
        nats -= td[keys.LOG_LIKELIHOOD].double().sum().item()
        loss_mask += trained.components.lm.codec.loss_mask(td["next", keys.SYMBOL]).sum().item()
    assert evaluation.loss_test == pytest.approx(nats / loss_mask, rel=1e-9)
    validation = load_series(trained.config.data).validation(None)
    assert not torch.equal(test.symbol_BN.nan_to_num(), validation.symbol_BN.nan_to_num())


def test_without_a_test_window_there_is_no_test_figure(store, capsys):
    train(data={"options": {"test": 0.0}})
    run_command("compare", ["with", "runs=['runs/1']", "passages=0"])
    assert math.isnan(float(table(store / "2", "methods.csv")[0]["test_nats_per_value"]))
    assert "– ± –" in capsys.readouterr().out
    assert "window-1" not in (store / "2" / "report.html").read_text()


def test_text_and_series_are_refused_before_anything_is_measured(store, tiny_settings):
    (store.parent / "text.yaml").write_text(yaml.safe_dump(tiny_settings))
    train(agent={"name": "uniform"})
    train("text.yaml", agent={"name": "uniform"})
    with pytest.raises(
        ValueError, match=r"runs/1 is of series and runs/2 of text: expected runs of one data\.kind"
    ):
        run_command("compare", ["with", "runs=['runs/1', 'runs/2']", "-u"])
    assert not list(store.glob("*/assessment.json"))

    methods = {
        "patches": {},
        "tokens": {"data": tiny_settings["data"] | {"kind": "text"}, "codec": {"name": "bytes"}},
    }
    values = {"base": "tiny.yaml", "seeds": [0], "methods": methods}
    (store.parent / "both.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(
        ValueError, match=r"methods\.patches is of series and methods\.tokens of text"
    ):
        run_command("compare", ["with", "both.yaml", "-u"])


def test_other_windows_and_other_units_are_refused(store):
    train(agent={"name": "uniform"})
    train(agent={"name": "uniform"}, data={"options": {"floor": 0.2}})
    first, second = (
        load_compared_run(finished_run(store / name), EvaluationRequest(0, 260))
        for name in ("1", "2")
    )
    with pytest.raises(ValueError, match="measured on different held-out series"):
        build_comparison({"a": [first], "b": [second]}, "title", {})
    other = replace(first, evaluation=replace(first.evaluation, unit="nats_per_symbol"))
    with pytest.raises(
        ValueError, match=r"is measured in nats per symbol and .* in nats per value"
    ):
        build_comparison({"a": [first], "b": [other]}, "title", {})


def test_an_assessment_of_another_version_is_measured_anew(store):
    train(agent={"name": "uniform"})
    evaluation = evaluate_run(store / "1", EvaluationRequest(1, 260))
    path = store / "1" / "assessment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
    assert load_evaluation(store / "1", EvaluationRequest(1, 260)) is None
    assert evaluate_run(store / "1", EvaluationRequest(1, 260)) == evaluation
