"""Boundaries at a rate which is drawn for every sequence."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.agents.fixed import RandomRate
from tokenv.config.files import resolve
from tokenv.core import keys
from tokenv.data.corpus import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.training.trainer import train


def observe(batch, length, length_B=None):
    position_BT = torch.arange(length).expand(batch, -1)
    valid_BT = (
        position_BT < (torch.full((batch,), length) if length_B is None else length_B)[:, None]
    )
    masks = {keys.POSITION: position_BT, keys.DECISION_MASK: valid_BT & (position_BT > 0)}
    return TensorDict(masks, batch_size=(batch, length))


def test_every_sample_of_every_sequence_has_a_rate_of_its_own():
    agent = RandomRate(0.1, 0.5)
    noise = torch.rand(2, 3, 20_001)
    drawn = agent.draw(observe(3, 20_001), noise)
    rate = 0.1 + 0.4 * noise[..., 0]
    assert (drawn[keys.ACTION][..., 0] == 1).all()
    torch.testing.assert_close(
        drawn[keys.BOUNDARY_PROB][..., 1:], rate[..., None].expand(-1, -1, 20_000)
    )
    torch.testing.assert_close(
        drawn[keys.ACTION][..., 1:].float().mean(-1), rate, atol=0.02, rtol=0
    )
    assert rate.unique().numel() == 6


def test_rates_are_even_between_the_bounds():
    agent = RandomRate()
    prob = agent.draw(observe(10_000, 2), torch.rand(10_000, 2))[keys.BOUNDARY_PROB][:, 1]
    at = torch.linspace(0.05, 0.95, 19)
    torch.testing.assert_close(prob.quantile(at), 0.05 + 0.35 * at, atol=0.01, rtol=0)


def test_probabilities_are_those_of_the_draws():
    """Forced boundaries have probability 1, and no boundary is drawn in the padding."""
    drawn = RandomRate().draw(observe(2, 8, torch.tensor([8, 4])), torch.rand(2, 8))
    action = drawn[keys.ACTION]
    prob = drawn[keys.BOUNDARY_PROB]
    assert not action[1, 4:].any()
    torch.testing.assert_close(
        drawn[keys.ACTION_LOG_PROB].exp(), torch.where(action.bool(), prob, 1 - prob)
    )
    assert (drawn[keys.ACTION_LOG_PROB][:, 0] == 0).all()


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 1000))
def test_one_position_at_a_time_equals_one_pass(batch, length, seed):
    torch.manual_seed(seed)
    agent = RandomRate()
    noise = torch.rand(batch, length)
    observation = observe(batch, length, torch.randint(1, length + 1, (batch,)))
    drawn = agent.draw(observation, noise)
    for i in range(length):
        acted = agent(observation[:, i].clone().set(keys.NOISE, noise[:, i]))
        for key in agent.out_keys:
            assert torch.equal(acted[key], drawn[key][:, i])


def test_rows_that_start_anew_get_a_new_rate():
    agent = RandomRate()

    def act(position, noise):
        td = observe(2, 9)[:, 0].set(keys.POSITION, torch.tensor(position))
        td.set(keys.DECISION_MASK, td[keys.POSITION] > 0)
        return agent(td.set(keys.NOISE, torch.tensor(noise)))[keys.BOUNDARY_PROB].tolist()

    assert act([0, 0], [0.0, 1.0]) == [1, 1]
    assert act([1, 1], [0.5, 0.5]) == pytest.approx([0.05, 0.4])
    assert act([2, 0], [0.5, 0.5]) == pytest.approx([0.05, 1])
    assert act([3, 1], [0.5, 0.9]) == pytest.approx([0.05, 0.225])
    with pytest.raises(ValueError, match="expected the next position or 0"):
        act([5, 2], [0.5, 0.5])


def test_the_environment_steps_as_it_passes(tiny_lm):
    source = TensorSource(torch.randint(256, (4, 10)))
    env = TokenizationEnv(tiny_lm, source, 2, window=0)
    agent = RandomRate()
    noise = torch.rand(2, 9)
    stepped = env.rollout(9, lambda td: agent(td.set(keys.NOISE, noise[:, td[keys.POSITION][0]])))
    symbol_BN = torch.cat([stepped[keys.SYMBOL], stepped["next", keys.SYMBOL][:, -1:]], 1)
    passed = rollout(tiny_lm, agent, symbol_BN, noise=noise)
    for key in (keys.ACTION, keys.BOUNDARY_PROB, keys.ACTION_LOG_PROB):
        assert torch.equal(stepped[key], passed[key])
    torch.testing.assert_close(stepped[keys.REWARD], passed[keys.REWARD])


def test_without_noise_a_row_keeps_the_rate_that_it_drew(tiny_lm):
    env = TokenizationEnv(tiny_lm, TensorSource(torch.randint(256, (4, 10))), 2, window=0)
    prob = env.rollout(9, RandomRate())[keys.BOUNDARY_PROB][:, 1:]
    assert torch.equal(prob, prob[:, :1].expand_as(prob))
    assert prob[0, 0] != prob[1, 0]


def test_writing_on_draws_as_one_pass_does(tiny_lm):
    prompt = torch.randint(256, (3, 4))
    agent = RandomRate()
    written = generate(tiny_lm, agent, prompt, 8, generator=torch.Generator().manual_seed(5))
    noise = torch.rand(3, 12, generator=torch.Generator().manual_seed(5))
    drawn = agent.draw(observe(3, 12), noise)
    assert torch.equal(written.action_BN, drawn[keys.ACTION])
    torch.testing.assert_close(written.boundary_prob_BN, drawn[keys.BOUNDARY_PROB])


def test_a_language_model_trains_on_it(tiny_settings, tmp_path):
    logged = {}
    random_rate = {"agent": {"name": "random_rate", "low": 0.1, "high": 0.3}}
    config = resolve([], tiny_settings | random_rate)
    train(config, tmp_path, lambda name, value, step: logged.setdefault(name, []).append(value))
    assert all(0.05 < rate < 0.4 for rate in logged["train/boundary_rate"])
    assert "train/advantage_std" not in logged
    assert not RandomRate.trainable


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.4), (0.5, 0.4), (0.1, 1.2)])
def test_impossible_rates_are_refused(low, high):
    with pytest.raises(ValueError, match=rf"agent\.low = {low}, agent\.high = {high}"):
        RandomRate(low, high)
