"""The metric ``flops`` counts the tokens that the middle works on: those of a pack, or as padded."""

import pytest
from tiny import settings

from tokenv.config.files import resolve
from tokenv.config.schema import Config
from tokenv.lm.flops import policy_flops, update_flops
from tokenv.run.parts import build_parts
from tokenv.run.train import train


def history(config: Config, folder):
    return {name: values for name, (_, values) in train(config, folder, lambda *_: None)[1].items()}


@pytest.mark.parametrize(("estimator", "samples"), [("reinforce", 1), ("rloo", 2)])
def test_packed_tokens_are_counted_and_padding_is_not(tmp_path, estimator, samples):
    chosen = settings(train={"symbols": 1024}, estimator={"name": estimator})
    configs = {pack: resolve([], chosen | {"hardware": chosen["hardware"] | {"pack": pack}}) for pack in ("on", "off")}
    found = {pack: history(config, tmp_path / pack) for pack, config in configs.items()}
    assert found["on"]["train/boundary_rate"] == pytest.approx(found["off"]["train/boundary_rate"])
    parts, spent = build_parts(configs["on"]), 0
    assert parts.sampling.samples == samples
    symbols = 2 * 4 * 32
    for place, rate in enumerate(found["on"]["train/boundary_rate"]):
        tokens = round(rate * 2 * 4 * 31)  # of one sample, in all decisions of an update
        spent += update_flops(parts.lm, symbols, tokens, policy_flops(parts.agent), parts.passes)
        assert found["on"]["train/flops"][place] == pytest.approx(spent, rel=1e-4)
        assert found["on"]["train/flops"][place] < found["off"]["train/flops"][place]
