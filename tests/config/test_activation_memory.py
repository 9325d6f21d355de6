"""Memory of activations, and activation checkpointing where they do not fit."""

import psutil
import pytest

from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.config.hardware import activation_bytes, uses_activation_checkpointing


@pytest.mark.parametrize(
    ("setting", "memory", "expected"),
    [("on", 2**50, True), ("off", 1, False), ("auto", None, None)],
)
def test_activations_which_do_not_fit_are_computed_again(
    tiny_settings, monkeypatch, setting, memory, expected
):
    config = resolve([], merge(tiny_settings, {"hardware": {"activation_checkpointing": setting}}))
    saved = activation_bytes(config)
    for free in [memory] if memory else [2 * saved - 1, 2 * saved + 1]:
        machine = psutil.virtual_memory()._replace(available=free)
        monkeypatch.setattr(psutil, "virtual_memory", lambda machine=machine: machine)
        recomputes = free < 2 * saved if expected is None else expected
        assert uses_activation_checkpointing(config) == recomputes
        lm = build_components(config).lm
        assert {layer.recompute for layer in (*lm.down, *lm.mid, *lm.up)} == {recomputes}


def test_activation_memory_grows_with_the_batch(tiny_settings):
    def saved(samples=1, **changes):
        return activation_bytes(resolve([], merge(tiny_settings, changes)), samples=samples)

    assert saved(data={"seq_len": 64}) == pytest.approx(2 * saved(), abs=2)
    assert saved(samples=2) > saved()
    assert saved(hardware={"precision": "float64"}) == pytest.approx(2 * saved(), abs=2)
