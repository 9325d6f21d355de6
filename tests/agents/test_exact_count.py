"""The exact-count policy draws an exact number of boundaries, with exact probabilities."""

import itertools

import pytest
import torch
from enumeration import EXACT, flat_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.agents.exact_count import ExactCount
from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.estimators.recipes import early_exit
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

WIDTH = 8


def observe(batch, length):
    """T = N - 1 observations of N symbols."""
    position_T = torch.arange(length - 1)
    return TensorDict(
        {
            keys.SYMBOL: torch.zeros(batch, length - 1, dtype=torch.long),
            keys.ENCODING: torch.randn(batch, length - 1, WIDTH, dtype=torch.float64),
            keys.POSITION: position_T.expand(batch, -1),
            keys.DECISION_MASK: (position_T > 0).expand(batch, -1),
        },
        batch_size=(batch, length - 1),
    )


def make(length, rate, window=2, spread=2.0):
    agent = ExactCount(WIDTH, length, rate=rate, window=window, scale=1.0).double()
    with torch.no_grad():
        agent.projection.weight.normal_(std=spread)
    return agent


@settings(max_examples=40)
@given(st.integers(4, 30), st.floats(0.26, 0.95), st.integers(0, 3), st.integers(0, 999))
def test_every_sequence_has_the_exact_number(length, rate, window, seed):
    torch.manual_seed(seed)
    agent = make(length, rate, window)
    td = agent.draw(observe(3, length), torch.rand(2, 3, length - 1, dtype=torch.float64))
    assert (td[keys.ACTION].sum(-1) == min(int(length * rate + 1e-9), length - 1)).all()
    assert (td[keys.ACTION][..., 0] == 1).all()


@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_probabilities_of_all_boundaries_sum_to_one(spread):
    length, rate = 8, 0.5  # 4 boundaries, one of them forced, 6 places for the other three
    agent = make(length, rate, spread=spread)
    observation = observe(1, length)
    free = torch.tensor(
        [bits for bits in itertools.product((0, 1), repeat=length - 2) if sum(bits) == 3]
    )
    action = torch.cat([torch.ones(len(free), 1, dtype=torch.long), free], 1).unsqueeze(1)
    prob_K = agent.score(observation, action)[keys.ACTION_LOG_PROB].sum((1, 2)).exp()
    torch.testing.assert_close(prob_K.sum().item(), 1.0, rtol=0, atol=1e-12)
    if spread == 0:  # without a preference all are equally likely
        torch.testing.assert_close(prob_K, torch.full_like(prob_K, 1 / len(free)))


def test_the_score_function_is_exact_for_it():
    torch.manual_seed(0)
    length = 7
    lm = UNet(
        UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=3)
    ).double()
    agent = make(length, 0.45, spread=0.5)  # 3 boundaries, 5 places for two of them
    free = torch.tensor(
        [bits for bits in itertools.product((0, 1), repeat=length - 2) if sum(bits) == 2]
    )
    # 0 forces a boundary
    noise = torch.cat([torch.zeros(len(free), 1), 1 - free], 1).double().unsqueeze(1)
    td = rollout(lm, agent, torch.randint(256, (1, length)), noise=noise)
    assert torch.equal(td[keys.ACTION][:, 0, 1:], free)
    prob_K = td[keys.ACTION_LOG_PROB].sum((1, 2)).exp()
    inputs = [*agent.parameters(), *lm.down.parameters()]
    likelihood_K = td[keys.LOG_LIKELIHOOD].detach().sum((1, 2))
    true = flat_gradient(-(prob_K * likelihood_K).sum(), inputs, retain_graph=True)
    loss_K = early_exit(1.0)(td)[keys.LOSS_POLICY].sum((1, 2))
    torch.testing.assert_close(
        flat_gradient((prob_K.detach() * loss_K).sum(), inputs), true, **EXACT
    )


@pytest.mark.parametrize("push", [-1.0, 0.0, 1.0])
def test_an_even_push_on_all_logits_spends_the_count_early_or_late(push):
    """All C(10, 4) draws: the remaining count per remaining position is constant on average only without one."""
    length, count = 12, 5
    agent = make(length, 0.45, window=0).eval()
    observation = observe(1, length)
    with torch.no_grad():
        agent.projection.weight.zero_()[0, 0] = push
    observation[keys.ENCODING][..., 0] = 1.0
    free = torch.tensor(
        [bits for bits in itertools.product((0, 1), repeat=length - 2) if sum(bits) == count - 1]
    )
    action_CT = torch.cat([torch.ones(len(free), 1, dtype=torch.long), free], 1)
    prob_C = (
        agent.score(observation, action_CT.unsqueeze(1))[keys.ACTION_LOG_PROB].sum((1, 2)).exp()
    )
    left_CT = count - (action_CT.cumsum(1) - action_CT)
    rate_T = (prob_C[:, None] * left_CT).sum(0)[1:] / torch.arange(length - 2, 0, -1)
    change = rate_T.diff().sign().sum() / (length - 3)
    assert change == -push or push == 0
    if push == 0:
        torch.testing.assert_close(rate_T, torch.full_like(rate_T, (count - 1) / (length - 2)))
