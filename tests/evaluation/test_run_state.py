"""The state of a run is saved and read completely."""

from dataclasses import replace
from pathlib import Path

import pytest

from tokenv.config.components import build_components
from tokenv.config.schema import Config
from tokenv.core.checkpoints import Checkpoint, save
from tokenv.evaluation.evaluator import eval_mode
from tokenv.evaluation.run_state import Evaluation, RunState


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    validation = Evaluation("nats_per_value", 1.5, 0.25, 2.0, 0.2, 0.5, boundary_f1=0.75)
    state = RunState(
        Config(seed=2).as_dict(),
        "nats_per_value",
        step=4,
        symbols=64,
        flops=10,
        data={"position": 1},
    )
    logged: list[tuple[str, float, int]] = []
    state.record("train", {"nats_per_value": 3.0, "flops": 10}, lambda *one: logged.append(one))
    assert state.loss is None
    state.validation = validation
    state.record("validation", validation.metrics(), lambda *one: logged.append(one))
    assert state.loss == 1.5
    path = save(tmp_path, Checkpoint({}, {}, state.as_dict()), keep=1)
    read = RunState.read(path)
    assert read == state
    assert read.settings == Config(seed=2)
    again: list[tuple[str, float, int]] = []
    read.replay(lambda *one: again.append(one))
    assert again == logged
    assert not any("recall" in name for name, _, _ in logged)  # None is not measured
    read.symbols += 16
    assert read.loss is None  # it has learned since


@pytest.mark.parametrize("mode", [True, False])
def test_evaluating_leaves_the_mode_as_it_was(mode: bool) -> None:
    parts = build_components(Config(agent={"name": "uniform"}))
    parts.train(mode)

    def fail() -> None:
        with eval_mode(parts):
            assert not parts.lm.training
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert parts.lm.training is mode


@pytest.mark.parametrize(
    ("agent", "rate", "missed"),
    [
        ("learned", 0.1, False),
        ("learned", 0.119, False),
        ("learned", 0.121, True),
        ("uniform", 0.05, True),
        ("whitespace", 0.3, False),
    ],
)
def test_a_run_says_that_its_rate_misses_the_target(agent: str, rate: float, missed: bool) -> None:
    last = Evaluation("nats_per_value", 1.0, 0.1, 1.0, rate, 0.0)
    state = RunState({"rate": 0.1, "agent": {"name": agent}}, "nats_per_value", validation=last)
    message = f"the run draws {rate:.3g} boundaries a step and misses its target, rate = 0.1"
    assert state.missed_rate == (message if missed else "")
    assert not replace(state, validation=None).missed_rate
