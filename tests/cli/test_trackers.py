"""Metrics in TensorBoard's files, and calls of the interfaces of Weights & Biases and MLflow."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenv.cli.main import run_command
from tokenv.core.errors import UserError

ROOT = Path(__file__).parents[2]


def stored() -> dict[str, Any]:
    metrics: dict[str, Any] = json.loads(Path("runs/1/metrics.json").read_text())
    return metrics


@pytest.mark.filterwarnings("default")  # TensorBoard's own packages'
def test_tensorboard_reads_the_metrics_of_a_run(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_command("train", ["with", *tiny_words, "--tensorboard", "board"])
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator("board/tokenv-train-1", size_guidance={"scalars": 0})
    board.Reload()
    metrics = stored()
    assert set(board.Tags()["scalars"]) == set(metrics)
    for name, metric in metrics.items():
        scalars = board.Scalars(name)
        assert [each.step for each in scalars] == metric["steps"]
        assert [each.value for each in scalars] == pytest.approx(metric["values"], rel=1e-6)


class Calls:
    """Object whose methods record their calls and return it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, args, options))
            return self

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for called, args, options in self.calls if called == name]


def test_weights_and_biases_and_mlflow_get_all_metrics(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wandb = Calls()
    mlflow = FakeMLflow()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=wandb.init))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run_command("train", ["with", *tiny_words, "-W", "mine", "-M", "mine"])
    ((_, begun),) = wandb.of("init")
    assert (begun["project"], begun["name"], begun["config"]["rate"]) == (
        "mine",
        "tokenv-train-1",
        0.2,
    )
    series = {name: zip(of["steps"], of["values"], strict=True) for name, of in stored().items()}
    values = [(name, step, value) for name, pairs in series.items() for step, value in pairs]
    logged_values = [
        (name, logged["symbols"], logged[name])
        for (logged,), _ in wandb.of("log")
        for name in logged
    ]
    assert sorted(each for each in logged_values if each[0] != "symbols") == sorted(values)
    assert wandb.calls[-1] == ("finish", (), {"exit_code": 0})
    logged = [
        (name, more["step"], value) for (_, name, value), more in mlflow.calls.of("log_metric")
    ]
    assert sorted(logged) == sorted(values)
    assert {run for (run, _, _), _ in mlflow.calls.of("log_metric")} == {"of mine"}
    assert mlflow.calls.calls[-1] == ("set_terminated", ("of mine", "FINISHED"), {})


class FakeMLflow:
    """Stand-in for MLflow whose experiment ``closed`` cannot be written to."""

    class exceptions:  # noqa: N801
        class MlflowException(Exception):  # noqa: N818
            """Base class of all its errors."""

    def __init__(self) -> None:
        self.calls = Calls()

    def set_experiment(self, name: str) -> Any:
        if name == "closed":
            raise self.exceptions.MlflowException(
                "The filesystem tracking backend is in maintenance mode"
            )
        return SimpleNamespace(experiment_id=name)

    def MlflowClient(self) -> Any:
        names = ("log_dict", "log_metric", "set_terminated")
        return SimpleNamespace(
            create_run=self.create_run, **{name: getattr(self.calls, name) for name in names}
        )

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert run_name == "tokenv-train-1"
        return SimpleNamespace(info=SimpleNamespace(run_id=f"of {experiment_id}"))


def test_an_experiment_that_cannot_be_written_to_is_one_message(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    with pytest.raises(
        UserError, match="--mlflow closed: MLflow says: The filesystem tracking backend is"
    ):
        run_command("train", ["with", *tiny_words, "--mlflow", "closed"])
    assert caplog.text == ""
    assert not Path("runs/1").exists()


@pytest.mark.slow
def test_mlflows_database_has_one_run_with_all_metrics(
    tiny_words: list[str], tmp_path: Path
) -> None:
    """And nothing in a second one, which MLflow's own functions would start in Sacred's thread."""
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tokenv", "train", "with", *tiny_words, "--mlflow", "mine"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        (run,) = database.execute("select name, status from runs").fetchall()
        (count,) = database.execute("select count(*) from metrics").fetchone()
    assert run == ("tokenv-train-1", "FINISHED")
    metrics = json.loads((tmp_path / "runs/1/metrics.json").read_text())
    assert count == sum(len(metric["values"]) for metric in metrics.values())


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_stored(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--wandb mine: needs the package wandb: pip install it"):
        run_command("train", ["with", *tiny_words, "--wandb", "mine"])
    assert not Path("runs/1").exists()
