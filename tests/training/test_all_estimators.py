"""The training loop trains with every estimator and agent, and resumes their state."""

import pytest
import torch

from tokenv.config import registry
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints
from tokenv.training.trainer import train

AGENTS = {
    "window 0": {"agent": {"name": "learned", "window": 0}},
    "window 2": {"agent": {"name": "learned", "window": 2}},
    "exact_count": {"agent": {"name": "exact_count", "window": 1}},
    "nawrot": {
        "agent": {"name": "nawrot"},
        "model": {"pooling": "mean"},
        "rate_target": {"name": "binomial"},
    },
    "hnet": {
        "agent": {"name": "hnet"},
        "model": {"pooling": "smooth"},
        "rate_target": {"name": "ratio"},
    },
}
PAST = {"arm", "disarm", "arms", "rebar", "relax"}  # want a policy that ignores its past


def configure(tiny_settings, estimator, agent):
    options = {
        "estimator": {"name": estimator},
        "train": {"batch_size": 4, "symbols": 640, "warmup_symbols": 128},
    }
    return resolve([], merge(merge(tiny_settings, options), AGENTS[agent]))


def run(config, folder, resume=None):
    logged = {}

    def log(name, value, step):
        logged.setdefault(name, []).append(value)

    train(config, folder, log, resume=resume)
    return logged


PAIRS = [(name, "window 0") for name in registry.ESTIMATORS if name != "path"]
PAIRS += [(name, "window 2") for name in registry.ESTIMATORS if name not in PAST | {"path"}]
PAIRS += [(name, "exact_count") for name in ("reinforce", "rloo", "branch")]
PAIRS += [("gumbel", "nawrot"), ("rloo", "nawrot"), ("path", "hnet")]


@pytest.mark.parametrize(("estimator", "agent"), PAIRS)
def test_every_estimator_trains(tiny_settings, tmp_path, estimator, agent):
    config = configure(tiny_settings, estimator, agent)
    logged = run(config, tmp_path)
    assert len(logged["train/bits_per_byte"]) == 5
    assert all(torch.tensor(values).isfinite().all() for values in logged.values())
    assert min(logged["train/grad_norm_policy"]) > 0
    assert logged["train/flops"][-1] > 0


@pytest.mark.parametrize(
    ("estimator", "agent"),
    [
        ("moving_average", "window 2"),
        ("off_policy", "window 2"),
        ("relax", "window 0"),
        ("ppo", "window 2"),
        ("linear_critic", "window 2"),
        ("text_critic", "window 2"),
        ("boundary_credit", "window 2"),
    ],
)
def test_resuming_is_never_having_stopped(tiny_settings, tmp_path, estimator, agent):
    config = configure(
        merge(tiny_settings, {"checkpoint": {"every_symbols": 256}}), estimator, agent
    )
    whole = run(config, tmp_path / "whole")
    first = checkpoints.list_complete(tmp_path / "whole")[0]
    resumed = run(config, tmp_path / "resumed", resume=checkpoints.load(first))
    for name, values in whole.items():
        if name != "train/symbols_per_second":
            assert resumed[name] == values, name


@pytest.mark.parametrize("estimator", sorted(PAST))
def test_invalid_options_are_rejected(tiny_settings, tmp_path, estimator):
    with pytest.raises(ValueError, match=r"set agent.window=0 for the learned agent"):
        run(configure(tiny_settings, estimator, "window 2"), tmp_path)


def test_an_agent_without_its_pooling_is_rejected(tiny_settings, tmp_path):
    config = resolve(
        [], merge(tiny_settings, {"agent": {"name": "hnet"}, "estimator": {"name": "path"}})
    )
    with pytest.raises(ValueError, match=r"expected model\.pooling=smooth"):
        run(config, tmp_path)


def test_importance_weights_are_logged(tiny_settings, tmp_path):
    logged = run(configure(tiny_settings, "off_policy", "window 2"), tmp_path)
    assert all(0 < size <= 1 for size in logged["train/effective_sample_size"])


def test_head_epochs_change_the_policy_alone_at_little_cost(tiny_settings, tmp_path):
    first = {}
    flops = {}
    for steps in (0, 3):
        changes = {
            "estimator": {"name": "reinforce", "head_epochs": steps},
            "checkpoint": {"every_symbols": 128},
        }
        config = configure(merge(tiny_settings, changes), "reinforce", "window 2")
        config = resolve([], merge(config.as_dict(), changes))
        flops[steps] = run(config, tmp_path / str(steps))["train/flops"][0]
        first[steps] = checkpoints.load(checkpoints.list_complete(tmp_path / str(steps))[0]).tensors
    for name, tensor in first[0].items():
        assert torch.equal(tensor, first[3][name]) == name.startswith("lm."), name
    policy = 6 * 3 * 16  # (w + 1) D weights, forward and backward
    assert flops[3] - flops[0] == 3 * policy * 128
