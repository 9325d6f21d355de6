"""The training loop learns, resumes bit for bit, survives kills, and stops with a clear message."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.config.schema import Config, LossConfig, TrainConfig
from tokenv.core import atomic, checkpoints
from tokenv.evaluation.run_state import History
from tokenv.training import optimizers, update
from tokenv.training import trainer as training
from tokenv.training.metrics import NotFiniteError
from tokenv.training.optimizers import learning_rate
from tokenv.training.trainer import train

TWO_PASSES = {"batch_size": 4, "gradient_accumulation_steps": 2}


def run(
    settings: dict[str, Any], folder: Path, **options: Any
) -> tuple[History, list[tuple[str, float, int]]]:
    logged: list[tuple[str, float, int]] = []
    config = resolve([], settings)
    _, history = train(
        config, folder, lambda name, value, x: logged.append((name, value, x)), **options
    )
    return history, logged


def without_clock(logged: list[tuple[str, float, int]]) -> dict[str, list[tuple[int, str]]]:
    metrics: dict[str, list[tuple[int, str]]] = {}
    for name, value, x in logged:
        if "per_second" not in name:
            metrics.setdefault(name, []).append((x, repr(value)))
    return metrics


@pytest.mark.parametrize("agent", ["learned", "uniform", "random"])
def test_every_agent_trains_without_a_special_case(
    agent: str, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny_settings |= {"agent": {"name": agent}}
    tiny_settings["train"] |= {"symbols": 16_000, "learning_rate": 1e-2}
    history, _ = run(tiny_settings, tmp_path)
    bits = history["train/bits_per_byte"][1]
    assert sum(bits[-5:]) / 5 < sum(bits[:5]) / 5 - 1
    assert history["train/boundary_rate"][1][-1] == pytest.approx(0.2, abs=0.12)
    assert (history["train/grad_norm_policy"][1][-1] > 0) == (agent == "learned")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_equals_never_having_stopped(
    optimizer: str, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    tiny_settings["train"]["optimizer"] = optimizer
    _, whole = run(tiny_settings, tmp_path / "whole")
    saved = checkpoints.list_complete(tmp_path / "whole")
    assert len(saved) >= 3
    for number, path in enumerate(saved[:-1]):
        folder = tmp_path / f"resumed-{number}"
        _, resumed = run(tiny_settings, folder, resume=checkpoints.load(path))
        assert without_clock(resumed) == without_clock(whole)
        last = checkpoints.load(checkpoints.list_complete(folder)[-1])
        expected = checkpoints.load(saved[-1])
        for name, tensor in (expected.tensors | expected.optimizer).items():
            assert torch.equal((last.tensors | last.optimizer)[name], tensor), name
        assert last.state["data"] == expected.state["data"]


def test_the_agent_has_a_learning_rate_of_its_own(tiny_settings: dict[str, Any]) -> None:
    """AdamW's first step is as long as the learning rate, whatever the gradient."""
    tiny_settings["train"] |= {"learning_rate": 1e-3, "weight_decay": 0.0}
    moved = {}
    for own in (None, 5e-3):
        rates = {"agent_learning_rate": own, "embedding_learning_rate": own and 2 * own}
        config = resolve([], tiny_settings | {"train": tiny_settings["train"] | rates})
        parameters = build_components(config).named_parameters()
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = torch.ones_like(parameter)
        optimizers.make_optimizer(config.train, parameters).step()
        moved[own] = {
            name: (before[name] - parameter).max().item() for name, parameter in parameters.items()
        }
    assert any(name.startswith("agent.") for name in moved[None])
    for name, step in moved[5e-3].items():
        assert moved[None][name] == pytest.approx(1e-3, rel=1e-2)
        owner, part = name.split(".")[:2]
        expected = 5e-3 if owner == "agent" else 1e-3 if part in ("down", "mid", "up") else 1e-2
        assert step == pytest.approx(expected, rel=1e-2), name


def test_its_own_learning_rate_resumes_bit_for_bit(
    tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    same = tiny_settings["train"] | {"agent_learning_rate": 3e-3, "learning_rate": 3e-3}
    _, plain = run(
        tiny_settings | {"train": same | {"agent_learning_rate": None}}, tmp_path / "plain"
    )
    _, equal = run(tiny_settings | {"train": same}, tmp_path / "equal")
    assert without_clock(equal) == without_clock(plain)
    faster = tiny_settings | {"train": same | {"agent_learning_rate": 3e-2}}
    _, whole = run(faster, tmp_path / "whole")
    assert without_clock(whole) != without_clock(plain)
    saved = checkpoints.list_complete(tmp_path / "whole")
    _, resumed = run(faster, tmp_path / "resumed", resume=checkpoints.load(saved[0]))
    assert without_clock(resumed) == without_clock(whole)


def test_interrupt_finishes_the_step_and_resumes_bit_for_bit(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_settings["train"] |= TWO_PASSES
    _, whole = run(tiny_settings, tmp_path / "whole")
    steps = 0
    compute = update.compute_losses

    def interrupted_in_the_third_step(*arguments: Any) -> dict[str, torch.Tensor]:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return compute(*arguments)

    monkeypatch.setattr(update, "compute_losses", interrupted_in_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        run(tiny_settings, tmp_path / "stopped")
    monkeypatch.undo()
    saved = checkpoints.list_complete(tmp_path / "stopped")
    assert saved[-1].name == "step-00000003"
    _, resumed = run(tiny_settings, tmp_path / "stopped", resume=checkpoints.load(saved[-1]))
    assert without_clock(resumed) == without_clock(whole)


def test_a_loss_that_is_not_finite_stops_with_step_origin_and_checkpoint(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    total = update.total_loss
    tiny_settings["train"] |= TWO_PASSES

    def broken(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return total(*arguments) * (math.nan if calls > 9 else 1)

    monkeypatch.setattr(update, "total_loss", broken)
    with pytest.raises(NotFiniteError, match=r"step 4: grad_norm_lm = nan.*step-00000004.*words"):
        run(tiny_settings, tmp_path)


def test_a_kill_while_saving_leaves_the_last_good_checkpoint(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny_settings, tmp_path)
    before = checkpoints.list_complete(tmp_path)
    good = checkpoints.load(before[-1])

    class Killed(BaseException):
        pass

    def kill(*_: Any, **__: Any) -> None:
        raise Killed

    for room, moment in ((checkpoints, "save_file"), (atomic, "_flush")):
        with monkeypatch.context() as patch:
            patch.setattr(room, moment, kill)
            with pytest.raises(Killed):
                checkpoints.save(tmp_path, good, keep=1)
        assert checkpoints.list_complete(tmp_path) == before
        assert checkpoints.load(before[-1]).state == good.state


def test_accumulating_averages_gradients(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    """Fixed boundaries and no batch statistics: two passes of 4 sequences are one pass of 8."""
    tiny_settings |= {"agent": {"name": "uniform"}}
    tiny_settings["hardware"] |= {"precision": "float64"}
    once = tiny_settings
    twice = tiny_settings | {"train": tiny_settings["train"] | TWO_PASSES}
    one, _ = run(once, tmp_path / "once")
    two, _ = run(twice, tmp_path / "twice")
    for name in ("train/bits_per_byte", "train/grad_norm_lm", "train/flops"):
        assert one[name][1] == pytest.approx(two[name][1], rel=1e-9), name


def test_schedule_is_counted_in_bytes() -> None:
    config = TrainConfig(
        symbols=1000, warmup_symbols=200, learning_rate=2.0, final_learning_rate=0.1
    )
    assert [learning_rate(config, b) for b in (0, 100, 200)] == [0.0, 1.0, 2.0]
    assert learning_rate(config, 600) == pytest.approx(2.0 * (0.1 + 0.9 * 0.5))
    assert learning_rate(config, 1000) == learning_rate(config, 5000) == pytest.approx(0.2)
    released = TrainConfig(
        symbols=1000, warmup_symbols=200, learning_rate=2.0, initial_learning_rate=0.1
    )
    assert [learning_rate(released, b) for b in (0, 100, 200)] == pytest.approx([0.2, 1.1, 2.0])


def test_weight_decay_reaches_vectors_if_asked(tiny_settings: dict[str, Any]) -> None:
    for decays in (False, True):
        config = resolve(
            [], tiny_settings | {"train": tiny_settings["train"] | {"decay_vectors": decays}}
        )
        parameters = build_components(config).named_parameters()
        groups = optimizers.make_optimizer(config.train, parameters).param_groups
        decay = {
            parameter: group["weight_decay"] for group in groups for parameter in group["params"]
        }
        assert {decay[x] for x in parameters.values() if x.dim() >= 2} == {
            config.train.weight_decay
        }
        assert {decay[x] for x in parameters.values() if x.dim() < 2} == {
            config.train.weight_decay * decays
        }


def test_the_likelihoods_weight_scales_its_loss_alone() -> None:
    losses = {
        name: torch.tensor(value)
        for name, value in (("lm", 2.0), ("early", 3.0), ("policy", 5.0), ("rate", 7.0))
    }
    weights = LossConfig(likelihood=0.9, early=0.1, policy=0.01, rate=0.02)
    assert update.total_loss(losses, weights).item() == pytest.approx(
        0.9 * 2 + 0.1 * 3 + 0.01 * 5 + 0.02 * 7
    )


@pytest.mark.parametrize("warmup", [1000, 1001, 10**9])
def test_a_warmup_that_does_not_fit_is_a_tenth_of_the_run(warmup: int) -> None:
    config, expected = (
        TrainConfig(symbols=1000, warmup_symbols=many, learning_rate=2.0) for many in (warmup, 100)
    )
    rates = [learning_rate(config, symbols) for symbols in range(0, 1200, 10)]
    assert rates == [learning_rate(expected, symbols) for symbols in range(0, 1200, 10)]
    assert max(rates) == rates[10] == 2.0
    assert rates[-20] == 0
    assert TrainConfig(symbols=1000, warmup_symbols=999).warmup == 999
    assert learning_rate(TrainConfig(symbols=1, warmup_symbols=1), 1) == 0


def test_everything_is_reproducible_by_seed(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    _, first = run(tiny_settings, tmp_path / "a")
    _, same = run(tiny_settings, tmp_path / "b")
    _, other = run(tiny_settings | {"seed": 1}, tmp_path / "c")
    assert without_clock(first) == without_clock(same)
    assert without_clock(first) != without_clock(other)


def test_checkpoint_is_json_and_safetensors(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    run(tiny_settings, tmp_path)
    path = checkpoints.list_complete(tmp_path)[-1]
    names = ["digests.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert sorted(file.name for file in path.iterdir()) == names
    state = json.loads((path / "state.json").read_text())
    config = resolve([], {}, base=state["config"])
    assert config == resolve([], tiny_settings)
    parts = build_components(config)
    parts.load_state_dict(checkpoints.load_model(path)[0])
    assert isinstance(config, Config)


def read_metrics_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read metrics late, as on a GPU: those of an update while the next one is computed."""
    monkeypatch.setattr(training, "is_accelerator", lambda device: True)


def test_reading_metrics_late_changes_nothing(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_settings["train"]["symbols"] = 1536
    _, logged = run(tiny_settings, tmp_path / "soon")
    read_metrics_late(monkeypatch)
    _, late = run(tiny_settings, tmp_path / "late")
    assert without_clock(late) == without_clock(logged)
    soon, later = (checkpoints.list_complete(tmp_path / name) for name in ("soon", "late"))
    assert [path.name for path in later] == [path.name for path in soon]
    for path, other in zip(soon, later, strict=True):
        one = checkpoints.load(path)
        two = checkpoints.load(other)
        assert without_clock_state(two.state) == without_clock_state(one.state)
        for name, tensor in (one.tensors | one.optimizer).items():
            assert torch.equal((two.tensors | two.optimizer)[name], tensor), name


def without_clock_state(state: dict[str, Any]) -> dict[str, Any]:
    history = {name: of for name, of in state["history"].items() if "per_second" not in name}
    return state | {"history": history}


@pytest.mark.parametrize("bad", [3, 5])  # right before a checkpoint, and in the last update
def test_a_nonfinite_update_read_late_changes_no_parameter_and_no_checkpoint(
    bad: int, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    total = update.total_loss
    parameters = []
    make = optimizers.make_optimizer

    def broken(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return total(*arguments) * (math.nan if (calls - 1) // 2 == bad else 1)

    def kept(config: TrainConfig, named: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
        parameters.extend(named.values())
        return make(config, named)

    tiny_settings["train"] |= TWO_PASSES | {"symbols": 1536}
    tiny_settings["validation"]["every_symbols"] = 10_000  # which would ask, too
    read_metrics_late(monkeypatch)
    monkeypatch.setattr(update, "total_loss", broken)
    monkeypatch.setattr(training, "make_optimizer", kept)
    with pytest.raises(NotFiniteError, match=rf"step {bad}: grad_norm_lm = nan.*words"):
        run(tiny_settings, tmp_path)
    assert all(parameter.isfinite().all() for parameter in parameters)
    saved = checkpoints.list_complete(tmp_path)
    assert [checkpoints.load(path).state["step"] for path in saved] == [4][: bad // 4]
    assert all(
        tensor.isfinite().all()
        for path in saved
        for tensor in checkpoints.load(path).tensors.values()
    )


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing(name: str, tiny_settings: dict[str, Any]) -> None:
    """A skipped step changes neither parameters nor moments nor the number of steps; other steps are unchanged."""
    tiny_settings["train"]["optimizer"] = name
    config = resolve([], tiny_settings)
    states = []
    for flags in ([None, None, None], [0.0, 1.0, 0.0, 0.0]):
        parameters = build_components(config).named_parameters()
        optimizer = optimizers.make_optimizer(config.train, parameters)
        numbers = torch.Generator().manual_seed(0)
        for flag in flags:
            for parameter in parameters.values():
                gradient = torch.full_like(parameter, math.nan)
                parameter.grad = (
                    gradient if flag else torch.randn(parameter.shape, generator=numbers)
                )
            with optimizers.skip_if_nonfinite(
                optimizer, None if flag is None else torch.tensor(flag)
            ):
                optimizers.optimizer_step(optimizer, parameters, max_norm=1.0)
        states.append(dict(parameters) | checkpoints.optimizer_tensors(optimizer, parameters))
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name
