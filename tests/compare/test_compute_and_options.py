"""What a comparison says of unequal compute and of options, and how it treats a small text of the user's own."""

import csv
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shrunk
import yaml
from comparisons import a_comparison, a_method, rows
from hypothesis import given
from hypothesis import strategies as st
from pages import Page
from tiny import overrides

from tokenv.cli.main import run_command
from tokenv.compare.command import check_methods, resolve_comparison
from tokenv.compare.comparison import ComparedMethod, Comparison
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.report.aggregate import describe_result, find_losses_at_equal_flops
from tokenv.compare.report.page import comparison_page
from tokenv.compare.report.report_tables import print_comparison, write_tables
from tokenv.compare.run_evaluation import _measure
from tokenv.config.class_options import complete_options, with_class_defaults
from tokenv.config.files import merge, resolve
from tokenv.config.registry import ESTIMATORS
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.training.trainer import train

ROOT = Path(__file__).parents[2]


def spending(name: str, bits: float, each: float) -> ComparedMethod:
    """Return a method whose loss falls by 1 from the first symbol to the last, at so many FLOPs a symbol."""
    symbols = [0.0, 1e6]
    history = {
        "validation/bits_per_byte": (symbols, [bits + 1, bits]),
        "train/flops": (symbols, [0.0, each * 1e6]),
    }
    return a_method(name, bits, seeds=1, history=history, flops=each * 1e6)


@given(st.floats(1.06, 50))
def test_losses_at_equal_flops_are_on_the_curves(factor: float) -> None:
    cheap = spending("cheap", 2.0, 1.0)
    dear = spending("dear", 1.9, factor)
    at_equal_flops = find_losses_at_equal_flops(a_comparison([cheap, dear]))
    assert at_equal_flops is not None
    assert at_equal_flops.flops == 1e6
    assert at_equal_flops.losses["cheap"] == pytest.approx(cheap.loss)
    assert at_equal_flops.losses["dear"] == pytest.approx(dear.loss + 1 - 1 / factor)
    assert find_losses_at_equal_flops(a_comparison([cheap, spending("other", 1.9, 1.04)])) is None


def test_the_headline_gives_the_ratio_of_flops_and_warns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = a_comparison([spending("cheap", 2.0, 1.0), spending("dear", 1.9, 2.8)])
    headline, _, warning, equal = describe_result(comparison)[:4]
    assert headline.endswith(", with 2.80 times the FLOPs of cheap.")
    assert warning.startswith(
        "Warning: FLOPs differ by more than 5%, from 1e6 (cheap) to 2.8e6 (dear)"
    )
    assert "With 1e6 FLOPs each, cheap was lowest, 0.5429 below dear" in equal
    assert "schedules were not finished" in equal
    page = Page(comparison_page(comparison, {}))
    assert {"at 1.00e6 FLOPs", "2.0000", "2.5429"} <= set(page.cells)
    write_tables(comparison, tmp_path)
    first = rows(tmp_path / "methods.csv")[0]
    assert float(first["validation_bits_per_byte_at_equal_flops"]) == pytest.approx(
        1.9 + 1 - 1 / 2.8
    )
    assert float(rows(tmp_path / "pairs.csv")[0]["flops_ratio"]) == pytest.approx(1 / 2.8)
    print_comparison(comparison)
    assert "Warning: FLOPs differ" in capsys.readouterr().out
    alike = a_comparison([spending("cheap", 2.0, 1.0), spending("same", 1.9, 1.0)])
    assert not [line for line in describe_result(alike) if "FLOPs" in line]


def test_without_a_curve_that_begins_early_enough_only_the_warning_is_given() -> None:
    late = {"validation/bits_per_byte": ([1e6], [1.9]), "train/flops": ([1e6], [3e6])}
    dear = a_method("dear", 1.9, history=late, flops=3e6)
    lines = describe_result(a_comparison([spending("cheap", 2.0, 1.0), dear]))
    assert [line for line in lines if line.startswith("Warning: FLOPs")]
    assert not [line for line in lines if "FLOPs each" in line]


def learned_twice() -> Comparison:
    """Return a comparison of REINFORCE with gamma = 0.9 and of RLOO, which has been given no gamma."""
    methods = []
    for name, estimator in (
        ("base", {"name": "reinforce", "gamma": 0.9}),
        ("rloo", {"name": "rloo"}),
    ):
        method = a_method(name)
        runs = [
            replace(run, config=Config(seed=run.seed, estimator=estimator)) for run in method.runs
        ]
        methods.append(replace(method, runs=runs))
    return a_comparison(
        methods, given_up=["rloo: estimator rloo gives up gamma=0.9 of the base (rloo's own: 0.99)"]
    )


def test_options_in_which_methods_differ_are_shown_with_their_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    comparison = learned_twice()
    page = Page(comparison_page(comparison, {}))
    assert {"estimator.gamma", "0.9", "0.99", "estimator.reward_only", "–"} <= set(page.cells)
    assert "gives up gamma=0.9" in comparison_page(comparison, {})
    write_tables(comparison, tmp_path)
    shown = {row["method"]: row for row in rows(tmp_path / "options.csv")}
    assert (shown["base"]["estimator.gamma"], shown["rloo"]["estimator.gamma"]) == ("0.9", "0.99")
    assert (shown["base"]["estimator.num_samples"], shown["rloo"]["estimator.num_samples"]) == (
        "",
        "2",
    )
    print_comparison(comparison)
    assert "0.99: rloo" in capsys.readouterr().out


@pytest.mark.parametrize("name", ESTIMATORS)
def test_complete_options_are_those_with_which_a_class_is_built(name: str) -> None:
    complete = complete_options("estimator", {"name": name}, ESTIMATORS)
    assert complete_options("estimator", complete, ESTIMATORS) == complete
    values = resolve([], {"estimator": complete}).as_dict()
    assert with_class_defaults(values)["estimator"] == complete


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"estimator": {"name": "rloo"}},
            "estimator rloo gives up gamma=0.9 of the base (rloo's own: 0.99)",
        ),
        ({"estimator": {"name": "rloo", "gamma": 0.9}}, None),
        ({"estimator": {"name": "rloo", "gamma": 1.0}}, None),  # chosen
        ({"agent": {"name": "uniform"}}, None),  # it has none of the options
        (
            {"agent": {"name": "exact_count"}},
            "agent exact_count gives up window=1 of the base (exact_count's own: 8)",
        ),
    ],
)
def test_what_naming_another_class_gives_up(changes: dict[str, Any], sentence: str | None) -> None:
    options = resolve_comparison([], {"base": ["small"], "methods": {"it": changes}})
    given_up = options.options_given_up()
    assert given_up[:1] == ([] if sentence is None else [f"it: {sentence}"])


def test_shipped_comparisons_give_up_nothing_but_what_is_known() -> None:
    given_up = {}
    for name in shrunk.CONFIGS:
        if "methods" not in shrunk.content(name):
            continue
        for own in resolve_comparison([name], {}).split_protocols().values():
            given_up[name] = own.options_given_up()
    lost = {name: lines for name, lines in given_up.items() if lines}
    assert lost == {
        "compare-rates": [
            "every rate, one sample: estimator reinforce gives up head_epochs=3 of the base (reinforce's own: 0)"
        ]
    }


def small_text(folder: Path, size: int) -> Path:
    path = folder / "book.txt"
    path.write_text("".join(f"line {i} of a small book, {i * i}\n" for i in range(size)))
    return path


def two_lines(folder: Path) -> list[str]:
    """Return the comparison which the page on getting started shows for a text of one's own."""
    (line,) = [
        line
        for line in (ROOT / "docs/start.md").read_text().splitlines()
        if "compare-quick common.data" in line
    ]
    return shlex.split(line.replace("book.txt", str(small_text(folder, 200))))[1:]


def test_a_method_that_does_not_learn_is_measured_on_the_same_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = {"source": str(small_text(tmp_path, 60))}
    config = resolve([], merge(tiny_settings, {"agent": {"name": "uniform"}, "data": data}))
    train(config, tmp_path / "run" / "checkpoints", lambda *_: None, resume=None)
    plain, calibrated = (
        _measure(tmp_path / "run", EvaluationRequest(0, 300, calibrate))
        for calibrate in (False, True)
    )
    assert 1 < len(plain.loss) <= config.validation.sequences
    assert calibrated.loss == plain.loss[: len(plain.loss) // 2]


@pytest.mark.slow
def test_a_small_text_of_ones_own_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods which learn and those which do not are measured on the same half of its few held-out sequences."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    run = shrunk.merge(shrunk.RUN, {"validation": {"sequences": 64}})
    words = [*overrides({"common": run}), "seeds=[0]", "bpe_vocabulary=300", "passages=1"]
    name, *line = two_lines(tmp_path)
    results = run_command(name, [*line, *words])
    assert {row["method"] for row in results} == {"uniform", "learned w=1"}
    (report,) = tmp_path.glob("runs/*/report.html")
    with (report.parent / "methods.csv").open() as file:
        assert [row["seeds"] for row in csv.DictReader(file)] == ["1", "1"]


def test_too_small_a_text_and_unequal_data_are_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_text(tmp_path, 12)
    data = {"source": "book.txt", "seq_len": 128, "validation": 0.4}
    values = {
        "common": tiny_settings | {"data": data},
        "methods": {"one": {}, "two": {"seed": 0}},
        "seeds": [0],
    }
    check_methods(resolve_comparison([], {**values}))
    with pytest.raises(UserError, match=r"book.txt has 1: expected two or more"):
        check_methods(resolve_comparison([], {**values, "calibrate": True}))
    values["methods"] = {"one": {}, "two": {"validation": {"sequences": 5}}}
    Path("two.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(
        UserError, match=r"methods.one and methods.two would be measured on different held-out text"
    ):
        run_command("compare", ["with", "two.yaml"])
    assert not list(tmp_path.glob("runs/*/config.json"))
