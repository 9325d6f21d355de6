"""Runs which start from another run's language model."""

import shutil

import pytest
import torch
from tensordict import TensorDict

from tokenv.agents.learned import Learned
from tokenv.config.build import load_pretrained_lm
from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints, keys
from tokenv.core.errors import UserError
from tokenv.core.run_folders import write_digests
from tokenv.lm.config import UNetConfig
from tokenv.lm.flops import Batch, matrix_parameters, update_flops
from tokenv.lm.unet import UNet
from tokenv.training.trainer import train


def run(config, folder, **options):
    _, history = train(config, folder / "checkpoints", lambda *_: None, **options)
    return {name: curve for name, curve in history.items() if "per_second" not in name}


def of_lm(folder):
    tensors, _ = checkpoints.load_model(checkpoints.find(folder, "best"))
    return {name: x for name, x in tensors.items() if name.startswith("lm.")}


@pytest.fixture
def old(tiny_settings, tmp_path):
    """Train a short run, and return its folder, from which another run starts."""
    run(resolve([], tiny_settings), tmp_path / "old")
    return tmp_path / "old"


@pytest.fixture
def settings(tiny_settings, old):
    """Return the settings of a run which starts from another one, without model and codec."""
    of_run = {key: value for key, value in tiny_settings.items() if key != "model"}
    return merge(of_run, {"seed": 1, "init_from": str(old)})


@pytest.mark.parametrize("estimator", ["reinforce", "straight", "rloo_clipped"])
def test_a_frozen_model_stays_as_it_was(settings, old, tmp_path, estimator):
    config = resolve([], merge(settings, {"freeze_lm": True, "estimator": {"name": estimator}}))
    before = of_lm(old)
    parts = build_components(config)
    assert not any(name.startswith("lm.") for name in parts.named_parameters())
    history = run(config, tmp_path / "new")
    after = of_lm(tmp_path / "new")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())
    assert max(history["train/grad_norm_lm"][1]) == 0 < min(history["train/grad_norm_policy"][1])
    free = build_components(resolve([], merge(settings, {"estimator": {"name": estimator}})))
    batch = Batch(4, 25)
    costs = [
        update_flops(each.lm, batch, each.passes.tokens(batch, 0.2), 0, each.passes)
        for each in (parts, free)
    ]
    # Samples for the reward alone go forward only, frozen or not; relaxed boundaries have a gradient in any case.
    assert (
        costs[0] < costs[1] * {"reinforce": 0.34, "straight": 0.67, "rloo_clipped": 0.5}[estimator]
    )


def test_a_frozen_pass_costs_a_third(settings):
    parts = build_components(resolve([], merge(settings, {"freeze_lm": True})))
    lm = parts.lm
    per_byte = matrix_parameters(lm.codec, lm.down, lm.early_head, lm.pooling, lm.up, lm.head)
    batch = Batch(4, 25)
    flops = update_flops(
        lm, batch, parts.passes.tokens(batch, 0.2), 7, parts.passes, attention=False
    )
    assert flops == 2 * (100 * per_byte + 20 * matrix_parameters(lm.mid)) + 700


def test_a_trained_on_model_begins_where_the_other_ended(settings, tiny_settings, old):
    config = resolve([], settings)
    best = checkpoints.find(old, "best")
    tensors = build_components(config).state_dict()
    assert config.init_from == str(best.resolve())
    assert all(torch.equal(tensors[name], x) for name, x in of_lm(old).items())
    assert config.model == resolve([], tiny_settings).model
    drawn = build_components(resolve([], tiny_settings | {"seed": 1})).agent.projection.weight
    assert torch.equal(tensors["agent.projection.weight"], drawn)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_first_run_may_be_deleted_and_resuming_equals_never_having_stopped(
    settings, old, tmp_path, frozen
):
    config = resolve(
        [], merge(settings, {"freeze_lm": frozen, "train": {"agent_learning_rate": 1e-2}})
    )
    whole = run(config, tmp_path / "whole")
    shutil.rmtree(old)
    first = checkpoints.load(checkpoints.list_complete(tmp_path / "whole" / "checkpoints")[0])
    again = resolve([], {}, first.state["config"])
    assert again == config
    assert run(again, tmp_path / "resumed", resume=first) == whole
    assert all(
        torch.equal(x, of_lm(tmp_path / "whole")[name])
        for name, x in of_lm(tmp_path / "resumed").items()
    )
    with pytest.raises(FileNotFoundError):
        build_components(config)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": {"width": 32}}, r"model\.width = 32: the run that init_from names has 16"),
        ({"init_from": None, "freeze_lm": True}, r"freeze_lm = True: expected init_from=RUN"),
        (
            {"freeze_lm": True, "agent": {"name": "uniform"}},
            r"agent\.name = 'uniform', which does not learn",
        ),
        ({"init_from": "nowhere"}, r"no complete checkpoint in nowhere"),
    ],
)
def test_mistakes_are_reported(settings, wrong, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        build_components(resolve([], merge(settings, wrong)))
    # the same is no mistake
    assert resolve([], merge(settings, {"model": {"width": 16}})).model.width == 16


def test_a_model_of_another_shape_is_refused_by_one_message(old):
    with pytest.raises(
        ValueError, match=r"init_from = .*is \w+ \[.*there and \w+ \[.*in this run \(\d+ such\)"
    ):
        load_pretrained_lm(UNet(UNetConfig(width=8, heads=2)), str(checkpoints.find(old)))


def test_a_model_of_another_type_is_refused_by_one_message(old):
    path = checkpoints.find(old)
    tensors, state = checkpoints.load_model(path)
    lm = build_components(resolve([], {}, state["config"]), read_files=False).lm
    name = "lm.head.weight"
    checkpoints.save_file(tensors | {name: tensors[name].to(torch.int64)}, path / checkpoints.MODEL)
    write_digests(path)
    with pytest.raises(
        ValueError,
        match=r"is int64 \[.*\] there and float32 \[.*\] in this run \(1 such",
    ):
        load_pretrained_lm(lm, str(path))


def test_a_zero_initialised_policy_draws_at_the_rate():
    torch.manual_seed(0)
    agent = Learned(8, rate=0.3, window=2, zero_init=True).eval()
    td = {
        keys.ENCODING: torch.randn(4, 8),
        keys.LAST_ACTIONS: torch.ones(4, 2),
        keys.DECISION_MASK: torch.ones(4) > 0,
    }
    dist = agent.get_dist(
        TensorDict(td | {keys.POSITION: torch.ones(4, dtype=torch.long)}, batch_size=4)
    )
    assert dist.mean.tolist() == pytest.approx([0.3] * 4)
    dist.log_prob(torch.ones(4)).sum().backward()
    assert agent.projection.weight.grad.abs().min() > 0


def test_a_frozen_model_needs_a_trained_early_exit_for_rewards(tiny_settings, settings, tmp_path):
    run(resolve([], merge(tiny_settings, {"agent": {"name": "uniform"}})), tmp_path / "even")
    changes = merge(settings, {"init_from": str(tmp_path / "even"), "freeze_lm": True})
    with pytest.raises(UserError, match=r"its early exit was not trained.* loss\.early=0\.1"):
        build_components(resolve([], changes))
    build_components(resolve([], merge(changes, {"estimator": {"name": "straight"}})))
    updates = {"agent": {"name": "uniform"}, "loss": {"early": 0.1}}
    run(resolve([], merge(tiny_settings, updates)), tmp_path / "with_early_exit")
    build_components(resolve([], merge(changes, {"init_from": str(tmp_path / "with_early_exit")})))
