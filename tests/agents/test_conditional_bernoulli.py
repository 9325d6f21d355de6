"""The conditional Bernoulli law: its sums, its draws and its probabilities, against all subsets."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from tokenv.agents.exact_count import (
    NEVER,
    ConditionalBernoulli,
    decision_logits,
    log_elementary_symmetric,
)
from tokenv.core import keys

WIDTH = 8


def subsets(places, count):
    """Return all ways to draw ``count`` of ``places`` positions: int64 [C, T]."""
    rows = [
        [int(i in some) for i in range(places)]
        for some in itertools.combinations(range(places), count)
    ]
    return torch.tensor(rows, dtype=torch.long).view(len(rows), places)


def observe(batch, length, ahead=1, dtype=torch.float64):
    """Return T = N - 1 observations of N symbols; at the last ``ahead`` no decision is made."""
    position_T = torch.arange(length - 1)
    return TensorDict(
        {
            keys.SYMBOL: torch.zeros(batch, length - 1, dtype=torch.long),
            keys.ENCODING: torch.randn(batch, length - 1, WIDTH, dtype=dtype),
            keys.POSITION: position_T.expand(batch, -1),
            keys.DECISION_MASK: ((position_T > 0) & (position_T < length - ahead)).expand(
                batch, -1
            ),
        },
        batch_size=(batch, length - 1),
    )


def make(length, rate, spread=3.0):
    agent = ConditionalBernoulli(WIDTH, length, rate=rate, reach=2, hidden=6).double()
    nn.init.normal_(agent.out.weight, std=spread)
    return agent


@pytest.mark.parametrize(("places", "count"), [(7, 0), (7, 1), (7, 3), (7, 6), (7, 7), (1, 1)])
def test_the_sums_are_those_over_all_subsets(places, count):
    log_odds = 2 * torch.randn(2, places, dtype=torch.float64)
    sums = log_elementary_symmetric(log_odds, count)
    for i, c in itertools.product(range(places + 1), range(count + 1)):
        some = subsets(places - i, c).double()
        if len(some):
            expected = (log_odds[:, None, i:] * some).sum(-1).logsumexp(-1)
            torch.testing.assert_close(sums[:, i, c], expected, rtol=1e-12, atol=1e-12)
        else:
            assert (sums[:, i, c] < NEVER / 2).all()


@pytest.mark.parametrize("count", [1, 3, 6, 7])
def test_the_law_is_that_of_independent_decisions_given_their_number(count):
    """All C(N, k) draws: the decisions' probabilities multiply to the law's, which sum to 1."""
    length = 8  # 7 places, the first one forced
    agent = make(length, (count + 0.5) / length)
    observation = observe(2, length)
    drawn = torch.cat(
        [torch.ones(math.comb(6, count - 1), 1, dtype=torch.long), subsets(6, count - 1)], 1
    )
    action = drawn[:, None].expand(-1, 2, -1)
    log_prob_CB = agent.score(observation, action)[keys.ACTION_LOG_PROB].sum(-1)
    torch.testing.assert_close(log_prob_CB.exp().sum(0), torch.ones(2).double(), rtol=0, atol=1e-12)
    log_odds = agent._log_odds(observation)
    torch.testing.assert_close(
        log_prob_CB, (action[..., 1:] * log_odds[:, 1:]).sum(-1).log_softmax(0)
    )
    assert count == 1 or log_odds[:, 1:].std() > 0.1


def test_every_decision_has_its_probability_given_the_earlier_ones():
    """Compare with the fraction of all draws with the same beginning which continue with a boundary."""
    length, count = 8, 4
    agent = make(length, 0.5)
    observation = observe(1, length)
    drawn = torch.cat(
        [torch.ones(math.comb(6, count - 1), 1, dtype=torch.long), subsets(6, count - 1)], 1
    )
    scored = agent.score(observation, drawn[:, None])
    prob_C = scored[keys.ACTION_LOG_PROB].sum((1, 2)).exp()
    for row, prob_T in zip(drawn, scored[keys.BOUNDARY_PROB][:, 0], strict=True):
        for i in range(1, length - 1):
            alike = (drawn[:, :i] == row[:i]).all(1)
            share = prob_C[alike & (drawn[:, i] == 1)].sum() / prob_C[alike].sum()
            torch.testing.assert_close(prob_T[i], share, rtol=1e-10, atol=1e-12)


def test_draws_invert_the_distribution_function():
    """Uniform noise u_i draws exactly where it is below the decision's probability, which is the law's own."""
    length, count = 6, 3
    agent = make(length, 0.55, spread=1.0)
    observation = observe(1, length)
    grid = (torch.arange(12).double() + 0.5) / 12
    noise = torch.cartesian_prod(*[grid] * 4)
    noise = nn.functional.pad(noise, (1, 0), value=0.5).unsqueeze(1)
    drawn = agent.draw(observation, noise)
    assert (drawn[keys.ACTION].sum(-1) == count).all()
    free = (drawn[keys.BOUNDARY_PROB] > 0) & (drawn[keys.BOUNDARY_PROB] < 1)
    assert free.any()
    assert torch.equal((noise < drawn[keys.BOUNDARY_PROB])[free], drawn[keys.ACTION][free] == 1)
    assert len(drawn[keys.ACTION][:, 0].unique(dim=0)) == math.comb(4, count - 1)


def test_the_gradient_of_a_draws_log_probability_is_the_draw_less_the_marginals():
    places, count = 7, 3
    log_odds = torch.randn(places, dtype=torch.float64, requires_grad=True)
    drawn = subsets(places, count)
    left = count - (drawn.cumsum(-1) - drawn)
    remain = places - torch.arange(places)
    logits = decision_logits(log_odds, log_elementary_symmetric(log_odds, count)[1:], left)
    free = (left > 0) & (left < remain)
    each = torch.where(free, drawn * logits - nn.functional.softplus(logits), 0.0).sum(-1)
    prob_C = each.detach().exp()
    torch.testing.assert_close(prob_C.sum().item(), 1.0, rtol=0, atol=1e-12)
    marginal_T = (prob_C[:, None] * drawn).sum(0)
    for one, log_prob in zip(drawn, each, strict=True):
        (gradient,) = torch.autograd.grad(log_prob, log_odds, retain_graph=True)
        torch.testing.assert_close(gradient, one - marginal_T, rtol=0, atol=1e-12)


def test_at_its_start_all_draws_are_equally_likely_and_an_even_push_changes_nothing():
    length = 9
    agent = ConditionalBernoulli(WIDTH, length, rate=0.45).double()
    observation = observe(1, length)
    drawn = torch.cat([torch.ones(math.comb(7, 3), 1, dtype=torch.long), subsets(7, 3)], 1)[:, None]
    log_prob = agent.score(observation, drawn)[keys.ACTION_LOG_PROB].sum((1, 2))
    torch.testing.assert_close(log_prob, torch.full_like(log_prob, -math.log(math.comb(7, 3))))
    log_odds = torch.randn(5, dtype=torch.float64)
    left = torch.full((5,), 1)
    logits = [
        decision_logits(x, log_elementary_symmetric(x, 2)[1:], left)[:3]
        for x in (log_odds, log_odds + 4)
    ]
    torch.testing.assert_close(*logits)


@settings(max_examples=30)
@given(st.integers(4, 30), st.floats(0.26, 0.95), st.integers(1, 3), st.integers(0, 999))
def test_every_history_has_the_exact_number(length, rate, ahead, seed):
    """After the history there are no boundaries."""
    torch.manual_seed(seed)
    agent = make(length, rate)
    observation = observe(3, length + ahead - 1, ahead)
    td = agent.draw(observation, torch.rand(2, 3, length + ahead - 2, dtype=torch.float64))
    assert (td[keys.ACTION].sum(-1) == agent.count).all()
    assert (td[keys.ACTION][..., 0] == 1).all()
    assert (td[keys.ACTION][..., length - 1 :] == 0).all()
    torch.testing.assert_close(td, agent.score(observation, td[keys.ACTION]))


def test_single_precision_is_close_to_double_for_long_histories():
    length = 512
    agent = make(length, 1 / 16)
    observation = observe(2, length)
    noise = torch.rand(3, 2, length - 1)
    fine = agent.draw(observation, noise.double())
    observation.set(keys.ENCODING, observation[keys.ENCODING].float())
    coarse = agent.float().score(observation, fine[keys.ACTION])
    assert (fine[keys.ACTION].sum(-1) == 32).all()
    torch.testing.assert_close(
        coarse[keys.ACTION_LOG_PROB].double(), fine[keys.ACTION_LOG_PROB], rtol=1e-3, atol=1e-4
    )
    gradients = torch.autograd.grad(coarse[keys.ACTION_LOG_PROB].sum(), list(agent.parameters()))
    assert all(bool(g.isfinite().all()) for g in gradients)
    assert (agent.draw(observation, noise)[keys.ACTION].sum(-1) == 32).all()


def test_what_it_reads_reaches_to_both_ends_of_the_history_and_not_beyond():
    length, ahead = 40, 4
    agent = make(length - ahead + 1, 0.2)
    observation = observe(1, length, ahead)
    encoding = observation[keys.ENCODING].requires_grad_()
    middle = agent._log_odds(observation)[0, 18]
    (gradient,) = torch.autograd.grad(middle, encoding)
    reached = gradient[0].abs().sum(-1) > 0
    assert reached[: length - ahead].all()
    assert not reached[length - ahead :].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0.0}, r"agent\.rate = 0\.0"),
        ({"reach": 0}, r"agent\.reach = 0"),
        ({"hidden": 0}, r"agent\.hidden = 0"),
        ({"softcap": 0.0}, r"agent\.softcap = 0\.0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ConditionalBernoulli(WIDTH, 20, **options)


def test_other_numbers_of_boundaries_are_refused():
    agent = make(8, 0.5)
    observation = observe(1, 8)
    with pytest.raises(
        ValueError, match="the conditional agent draws 4 boundaries in every sequence"
    ):
        agent.score(observation, torch.tensor([[1, 1, 0, 0, 0, 0, 1]]))
    with pytest.raises(ValueError, match="decides by the whole history"):
        agent(observation[:, 3])
