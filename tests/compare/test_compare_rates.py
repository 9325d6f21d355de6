"""Comparisons at rates that are requested: what is measured, kept, tested and shown."""

import json
from dataclasses import replace

import numpy as np
import pytest
import yaml
from comparisons import a_comparison, a_method, rows
from pages import Page
from rated import rate_curve

from tokenv.cli.main import run_command
from tokenv.compare.command import resolve_comparison
from tokenv.compare.comparison import build_comparison
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.report.page import comparison_page, write_report
from tokenv.compare.report.report_tables import rate_columns, rates_table
from tokenv.compare.run_evaluation import RateEvaluation, at_rates, evaluate_run, load_evaluation
from tokenv.compare.score_statistics import Scores, adjust_p_values, estimate_difference
from tokenv.compare.score_tables import DIFFERENCE, tabulate_rates
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.data.corpus import load_corpus
from tokenv.evaluation.calibration import split_for_calibration
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import load_run

RATES = (0.1, 0.2)
SEQUENCES = 40


def test_a_run_at_rates_is_measured_as_evaluate_does_and_kept(tiny_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few = tiny_settings | {"validation": tiny_settings["validation"] | {"sequences": 6}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(few))
    run_command("train", ["with", "tiny.yaml", "rate.min=0.1", "rate.max=0.6"])
    folder, evaluation_request = (
        tmp_path / "runs" / "1",
        EvaluationRequest(0, 260, rates=[0.3, 0.15]),
    )
    found = evaluate_run(folder, evaluation_request)
    trained = load_run(str(folder), "latest")
    both = split_for_calibration(load_corpus(trained.config.data), 6)
    options = EvalOptions(trained.config.validation.batch_size)
    points = rate_curve(
        trained.components, trained.config, evaluation_request.rates, *both, options
    )
    assert [(at.way, at.target_rate) for at in found.at_rates] == [
        *(("conditioned", 0.3), ("calibrated", 0.3), ("conditioned", 0.15), ("calibrated", 0.15))
    ]
    for at, point in zip(found.at_rates, points, strict=True):
        assert (at.rate, at.flops, at.logit_bias) == (
            point.boundary_rate,
            point.flops,
            point.logit_bias,
        )
        assert np.mean(at.loss) == pytest.approx(point.loss, rel=1e-12)
    assert load_evaluation(folder, evaluation_request) == found
    assert load_evaluation(folder, EvaluationRequest(0, 260)) is None
    path = folder / "assessment.json"
    stored = json.loads(path.read_text())
    path.write_text(
        json.dumps({name: value for name, value in stored.items() if name not in ("of", "sha256")})
    )
    # without a digest it is measured again
    assert load_evaluation(folder, evaluation_request) is None
    check_halves(trained)


def check_halves(trained):
    """Where all held-out sequences are measured, the second half of them is calibrated on."""
    corpus = load_corpus(trained.config.data)
    batch = corpus.validation()
    config = replace(
        trained.config, validation=replace(trained.config.validation, sequences=len(batch))
    )
    found = at_rates(trained.components, config, (0.2,), corpus)
    half = len(batch) // 2
    options = EvalOptions(config.validation.batch_size)
    points = rate_curve(trained.components, config, [0.2], batch[:half], batch[half:], options)
    assert [len(at.loss) for at in found] == [half, half]
    assert [at.logit_bias for at in found] == [point.logit_bias for point in points]
    every = {"document": [*range(len(batch))], "loss": [0.0] * len(batch)}
    table = tabulate_rates(
        {"one": {0: replace(a_method("one").runs[0].evaluation, at_rates=found, **every)}}
    )
    assert list(table.way) == ["calibrated", "conditioned"]
    assert list(table.loss) == pytest.approx([np.mean(at.loss) for at in reversed(found)])


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([0.1, 1], r"rates = 1\.0: expected boundaries per symbol in \(0, 1\)"),
        ([0.1, 0.1], r"rates = \[0\.1, 0\.1\]: expected boundaries per symbol, every rate once"),
        (["few"], r"rates = \['few'\]: expected boundaries per symbol"),
    ],
)
def test_rates_that_cannot_be_compared_are_refused(rates, message):
    with pytest.raises(UserError, match=message):
        resolve_comparison(["compare-quick"], {"rates": rates})
    assert resolve_comparison(["compare-quick"], {"rates": 0.1}).evaluation_request.rates == [0.1]


# --- what is said of them ---


def losses_at(shift, seed, way):
    noise, common = np.random.default_rng(seed), np.random.default_rng(7)
    found = []
    for target_rate in RATES:
        loss = (
            common.normal(2 - target_rate, 0.3, SEQUENCES)
            + shift
            + noise.normal(0, 0.01, SEQUENCES)
        )
        found.append(
            RateEvaluation(
                way,
                target_rate,
                target_rate + 0.001 * seed,
                1e5 * (1 + target_rate),
                0.1,
                loss.tolist(),
            )
        )
    return found


def with_rates(method, found):
    """Return the method with these measurements of its runs (``found``: from the seed)."""
    common = {"document": list(range(SEQUENCES))}
    runs = [
        replace(
            run,
            evaluation=replace(
                run.evaluation, at_rates=found(run.seed), loss=[run.loss] * SEQUENCES, **common
            ),
        )
        for run in method.runs
    ]
    return replace(method, runs=runs)


@pytest.fixture(scope="module")
def three():
    every = with_rates(
        a_method("every <b>", 2.0, seeds=3),
        lambda seed: [
            *losses_at(1.0, seed + 1, "conditioned"),
            *losses_at(0.0, seed + 1, "calibrated"),
        ],
    )
    one = with_rates(
        a_method("one", 2.05, seeds=3), lambda seed: losses_at(0.05, seed + 4, "calibrated")
    )
    own = with_rates(
        a_method("whitespace", 2.1, seeds=3),
        lambda seed: [
            RateEvaluation(
                "own", 0.15 + seed / 100, 0.15 + seed / 100, 1.2e5, 0.0, [2.0] * SEQUENCES
            )
        ],
    )
    return compared([every, one, own], "every <b>")


def compared(methods, reference):
    evaluations = {
        method.name: {run.seed: run.evaluation for run in method.runs} for method in methods
    }
    return a_comparison(
        methods, rates=tabulate_rates(evaluations, reference), rates_reference=reference
    )


def test_methods_are_compared_with_the_reference_at_every_rate(three):
    rates = three.rates
    assert list(zip(rates.method, rates.way, rates.compared, strict=True)) == [
        *(
            ("every <b>", way, way == "calibrated")
            for way in ("calibrated", "conditioned")
            for _ in RATES
        ),
        *(("one", "calibrated", True) for _ in RATES),
        ("whitespace", "own", True),
    ]
    own = rates.loc[6]
    assert (own.target_rate, own.boundary_rate, own.difference) == (
        pytest.approx(0.16),
        pytest.approx(0.16),
        "",
    )
    losses = {
        method.name: np.array(
            [
                [at.loss for at in run.evaluation.at_rates if at.way == "calibrated"]
                for run in method.runs
            ]
        )
        for method in three.methods[:2]
    }
    scores = [
        [
            Scores(losses[name][:, place], np.arange(SEQUENCES), (0, 1, 2))
            for name in ("one", "every <b>")
        ]
        for place in range(len(RATES))
    ]
    wanted = [estimate_difference(*pair) for pair in scores]
    for row, each, p_holm in zip(
        rates.loc[[4, 5]].itertuples(),
        wanted,
        adjust_p_values([each.p for each in wanted]),
        strict=True,
    ):
        assert (row.difference, row.low, row.high, row.p) == (
            each.mean,
            each.low,
            each.high,
            each.p,
        )
        errors = (row.difference_seed_error, row.difference_document_error)
        assert errors == (each.seed_error, each.document_error)
        assert (row.p_holm, row.verdict) == (p_holm, "worse")
    assert (rates.loc[[0, 1, 2, 3, 6], DIFFERENCE] == "").all(axis=None)


def test_the_reference_is_the_one_named_or_else_the_first_with_a_range(three):
    every, one, own = three.methods
    ranged = [
        replace(run, config=replace(run.config, rate=RateRange(0.1, 0.6))) for run in every.runs
    ]
    methods = {"one": one.runs, "every": ranged, "again": ranged, "whitespace": own.runs}
    for against, wanted in (("", "every"), ("one", "one"), ("unknown", "every")):
        made = build_comparison(methods, "", {}, reference=against)
        assert made.rates_reference == wanted
        held = set(made.rates.method[made.rates.verdict != ""])
        assert held == {"one", "every", "again"} - {wanted}
    none = build_comparison({"one": one.runs, "whitespace": own.runs}, "", {})
    assert none.rates_reference == ""
    assert list(none.rates.method) == ["one", "one", "whitespace"]


def test_the_report_shows_them(three, tmp_path):
    paths = write_report(three, tmp_path)
    assert {"rates.csv", "rates.png"} <= {path.name for path in paths}
    assert rate_columns(three) == ["0.1", "0.2", "its own"]
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "At requested rates" in page.headings
    conditioned = rows(tmp_path / "rates.csv")
    assert [(row["method"], row["way"], float(row["target_rate"])) for row in conditioned[:5]] == [
        *(("every <b>", way, rate) for way in ("calibrated", "conditioned") for rate in RATES),
        ("one", "calibrated", 0.1),
    ]
    row = three.rates.loc[4]
    assert float(conditioned[4]["bits_per_byte"]) == row.loss
    assert float(conditioned[4]["p_holm"]) == row.p_holm
    assert conditioned[0]["difference"] == ""
    assert any(f"{row.difference:+.4f}" in text for text in page.cells)


def test_without_rates_nothing_is_said_of_them_and_one_seed_decides_nothing(three):
    plain = a_comparison([a_method("a"), a_method("b")])
    assert "At requested rates" not in Page(comparison_page(plain, {})).headings
    first = [replace(method, runs=method.runs[:1]) for method in three.methods]
    alone = compared(first, "every <b>")
    page = Page(comparison_page(alone, {}))
    assert "At requested rates" in page.headings
    assert any("± –" in cell for cell in page.cells)
    assert set(alone.rates.verdict) == {"", "not separable"}
    assert rates_table(alone).row_count == 4
