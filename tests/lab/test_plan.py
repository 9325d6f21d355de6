"""Predicted memory is what larger updates need, and the counter of live tensors sees every tensor."""

import pytest
import torch
from tiny import settings

from tokenv.config.files import resolve
from tokenv.lab.config import BenchOptions
from tokenv.lab.plan import Footprint, LiveTensors, _Update, plan

ESTIMATORS = {"learned": "reinforce", "uniform": "reinforce", "nawrot": "gumbel"}


def config(agent="learned", width=64, **sections):
    of = settings(model={"width": width, "heads": 4}, data={"seq_len": 192}, **sections)
    return resolve([], of | {"agent": {"name": agent}, "estimator": {"name": ESTIMATORS[agent]}})


def test_live_tensors_are_counted_while_they_exist():
    with LiveTensors() as counter:
        a = torch.zeros(1000)
        b = a + 1
        view = b[10:]
        assert counter.live == 8000
        del a, b
        assert counter.live == 4000  # the view holds it
        del view
        assert counter.live == 0
        assert counter.peak == 8000
        assert counter.peak_of(lambda: torch.zeros(10)) == 40
        assert counter.peak == 40


@pytest.mark.parametrize(
    ("agent", "width"),
    [
        ("learned", 32),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("uniform", 64), ("nawrot", 64), ("learned", 128))
        ),
    ],
)
def test_an_update_of_many_sequences_needs_what_two_small_ones_foretell(agent, width):
    """Compare with the live tensors of an update four times as large, at three sizes: within 2%."""
    run = config(agent, width)
    footprint, large = Footprint.measure(run), _Update(run, 8)
    assert footprint.fixed + 8 * footprint.per_sequence == pytest.approx(large.pass_bytes, rel=0.02)


def test_states_are_those_of_the_optimizer():
    """Count parameters, gradients and moments by hand."""
    for optimizer, moments in (("adamw", 2), ("muon", None)):
        update = _Update(config(train={"optimizer": optimizer}), 2)
        states, trained = update.states(""), sum(x.nbytes for x in update.parameters.values())
        assert states["gradients"] == trained
        made = sum(x.nbytes for of in update.work._optimizer.state.values() for x in of.values())
        assert states["moments"] == made
        assert moments is None or states["moments"] == pytest.approx(moments * trained, rel=0.01)


def test_ranks_divide_rows_and_shards_divide_states():
    run = config()
    found = plan(BenchOptions(run, plan=True, peak_tflops=500.0, utilisation=0.2))
    one, eight, sharded, *refused = found["ranks"]
    assert (one["rows"], eight["rows"], sharded["rows"]) == (8, 1, 1)
    assert eight["parameters_gib"] == one["parameters_gib"]
    assert sharded["parameters_gib"] < 0.2 * one["parameters_gib"]
    assert eight["activations_gib"] < 0.2 * one["activations_gib"]
    assert (one["communication_gib"], sharded["communication_gib"]) == (
        0,
        pytest.approx(1.5 * eight["communication_gib"]),
    )
    assert one["step_seconds"] == pytest.approx(8 * eight["step_seconds"])
    assert one["step_seconds"] == pytest.approx(found["flops"] / 1e14)
    assert all("64 processes cannot share" in row["error"] for row in refused)
