"""Runs which earlier versions stored stay readable: the fixture was trained before the rooms were rearranged."""

import shutil
from pathlib import Path

import pytest

import tokenv
from tokenv.cli.main import run_command
from tokenv.data.corpus import load_corpus
from tokenv.evaluation.evaluator import evaluate
from tokenv.evaluation.loaded_run import load_run

STORED = Path(__file__).parent / "stored_runs" / "before_rooms"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copytree(STORED, tmp_path / "runs" / "1")
    monkeypatch.chdir(tmp_path)
    return "runs/1"


def test_a_stored_run_is_evaluated_as_it_was(run: str) -> None:
    loaded = load_run(run)
    config = loaded.config
    held_out = load_corpus(config.data).validation(config.validation.sequences)
    found = evaluate(loaded.parts, held_out, batch_size=config.validation.batch_size)
    assert loaded.state.validation is not None
    assert found.loss == pytest.approx(loaded.state.validation.loss, rel=1e-5)
    assert found.boundary_rate == loaded.state.validation.boundary_rate


def test_a_stored_run_is_a_model_of_the_library(run: str) -> None:
    model = tokenv.load(run)
    assert b"".join(model.tokens("some words of a text")) == b"some words of a text"


def test_a_stored_run_is_where_another_begins(run: str) -> None:
    result = run_command("train", ["with", f"{run}/config.json", f"init_from={run}", "-u"])
    assert result["bits_per_byte"] > 0
