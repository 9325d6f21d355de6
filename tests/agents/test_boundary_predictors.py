"""Agents of the straight-through baselines: their published formulas, and drawing equal to stepping."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.distributions import Bernoulli
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tokenv.agents.boundary_predictors import HNet, Nawrot
from tokenv.core import keys

WIDTH = 6
OUTPUTS = (
    keys.ACTION,
    keys.ACTION_LOG_PROB,
    keys.BOUNDARY_PROB,
    keys.BOUNDARY_LOGITS,
    keys.ENTROPY,
)
seeds = st.integers(0, 1000)
kinds = st.sampled_from([Nawrot, HNet])


def observe(batch, length):
    """Sequences of different lengths."""
    position_BT = torch.arange(length).expand(batch, -1)
    valid_BT = position_BT < torch.randint(1, length + 1, (batch, 1))
    return TensorDict(
        {
            keys.ENCODING: torch.randn(batch, length, WIDTH, dtype=torch.float64),
            keys.POSITION: position_BT,
            keys.DECISION_MASK: valid_BT & (position_BT > 0),
        },
        batch_size=(batch, length),
    )


def trained(kind):
    """Build agents with weights far from the initial ones."""
    agent = kind(WIDTH).double()
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.normal_()
    return agent


def assert_same(actual, expected):
    assert torch.equal(actual[keys.ACTION], expected[keys.ACTION])
    for key in OUTPUTS[1:]:
        torch.testing.assert_close(actual[key], expected[key])


@settings(max_examples=30)
@given(kinds, st.integers(1, 20), seeds)
def test_one_position_at_a_time_equals_one_pass(kind, length, seed):
    torch.manual_seed(seed)
    agent = trained(kind)
    observation = observe(3, length)
    noise_BT = torch.rand(3, length, dtype=torch.float64)
    drawn = agent.draw(observation, noise_BT)
    for _ in range(2):  # and once more from the start
        for i in range(length):
            acted = agent(observation[:, i].clone().set(keys.NOISE, noise_BT[:, i]))
            assert_same(acted, drawn[:, i])


@settings(max_examples=30)
@given(kinds, st.none() | st.integers(1, 3), st.integers(1, 12), seeds)
def test_samples_lead_and_scoring_what_was_drawn_gives_it_back(kind, samples, length, seed):
    torch.manual_seed(seed)
    agent = trained(kind)
    observation = observe(2, length)
    noise = torch.rand(*(() if samples is None else (samples,)), 2, length, dtype=torch.float64)
    drawn = agent.draw(observation, noise)
    assert drawn.batch_size == noise.shape
    assert drawn[keys.ACTION].dtype == torch.int64
    assert (drawn[keys.ACTION][..., 0] == 1).all()
    undecided = ~observation[keys.DECISION_MASK][..., 1:]
    assert not (drawn[keys.ACTION][..., 1:] * undecided).any()
    assert_same(agent.score(observation, drawn[keys.ACTION]), drawn)
    if samples is not None:
        for k in range(samples):
            assert_same(drawn[k], agent.draw(observation, noise[k]))


@settings(max_examples=20)
@given(kinds, st.integers(0, 9), seeds)
def test_an_encoding_moves_no_earlier_decision(kind, t, seed):
    torch.manual_seed(seed)
    agent = trained(kind)
    observation = observe(2, 10)
    noise_BT = torch.rand(2, 10, dtype=torch.float64)
    changed = observation.clone()
    changed[keys.ENCODING][:, t] += 1
    assert_same(agent.draw(changed, noise_BT)[:, :t], agent.draw(observation, noise_BT)[:, :t])


def test_the_predictors_formula_and_its_relaxed_sample():
    agent = trained(Nawrot)
    observation = observe(2, 12)
    noise_BT = torch.rand(2, 12, dtype=torch.float64)
    drawn = agent.draw(observation, noise_BT)
    (first, _, last) = agent.predictor
    hidden = observation[keys.ENCODING] @ first.weight.T + first.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    logits = (hidden @ last.weight.T + last.bias)[..., 0]
    torch.testing.assert_close(drawn[keys.BOUNDARY_LOGITS], logits)
    decided = observation[keys.DECISION_MASK]
    soft = torch.sigmoid((logits - torch.logit(noise_BT)) / 0.5)
    assert torch.equal((soft > 0.5)[decided], drawn[keys.ACTION].bool()[decided])
    bernoulli = Bernoulli(logits=logits)
    log_prob = bernoulli.log_prob(drawn[keys.ACTION].double())
    torch.testing.assert_close(drawn[keys.ACTION_LOG_PROB], log_prob.where(decided, 0.0))
    torch.testing.assert_close(drawn[keys.ENTROPY], bernoulli.entropy().where(decided, 0.0))
    drawn[keys.ACTION_LOG_PROB].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in agent.parameters())


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.7])
def test_the_predictor_starts_near_the_rate(rate):
    agent = Nawrot(64, rate=rate).double()
    observation = TensorDict(
        {
            keys.ENCODING: torch.randn(500, 64, dtype=torch.float64),
            keys.POSITION: torch.ones(500, dtype=torch.long),
            keys.DECISION_MASK: torch.ones(500, dtype=torch.bool),
        },
        batch_size=500,
    )
    prob = agent.get_dist(observation).mean
    assert prob.mean().item() == pytest.approx(rate, rel=0.1)
    assert prob.std() > 0


def test_exploration_type_asks_for_the_more_probable_action():
    agent = trained(Nawrot)
    observation = observe(64, 2)[:, 1]
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        acted = agent(observation.clone())
    expected = (acted[keys.BOUNDARY_PROB] > 0.5).long()
    assert torch.equal(acted[keys.ACTION], expected)
    assert 0 < expected.sum() < 64
    assert not torch.equal(agent(observation.clone())[keys.ACTION], expected)


def plain_router(agent, x_TD, decided_T):
    """H-Net's router for one sequence in Python."""
    probs = [1.0]
    for t in range(1, len(x_TD)):
        q = agent.query.weight @ x_TD[t - 1]
        k = agent.key.weight @ x_TD[t]
        cosine = (q @ k / (q.norm() * k.norm())).item()
        probs.append(min(max((1 - cosine) / 2, 0.0), 1.0) if decided_T[t] else 0.0)
    return torch.tensor(probs, dtype=torch.float64)


@pytest.mark.parametrize("make", [lambda: HNet(WIDTH).double(), lambda: trained(HNet)])
def test_the_router_is_hnets(make):
    agent = make()
    observation = observe(3, 15)
    drawn = agent.draw(observation, torch.rand(3, 15))
    for b in range(3):
        prob = plain_router(
            agent, observation[keys.ENCODING][b], observation[keys.DECISION_MASK][b]
        )
        torch.testing.assert_close(drawn[keys.BOUNDARY_PROB][b], prob)
        assert torch.equal(drawn[keys.ACTION][b], (prob > 0.5).long())
        torch.testing.assert_close(
            drawn[keys.BOUNDARY_LOGITS][b], torch.logit(prob.clamp(1e-4, 1 - 1e-4))
        )
    assert not drawn[keys.ACTION_LOG_PROB].any()
    assert not drawn[keys.ENTROPY].any()


def test_the_routers_probabilities_and_logits_carry_gradient():
    agent = HNet(WIDTH).double()
    observation = observe(2, 40)
    observation[keys.ENCODING].requires_grad_()
    assert torch.equal(agent.query.weight, torch.eye(WIDTH))
    for key in (keys.BOUNDARY_PROB, keys.BOUNDARY_LOGITS):
        loss = agent.draw(observation, torch.rand(2, 40))[key].sum()
        grads = torch.autograd.grad(loss, (*agent.parameters(), observation[keys.ENCODING]))
        assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_the_router_refuses_to_step_out_of_order():
    agent = trained(HNet)
    observation = observe(2, 6)
    with pytest.raises(ValueError, match="expected the next position or 0"):
        agent(observation[:, 3].clone())
    for i in (0, 1):
        agent(observation[:, i].clone())
    with pytest.raises(ValueError, match="step through sequences from their start"):
        agent(observation[:, 3].clone())


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": 1.0}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=f"agent.{next(iter(options))} = "):
        Nawrot(WIDTH, **options)
