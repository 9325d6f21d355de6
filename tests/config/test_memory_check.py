"""What layers keep of a batch, and when they are computed again instead."""

import psutil
import pytest

from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.config.hardware import kept_bytes, recomputes


@pytest.mark.parametrize(
    ("asked", "memory", "expected"), [("on", 2**50, True), ("off", 1, False), ("auto", None, None)]
)
def test_layers_are_computed_again_where_they_would_not_fit(tiny_settings, monkeypatch, asked, memory, expected):
    config = resolve([], merge(tiny_settings, {"hardware": {"activation_checkpointing": asked}}))
    kept = kept_bytes(config)
    for has in [memory] if memory else [2 * kept - 1, 2 * kept + 1]:
        machine = psutil.virtual_memory()._replace(total=has)
        monkeypatch.setattr(psutil, "virtual_memory", lambda machine=machine: machine)
        wanted = has < 2 * kept if expected is None else expected
        assert recomputes(config) == wanted
        lm = build_components(config).lm
        assert {layer.recompute for layer in (*lm.down, *lm.mid, *lm.up)} == {wanted}


def test_what_is_kept_grows_with_what_there_is(tiny_settings):
    def kept(samples=1, **changes):
        return kept_bytes(resolve([], merge(tiny_settings, changes)), samples=samples)

    assert kept(data={"seq_len": 64}) == pytest.approx(2 * kept(), abs=2)
    assert kept(samples=2) > kept()
    assert kept(hardware={"precision": "float64"}) == pytest.approx(2 * kept(), abs=2)
