"""Methods which read ahead are marked, and their joint bits charge for what their boundaries reveal."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparisons import a_comparison, a_method, rows
from pages import Page
from tiny import settings

from tokenv.compare.comparison import ComparedMethod
from tokenv.compare.report.aggregate import describe_result
from tokenv.compare.report.page import comparison_page
from tokenv.compare.report.report_tables import methods_table, print_comparison, write_tables
from tokenv.compare.run_evaluation import evaluation_class
from tokenv.config import registry
from tokenv.config.build import reads_ahead
from tokenv.config.files import resolve
from tokenv.config.schema import Config, ImitationConfig
from tokenv.training.trainer import train

BPE = {"name": "bpe", "vocabulary_size": 300}


def of_config(name: str, bits: float, config: Config, **changes: Any) -> ComparedMethod:
    """Return a method whose runs have this configuration and different seeds."""
    method = a_method(name, bits, **changes)
    kind = evaluation_class(config.data)
    runs = []
    for run in method.runs:
        evaluation = kind(**vars(run.evaluation))
        own = replace(config, seed=run.seed)
        runs.append(replace(run, config=own, evaluation=evaluation))
    return replace(method, runs=runs)


def a_bpe() -> ComparedMethod:
    return of_config("bpe", 1.8, Config(agent=BPE))


def a_student(name: str, bits: float, **changes: Any) -> ComparedMethod:
    config = Config(imitation=ImitationConfig(**{"teacher": dict(BPE), "fraction": 1.0, **changes}))
    return of_config(
        name, 1.9, config, history={"validation/imitation_bits": ([1, 2], [9.0, bits])}
    )


def test_the_agents_say_themselves_which_read_ahead() -> None:
    assert [name for name in registry.AGENTS if reads_ahead({"name": name})] == ["bpe"]
    direct = of_config("direct", 1.8, replace(resolve(["series-forecast"], {}), agent=BPE))
    assert not direct.reads_ahead  # of its history nothing is predicted


def test_joint_bits_add_the_boundaries_by_the_best_policy_which_imitates_them() -> None:
    bpe = a_bpe()
    uniform = a_method("uniform", 2.0)
    others = [
        a_student("another", 0.01, teacher={"name": "bpe", "vocabulary_size": 400}),
        a_student("at first", 0.02, fraction=0.5),
    ]
    comparison = a_comparison(
        [bpe, uniform, a_student("worse", 0.2), a_student("causal", 0.125), *others]
    )
    assert comparison.joint_loss(bpe) == (pytest.approx(bpe.loss + 0.125), "causal")
    assert comparison.joint_loss(uniform) == (uniform.loss, "")
    assert math.isnan(a_comparison([bpe, uniform, *others]).joint_loss(bpe).loss)


@pytest.mark.parametrize("agent", ["hnet", "exact_count", "uniform"])
def test_no_joint_bits_by_an_agent_without_a_law_or_with_a_fixed_count(agent: str) -> None:
    """H-Net's log-probabilities are 0: by them, BPE's boundaries would cost nothing."""
    bpe = a_bpe()
    causal = a_student("causal", 0.125)
    lawless = a_student("lawless", 0.0)
    runs = [replace(run, config=replace(run.config, agent={"name": agent})) for run in lawless.runs]
    comparison = a_comparison([bpe, causal, replace(lawless, runs=runs)])
    assert comparison.joint_loss(bpe) == (pytest.approx(bpe.loss + 0.125), "causal")


def test_tables_mark_what_reads_ahead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = a_comparison([a_bpe(), a_student("causal", 0.125)])
    print_comparison(comparison)
    shown = " ".join(capsys.readouterr().out.split())
    assert "yes" in shown
    assert "joint" in shown
    cells = [
        dict(methods_table(comparison).cells())[method.name]["joint bits"]
        for method in comparison.methods
    ]
    assert cells == [
        f"{comparison.methods[0].loss + 0.125:.4f} (by causal)",
        f"{comparison.methods[1].loss:.4f}",
    ]
    assert "bpe reads ahead: such bits per byte are not a causal model's." in describe_result(
        comparison
    )
    assert cells[0] in Page(comparison_page(comparison, {})).cells
    write_tables(comparison, tmp_path)
    first, second = rows(tmp_path / "methods.csv")
    assert (first["reads_ahead"], second["reads_ahead"]) == ("True", "False")
    assert float(first["joint_bits_per_byte"]) == comparison.joint_loss(comparison.methods[0]).loss
    assert (first["imitator"], second["imitator"]) == ("causal", "")
    causal = a_comparison([a_method("a"), a_method("b")])
    assert "joint bits" not in methods_table(causal).headers()
    write_tables(causal, tmp_path)
    assert "reads_ahead" not in rows(tmp_path / "methods.csv")[0]


def test_a_run_which_imitates_throughout_is_found_by_its_history(tmp_path: Path) -> None:
    config = resolve([], settings(imitation={"teacher": BPE, "fraction": 1.0}))
    _, history = train(config, tmp_path, lambda *_: None, resume=None)
    method = a_method("causal", config=config, history=history)
    bits = method.imitation_bits(resolve([], settings(agent=BPE)).agent)
    assert 0 < bits == history["validation/imitation_bits"][1][-1]
