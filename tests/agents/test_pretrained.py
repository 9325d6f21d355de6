"""Pretrained agents: they decide as before, learn only unless frozen, and need no run folder."""

import copy
import json
import shutil
from functools import partial, reduce

import pytest
import torch
from episodes import Noise, random_noise
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictSequential
from tiny import overrides
from torch.testing import assert_close

from tokenv.agents.heuristic import Entropy
from tokenv.agents.learned import Learned
from tokenv.agents.pretrained import PretrainedAgent
from tokenv.cli.main import run_command
from tokenv.config.components import build_components
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints, keys
from tokenv.core.contracts import Sampling
from tokenv.core.errors import UserError
from tokenv.data.corpus import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.config import UNetConfig
from tokenv.lm.flops import FORWARD_FLOPS_PER_PARAMETER, matrix_parameters, policy_flops
from tokenv.lm.incremental import EncoderStepper
from tokenv.lm.unet import Encoder, UNet
from tokenv.training.trainer import train


def make_lm(width=16, window=4, seed=0):
    torch.manual_seed(seed)
    sizes = {"heads": 2, "down_layers": 2, "mid_layers": 1, "up_layers": 1}
    return UNet(UNetConfig(width=width, window=window, **sizes)).double()


def make_agent(kind):
    if kind == "entropy":
        agent = Entropy(0.3)
        agent.theta.fill_(5.5)
    else:
        agent = Learned(16, window=2, scale=1.0).double()
        torch.nn.init.normal_(agent.projection.weight, std=0.3)
    return agent.eval()


def load(lm, agent, **options):
    encoder = Encoder(lm.config, lm.codec, lm.compute_dtype).double()
    encoder.load_state_dict(
        {name: x for name, x in lm.state_dict().items() if name in encoder.state_dict()}
    )
    return PretrainedAgent(agent, encoder, partial(EncoderStepper, encoder), **options)


@settings(max_examples=15)
@given(
    st.sampled_from(["learned", "entropy"]),
    st.booleans(),
    st.integers(1, 3),
    st.integers(2, 12),
    st.integers(0, 99),
)
def test_it_decides_as_on_its_old_model_step_by_step_and_at_once(kind, frozen, batch, length, seed):
    old = make_lm()
    new = make_lm(width=8, window=3, seed=1)
    agent = make_agent(kind)
    if kind == "entropy":
        torch.nn.init.normal_(old.early_head.weight)
    mine = load(old, agent, frozen=frozen)
    generator = torch.Generator().manual_seed(seed)
    symbol_BN = torch.randint(256, (batch, length), generator=generator)
    noise_BT = random_noise(batch, length - 1)
    env = TokenizationEnv(new, TensorSource(symbol_BN), batch, window=mine.window)
    at_once = env.one_pass(mine, noise=noise_BT).detach()
    as_ever = rollout(old, agent, symbol_BN, noise=noise_BT)
    assert torch.equal(at_once[keys.ACTION], as_ever[keys.ACTION])
    assert_close(at_once[keys.BOUNDARY_PROB], as_ever[keys.BOUNDARY_PROB])
    assert at_once[keys.ENCODING].shape[-1] == 8  # the observation stays the new model's
    for _ in range(2):  # and once more from the start
        env.source.position = 0
        stepped = env.rollout(length - 1, TensorDictSequential(Noise(noise_BT), mine)).detach()
        for key in (keys.ACTION, keys.BOUNDARY_PROB, keys.LOG_LIKELIHOOD):
            assert_close(stepped[key], at_once[key])


def test_it_scores_what_it_draws():
    mine = load(make_lm(), make_agent("learned"), frozen=False)
    td = rollout(make_lm(seed=1), mine, torch.randint(256, (2, 9)), Sampling(num_samples=3))
    again = mine.score(
        td[0].select(keys.SYMBOL, keys.POSITION, keys.DECISION_MASK), td[keys.ACTION]
    )
    assert_close(again[keys.ACTION_LOG_PROB], td[keys.ACTION_LOG_PROB])


def test_only_a_free_one_has_gradients_and_none_reach_the_new_model():
    symbol_BN = torch.randint(256, (2, 9))
    new = make_lm(seed=1)
    for frozen in (False, True):
        mine = load(make_lm(), make_agent("learned"), frozen=frozen)
        log_prob = rollout(new, mine, symbol_BN)[keys.ACTION_LOG_PROB].sum()
        assert mine.trainable is not frozen
        assert log_prob.requires_grad is not frozen
        if not frozen:
            log_prob.backward()
            assert mine.encoder.down[0].qkv.weight.grad.any()
            assert mine.agent.projection.weight.grad.any()
    assert all(p.grad is None for p in new.parameters())
    assert not mine.train().agent.training


def test_positions_come_in_order():
    mine = load(make_lm(), make_agent("learned"))
    env = TokenizationEnv(make_lm(seed=1), TensorSource(torch.randint(256, (2, 9))), 2, window=2)
    td = env.reset()
    mine(td.clone())
    with pytest.raises(ValueError, match="expected the next position or 0"):
        mine(td.set(keys.POSITION, torch.full((2,), 4)))


def test_generation_equals_one_pass_over_the_result():
    new = make_lm(seed=1)
    mine = load(make_lm(), make_agent("learned"))
    written = generate(
        new, mine, torch.randint(256, (2, 5)), 8, generator=torch.Generator().manual_seed(3)
    )
    noise_BN = torch.rand(2, 13, generator=torch.Generator().manual_seed(3))
    drawn = rollout(new, mine, written.symbol_BN, noise=noise_BN[:, :-1])
    assert torch.equal(drawn[keys.ACTION], written.action_BN[:, :-1])


# --- runs ---


@pytest.fixture
def old_run(series_settings, tmp_path):
    """Train a short run on one family of series; return the folder from which another run loads its agent."""
    folder = tmp_path / "old"
    train(resolve([], series_settings), folder / "checkpoints", lambda *_: None)
    return folder


def on_bursts(series_settings, old_run, **agent):
    data = {"data": {"source": "bursts"}, "seed": 1, "model": {"width": 8}}
    return resolve(
        [],
        {"agent": {"pretrained": str(old_run)} | agent},
        merge(resolve([], series_settings).as_dict(), data),
    )


def tensors(folder):
    return checkpoints.load_model(checkpoints.find(folder, "latest"))[0]


@pytest.mark.parametrize("frozen", [True, False])
def test_an_agent_goes_to_another_source(series_settings, old_run, tmp_path, frozen):
    config = on_bursts(series_settings, old_run, frozen=frozen)
    parts = build_components(config)
    before = checkpoints.load_model(checkpoints.find(old_run, "best"))[0]
    assert torch.equal(parts.agent.agent.projection.weight, before["agent.projection.weight"])
    assert torch.equal(parts.agent.encoder.down[0].qkv.weight, before["lm.down.0.qkv.weight"])
    last, history = train(config, tmp_path / "new" / "checkpoints", lambda *_: None)
    after = tensors(tmp_path / "new")
    same = [torch.equal(after["agent.agent.projection.weight"], before["agent.projection.weight"])]
    same += [torch.equal(after["agent.encoder.down.0.qkv.weight"], before["lm.down.0.qkv.weight"])]
    assert same == [frozen, frozen]
    assert not torch.equal(after["lm.head.weight"], build_components(config).lm.head.weight)
    assert (max(history["train/grad_norm_policy"][1]) == 0) is frozen
    assert (last.loss_early is None) is frozen


def test_it_costs_a_forward_pass_of_its_own_layers(series_settings, old_run):
    agent = build_components(on_bursts(series_settings, old_run)).agent
    used = (agent.agent, agent.encoder.codec, agent.encoder.down)
    assert policy_flops(agent) == FORWARD_FLOPS_PER_PARAMETER * matrix_parameters(*used)


def test_without_the_old_run_resuming_equals_never_having_stopped(
    series_settings, old_run, tmp_path
):
    config = on_bursts(series_settings, old_run, frozen=False)
    _, whole = train(config, tmp_path / "whole" / "checkpoints", lambda *_: None)
    shutil.rmtree(old_run)
    saved = checkpoints.list_complete(tmp_path / "whole" / "checkpoints")
    stored_config = resolve([], {}, checkpoints.load(saved[0]).state["config"])
    assert stored_config == config
    _, resumed = train(
        stored_config,
        tmp_path / "resumed" / "checkpoints",
        lambda *_: None,
        resume=checkpoints.load(saved[0]),
    )
    for name in whole.keys() - {"train/symbols_per_second"}:
        assert resumed[name] == whole[name], name
    with pytest.raises(FileNotFoundError):
        build_components(config)


def test_a_loaded_agent_can_be_loaded(series_settings, old_run, tmp_path):
    first = on_bursts(series_settings, old_run)
    train(first, tmp_path / "first" / "checkpoints", lambda *_: None)
    second = on_bursts(series_settings, tmp_path / "first")
    assert second.agent["trained"] == first.agent["trained"]
    one, other = (build_components(config).agent.state_dict() for config in (first, second))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_commands_train_segment_and_evaluate_with_a_pretrained_agent(
    tiny_settings, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = overrides(tiny_settings)
    run_command("train", ["with", *words])
    settings = [word for word in words if not word.startswith("agent.")]
    run_command(
        "train",
        ["with", *settings, "agent.pretrained=runs/1", "agent.frozen=True", "data.lexicon_size=30"],
    )
    shutil.rmtree("runs/1")
    assert run_command("segment", ["with", "run=runs/2", "text=abcdef"])["characters"] == 6
    assert run_command("evaluate", ["with", "run=runs/2"])["sampled"]["boundary_rate"] > 0


def test_a_stored_section_of_wrong_types_is_one_message(series_settings, old_run):
    """Names at any depth of a run are checked, as a run may come from anybody."""
    base = json.loads(json.dumps(on_bursts(series_settings, old_run).as_dict()))

    def places(section, above=()):
        for key, value in section.items():
            yield (*above, key)
            if isinstance(value, dict):
                yield from places(value, (*above, key))

    refused = 0
    for *above, key in list(places(base["agent"])):
        for wrong in (None, 3, -1.5, "x", [1], {}, {"name": "loaded"}):
            changed = copy.deepcopy(base)
            section = reduce(dict.__getitem__, above, changed["agent"])
            section[key] = wrong
            try:
                build_components(resolve([], {}, changed), torch.device("meta"), read_files=False)
            except UserError:
                refused += 1
    assert refused > 100


def test_mistakes_are_reported(series_settings, tiny_settings, old_run, tmp_path):
    for agent, message in (
        ({"window": 3}, r"agent\.window: beside agent\.pretrained expected only agent\.frozen"),
        ({"frozen": "yes"}, r"agent\.frozen = 'yes': expected true"),
    ):
        with pytest.raises(ValueError, match=message):
            on_bursts(series_settings, old_run, **agent)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        on_bursts(series_settings, tmp_path / "nowhere")
    base = resolve([], series_settings).as_dict()
    updates = {"agent": {"pretrained": str(old_run)}}
    with pytest.raises(ValueError, match=r"rate = 0\.3: the agent that .* expected rate=0\.2"):
        build_components(resolve([], updates | {"rate": 0.3}, base), torch.device("meta"))
    with pytest.raises(ValueError, match="load an agent that was trained on data of this kind"):
        build_components(
            resolve([], updates, resolve([], tiny_settings).as_dict()), torch.device("meta")
        )
    train(
        resolve([], series_settings | {"agent": {"name": "uniform"}}),
        tmp_path / "u" / "checkpoints",
        lambda *_: None,
    )
    with pytest.raises(
        ValueError, match=r"its agent 'uniform' has no trained parameters: set agent\.name=uniform"
    ):
        build_components(
            resolve([], {"agent": {"pretrained": str(tmp_path / "u")}}, base), torch.device("meta")
        )
