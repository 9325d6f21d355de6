"""Metrics in TensorBoard's files, and calls of the interfaces of Weights & Biases and MLflow."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenv.cli.main import run_command
from tokenv.core.errors import UserError


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
    wandb, mlflow = Calls(), Calls()
    for name, calls in (("wandb", wandb), ("mlflow", mlflow)):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**{each: getattr(calls, each) for each in NAMES[name]}))
    run_command("train", ["with", *tiny_words, "-W", "mine", "-M", "mine"])
    ((_, begun),) = wandb.of("init")
    assert (begun["project"], begun["name"], begun["config"]["rate"]) == ("mine", "tokenv-train-1", 0.2)
    series = {name: zip(of["steps"], of["values"], strict=True) for name, of in stored().items()}
    values = [(name, step, value) for name, pairs in series.items() for step, value in pairs]
    logged_values = [(name, logged["symbols"], logged[name]) for (logged,), _ in wandb.of("log") for name in logged]
    assert sorted(each for each in logged_values if each[0] != "symbols") == sorted(values)
    assert wandb.calls[-1] == ("finish", (), {"exit_code": 0})
    assert sorted((name, more["step"], value) for (name, value), more in mlflow.of("log_metric")) == sorted(values)
    assert mlflow.calls[-1] == ("end_run", (), {"status": "FINISHED"})


NAMES = {"wandb": ["init"], "mlflow": ["set_experiment", "start_run", "log_dict", "log_metric", "end_run"]}


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_stored(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--wandb mine: needs the package wandb: pip install it"):
        run_command("train", ["with", *tiny_words, "--wandb", "mine"])
    assert not Path("runs/1").exists()
