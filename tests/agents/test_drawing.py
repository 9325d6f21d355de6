"""Parallel drawing equals sequential drawing, and the baseline agents draw as documented."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.distributions import Bernoulli
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tokenv.agents.base import BoundaryDistribution, forced_action
from tokenv.agents.fixed import Random, Uniform
from tokenv.agents.learned import Learned
from tokenv.core import keys

WIDTH = 6
seeds = st.integers(0, 10_000)


def observe(encoding_BTD, length_B=None):
    batch, length, _ = encoding_BTD.shape
    position_BT = torch.arange(length).expand(batch, -1)
    valid_BT = (
        position_BT < (torch.full((batch,), length) if length_B is None else length_B)[:, None]
    )
    return TensorDict(
        {
            keys.ENCODING: encoding_BTD,
            keys.POSITION: position_BT,
            keys.DECISION_MASK: valid_BT & (position_BT > 0),
        },
        batch_size=(batch, length),
    )


def random_observation(batch, length, length_B=None):
    return observe(torch.randn(batch, length, WIDTH, dtype=torch.float64), length_B)


def make_learned(window, spread=1.0, train=True, **options):
    """Build a policy with weights so large that neighbours matter."""
    agent = Learned(WIDTH, window=window, **options).double().train(train)
    with torch.no_grad():
        for parameter in agent.projection.parameters():
            parameter.normal_(std=spread)
    return agent


def draw_sequentially(agent, observation, noise_BT):
    """Compute the paper's equations 20-23 position by position, in Python numbers."""
    weight = agent.projection.weight.tolist()
    bias = [0.0] * len(weight)
    if agent.projection.bias is not None:
        bias = agent.projection.bias.tolist()
    rate_logit = agent.bias
    actions = []
    logits = []
    for b, (batch_row, noise_row) in enumerate(
        zip(observation[keys.ENCODING].tolist(), noise_BT.tolist(), strict=True)
    ):
        a = []
        l_row = []
        for i, (x, u) in enumerate(zip(batch_row, noise_row, strict=True)):
            projected = []
            for row, constant in zip(weight, bias, strict=True):
                projected.append(sum(w * y for w, y in zip(row, x, strict=True)) + constant)
            raw = projected[0] + sum(
                projected[j] * a[i - j] for j in range(1, agent.window + 1) if i >= j
            )
            logit = raw / agent.scale + rate_logit
            if agent.training:
                logit = agent.softcap * math.tanh(logit / agent.softcap)
            l_row.append(logit)
            if i == 0:
                a.append(1)
            elif not observation[keys.DECISION_MASK][b, i]:
                a.append(0)
            else:
                a.append(int(u == 0 or logit > math.log(u / (1 - u))))
        actions.append(a)
        logits.append(l_row)
    return torch.tensor(actions), torch.tensor(logits, dtype=torch.float64)


@pytest.mark.parametrize("start", [torch.zeros, torch.ones, torch.rand])
def test_compiled_rounds_change_no_draw(start):
    """Compiled rounds may round differently, or be too few: the actions converge in the arithmetic of the rest."""
    agent = make_learned(3)
    observation = random_observation(2, 30)
    noise = torch.rand(2, 29, dtype=torch.float64)
    observation = observation[:, :-1]
    expected = agent.draw(observation, noise)
    agent._compiled_rounds = lambda action, *_: (start(2, 29).round().long(), action)
    compiled = agent.draw(observation, noise)
    assert torch.equal(compiled[keys.ACTION], expected[keys.ACTION])
    assert torch.equal(compiled[keys.BOUNDARY_LOGITS], expected[keys.BOUNDARY_LOGITS])


@settings(max_examples=40)
@given(
    st.integers(0, 8),
    st.integers(1, 64),
    st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    st.booleans(),
    st.none() | st.integers(1, 3),
    st.booleans(),
    seeds,
)
def test_parallel_draws_equal_sequential_draws(window, length, spread, train, samples, bias, seed):
    torch.manual_seed(seed)
    agent = make_learned(window, spread, train, projection_bias=bias)
    length_B = torch.randint(1, length + 1, (2,))
    observation = random_observation(2, length, length_B)
    noise = torch.rand(*(() if samples is None else (samples,)), 2, length, dtype=torch.float64)
    drawn = agent.draw(observation, noise)
    assert drawn.batch_size == noise.shape
    for k, noise_BT in enumerate(noise.view(-1, 2, length)):
        action_BT, logits_BT = draw_sequentially(agent, observation, noise_BT)
        sample = drawn if samples is None else drawn[k]
        assert torch.equal(sample[keys.ACTION], action_BT)
        torch.testing.assert_close(sample[keys.BOUNDARY_LOGITS], logits_BT)


def test_drawing_settles_however_long_the_chain_of_consequences():
    """Window 1 and a_i = a_{i-1} or a_i = not a_{i-1}: only position 1 decides, and all the others wait for it."""
    length = 200
    for sign in (1.0, -1.0):
        agent = Learned(1, window=1, scale=1.0, rate=0.5).double().eval()
        with torch.no_grad():  # l_i = sign * (20 a_{i-1} - 10)
            agent.projection.weight.copy_(sign * torch.tensor([[-10.0], [20.0]]))
        rounds = []
        logits = agent._logits
        agent._logits = lambda *args, rounds=rounds, logits=logits: (
            rounds.append(1) or logits(*args)
        )
        observation = observe(torch.ones(1, length, 1, dtype=torch.float64))
        drawn = agent.draw(observation, torch.full((1, length), 0.5, dtype=torch.float64))
        expected = torch.ones(length) if sign > 0 else torch.arange(length) % 2 == 0
        assert torch.equal(drawn[keys.ACTION][0], expected.long())
        assert length - 8 <= len(rounds) <= length + 8


def test_ordinary_weights_converge_in_a_few_rounds():
    agent = make_learned(8, spread=1.0)
    rounds = []
    logits = agent._logits
    agent._logits = lambda *args: rounds.append(1) or logits(*args)
    agent.draw(random_observation(16, 1000), torch.rand(16, 1000))
    assert len(rounds) < 25


def test_nan_ends_the_drawing_and_shows_in_the_loss():
    agent = make_learned(1)
    with torch.no_grad():
        agent.projection.weight.fill_(math.nan)
    drawn = agent.draw(random_observation(1, 5), torch.rand(1, 5))
    assert drawn[keys.ACTION].tolist() == [[1, 0, 0, 0, 0]]
    assert drawn[keys.ACTION_LOG_PROB].isnan().any()


@settings(max_examples=25)
@given(st.integers(0, 8), st.integers(1, 20), st.booleans(), seeds)
def test_log_prob_and_entropy_are_a_bernoullis(window, length, train, seed):
    torch.manual_seed(seed)
    agent = make_learned(window, 10.0, train)
    observation = random_observation(2, length, torch.randint(1, length + 1, (2,)))
    drawn = agent.draw(observation, torch.rand(2, length))
    decided = observation[keys.DECISION_MASK]
    bernoulli = Bernoulli(logits=drawn[keys.BOUNDARY_LOGITS])
    log_prob = bernoulli.log_prob(drawn[keys.ACTION].double())
    entropy = bernoulli.entropy()
    torch.testing.assert_close(drawn[keys.ACTION_LOG_PROB], log_prob.where(decided, 0.0))
    torch.testing.assert_close(drawn[keys.ENTROPY], entropy.where(decided, 0.0))
    forced = (observation[keys.POSITION] == 0).double()
    torch.testing.assert_close(drawn[keys.BOUNDARY_PROB], bernoulli.probs.where(decided, forced))


def stored(observation, action_BT, window):
    """Return the observation with the last actions which stepping through these actions gives."""
    last = torch.zeros(*action_BT.shape, window)
    for j in range(1, min(window + 1, action_BT.shape[1])):
        last[:, j:, j - 1] = action_BT[:, : action_BT.shape[1] - j]
    return observation.clone().set(keys.LAST_ACTIONS, last)


@pytest.mark.parametrize("window", [0, 1, 3, 8])
def test_probabilities_of_all_masks_sum_to_one(window):
    length = 7
    agent = make_learned(window, 20.0)
    masks = torch.tensor([(1, *rest) for rest in itertools.product((0, 1), repeat=length - 1)])
    encoding = torch.randn(length, WIDTH, dtype=torch.float64).expand(len(masks), -1, -1)
    dist = agent.get_dist(stored(observe(encoding), masks, window))
    assert dist.log_prob(masks).sum(1).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_draws_have_the_enumerated_frequencies():
    """The one statistical test of the whole path from noise to masks."""
    agent = make_learned(2, 20.0)
    length = 4
    count = 40_000
    masks = torch.tensor([(1, *rest) for rest in itertools.product((0, 1), repeat=length - 1)])
    encoding = torch.randn(length, WIDTH, dtype=torch.float64)
    prob = (
        agent.get_dist(stored(observe(encoding.expand(8, -1, -1)), masks, 2))
        .log_prob(masks)
        .sum(1)
        .exp()
    )
    drawn = agent.draw(observe(encoding.expand(count, -1, -1)), torch.rand(count, length))[
        keys.ACTION
    ]
    number = (drawn[:, 1:] * torch.tensor([4, 2, 1])).sum(1)
    frequency = torch.bincount(number, minlength=8) / count
    torch.testing.assert_close(frequency.double(), prob, rtol=0, atol=5 * 0.5 / count**0.5)


@settings(max_examples=25)
@given(st.integers(0, 8), st.integers(1, 30), st.booleans(), seeds)
def test_one_position_at_a_time_equals_one_pass(window, length, train, seed):
    torch.manual_seed(seed)
    agent = make_learned(window, 20.0, train)
    observation = random_observation(2, length, torch.randint(1, length + 1, (2,)))
    noise_BT = torch.rand(2, length)
    drawn = agent.draw(observation, noise_BT)
    observation = stored(observation, drawn[keys.ACTION], window)
    for i in range(length):
        acted = agent(observation[:, i].clone().set(keys.NOISE, noise_BT[:, i]))
        assert torch.equal(acted[keys.ACTION], drawn[keys.ACTION][:, i])
        for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY_PROB, keys.BOUNDARY_LOGITS, keys.ENTROPY):
            torch.testing.assert_close(acted[key], drawn[key][:, i])


def test_an_observation_may_hold_more_last_actions_than_the_agent_reads():
    agent = make_learned(2, 20.0)
    action_BT = torch.randint(2, (3, 12))
    observation = random_observation(3, 12)
    short, long = (agent.get_dist(stored(observation, action_BT, window)) for window in (2, 8))
    assert torch.equal(short.logits, long.logits)


def test_noise_decides_at_the_logits_own_threshold():
    """The action is 1 exactly for u < sigmoid(l), so that P(a = 1) = sigmoid(l)."""
    logits = torch.linspace(-8, 8, 41, dtype=torch.float64)
    decided = torch.ones(41, dtype=torch.bool)
    dist = BoundaryDistribution(logits, decided, torch.zeros(41, dtype=torch.long))
    assert (dist.from_noise(logits.sigmoid() * (1 - 1e-9)) == 1).all()
    assert (dist.from_noise(logits.sigmoid() * (1 + 1e-9)) == 0).all()
    assert (dist.from_noise(torch.zeros(41)) == 1).all()
    sampled = dist.sample((20_000,))
    assert sampled.shape == (20_000, 41)
    assert sampled.dtype == torch.int64
    torch.testing.assert_close(
        sampled.double().mean(0), logits.sigmoid(), rtol=0, atol=5 * 0.5 / 20_000**0.5
    )
    assert torch.equal(dist.mode, (logits > 0).long())


def test_the_first_symbol_always_draws_and_padding_never():
    encoding_BTD = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    observation = observe(encoding_BTD, torch.tensor([4, 9]))
    assert forced_action(observation).sum() == 2
    for agent in (
        make_learned(8, 1000.0),
        make_learned(0, 1000.0),
        Random(0.9, 9),
        Uniform(0.9, 9),
    ):
        for noise in (torch.full((2, 9), 1e-6), torch.full((2, 9), 1 - 1e-6), torch.rand(3, 2, 9)):
            action = agent.draw(observation, noise)[keys.ACTION]
            assert (action[..., 0] == 1).all()
            assert (action[..., 0, 4:] == 0).all()


def test_gradients_flow_into_weights_and_encoding():
    agent = make_learned(2, 10.0)
    encoding = torch.randn(1, 9, WIDTH, dtype=torch.float64, requires_grad=True)
    drawn = agent.draw(observe(encoding), torch.rand(1, 9))
    drawn[keys.ACTION_LOG_PROB].sum().backward()
    assert encoding.grad[0, 1:].abs().sum(-1).min() > 0
    assert encoding.grad[0, 0].abs().sum() == 0
    assert agent.projection.weight.grad.abs().sum() > 0
    assert not drawn[keys.BOUNDARY_PROB].requires_grad


def test_logits_are_capped_in_training_only():
    agent = make_learned(1, 1000.0, softcap=3.0)
    observation = random_observation(4, 50)
    noise = torch.rand(4, 50)
    trained = agent.draw(observation, noise)[keys.BOUNDARY_LOGITS]
    evaluated = agent.eval().draw(observation, noise)[keys.BOUNDARY_LOGITS]
    assert trained.abs().max() <= 3
    assert evaluated.abs().max() > 3


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5])
def test_probabilities_start_near_the_rate(rate):
    agent = Learned(128, rate=rate)
    encoding = torch.nn.functional.normalize(torch.randn(8, 200, 128), dim=-1) * 128**0.5
    # in training: 0.109 for 0.1
    capped = 1 / (1 + math.exp(-6 * math.tanh(math.log(rate / (1 - rate)) / 6)))
    for train, expected in ((True, capped), (False, rate)):
        drawn = agent.train(train).draw(observe(encoding), torch.rand(8, 200))
        prob = drawn[keys.BOUNDARY_PROB][:, 1:]
        assert prob.mean().item() == pytest.approx(expected, rel=0.05)
        assert prob.std() < 0.1


def test_torchrls_exploration_type_chooses_between_draw_and_mode():
    agent = make_learned(0, 100.0)
    observation = random_observation(1, 40)[0].set(keys.LAST_ACTIONS, torch.zeros(40, 0))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        first = agent(observation.clone())
    assert torch.equal(first[keys.ACTION][1:], (first[keys.BOUNDARY_LOGITS][1:] > 0).long())
    with set_exploration_type(ExplorationType.RANDOM):
        acted = agent(observation.clone().set(keys.NOISE, torch.full((40,), 1e-9)))
    assert (acted[keys.ACTION] == 1).all()
    assert set(agent.out_keys) <= set(acted.keys())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"rate": 0.0}, "agent.rate"),
        ({"rate": 1.0}, "agent.rate"),
        ({"window": -1}, "agent.window"),
        ({"scale": 0.0}, "agent.scale"),
        ({"softcap": -1.0}, "agent.softcap"),
    ],
)
def test_impossible_policies_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        Learned(WIDTH, **options)


@pytest.mark.parametrize("agent", [Uniform, Random])
@pytest.mark.parametrize(("rate", "length"), [(0.0, 10), (1.5, 10), (-0.2, 10), (0.05, 10)])
def test_impossible_rates_are_refused(agent, rate, length):
    with pytest.raises(ValueError, match=r"agent\.rate"):
        agent(rate, length)


def fixed_draw(agent, length, batch=1):
    """Whole sequences of N symbols: their T = N - 1 decisions."""
    return agent.draw(random_observation(batch, length - 1), torch.rand(batch, length - 1))


@settings(max_examples=60)
@given(st.integers(2, 300), st.floats(0.01, 1.0))
def test_uniform_draws_evenly(length, rate):
    """Exactly floor(N * rate) of N - 1 positions; the distances (to the last symbol, too) differ by one at most."""
    assume(length * rate >= 1)
    action_T = fixed_draw(Uniform(rate, length), length)[keys.ACTION][0]
    places = action_T.nonzero().flatten()
    assert places[0] == 0
    assert len(places) == min(int(length * rate + 1e-9), length - 1)
    spacing = torch.cat([places, torch.tensor([length - 1])]).diff()
    assert spacing.max() - spacing.min() <= 1


def test_uniform_draws_the_papers_number():
    assert fixed_draw(Uniform(0.2, 4096), 4096)[keys.ACTION].sum() == 819


def test_products_that_round_down_lose_no_boundary():
    assert int(100 * 0.29) == 28
    for length, rate, count in ((100, 0.29, 29), (10, 0.3, 3), (50, 0.14, 7)):
        assert fixed_draw(Uniform(rate, length), length)[keys.ACTION].sum() == count
        assert fixed_draw(Random(rate, length), length)[keys.ACTION].sum() == count


@settings(max_examples=40)
@given(st.integers(2, 60), st.floats(0.02, 1.0) | st.just(1.0), seeds)
def test_random_draws_its_number_always(length, rate, seed):
    assume(length * rate >= 1)
    torch.manual_seed(seed)
    drawn = fixed_draw(Random(rate, length), length, batch=5)
    assert (drawn[keys.ACTION].sum(1) == min(int(length * rate + 1e-9), length - 1)).all()
    assert drawn[keys.ACTION_LOG_PROB].isfinite().all()
    assert drawn[keys.ENTROPY].isfinite().all()


@pytest.mark.parametrize("count", [1, 2, 4, 7, 8])
def test_random_places_are_equally_likely(count):
    """Enumerate the sequential law: every set of positions has the same probability."""
    length = 9
    agent = Random(count / length, length)
    assert agent.count == count
    prob_of = {}
    for rest in itertools.product((0, 1), repeat=length - 2):
        mask = (1, *rest)
        prob = 1.0
        drawn = 1
        for i in range(1, length - 1):
            p = float(agent._probability(torch.tensor(i), torch.tensor(drawn), torch.tensor(count)))
            prob *= p if mask[i] else 1 - p
            drawn += mask[i]
        if prob:
            prob_of[mask] = prob
    assert all(sum(mask) == count for mask in prob_of)
    assert len(prob_of) == math.comb(length - 2, count - 1)
    for prob in prob_of.values():
        assert prob == pytest.approx(1 / math.comb(length - 2, count - 1), rel=1e-5)
    for i in range(1, length - 1):
        marginal = sum(prob for mask, prob in prob_of.items() if mask[i])
        assert marginal == pytest.approx((count - 1) / (length - 2), rel=1e-5)


@pytest.mark.parametrize("kind", [Uniform, Random])
@settings(max_examples=20)
@given(st.integers(3, 40), st.floats(0.1, 1.0))
def test_random_rounding_hits_the_rate_on_average(kind, length, rate):
    """Over evenly spread u_0 the mean number is (N - 1) * rate, up to one part in their number."""
    assume(length * rate >= 1)
    batch = 200
    places = length - 1
    assume(places * rate >= 1)
    noise = torch.rand(batch, places, dtype=torch.float64)
    noise[:, 0] = (torch.arange(batch) + 0.5) / batch
    count_B = (
        kind(rate, length, rounding="random")
        .draw(random_observation(batch, places), noise)[keys.ACTION]
        .sum(1)
    )
    assert count_B.double().mean().item() == pytest.approx(places * rate, abs=1 / batch)
    assert count_B.max() - count_B.min() <= 1


def test_an_unknown_rounding_is_refused():
    with pytest.raises(ValueError, match=r"agent\.rounding = 'up': expected down or random"):
        Uniform(0.2, 10, rounding="up")


@pytest.mark.parametrize("count", range(1, 10))
def test_patches_that_end_with_the_history(count):
    """The last position is a boundary, the number is the same, and segments differ by one symbol at most."""
    length = 10
    (place,) = fixed_draw(Uniform(count / length, length, align="end"), length)[keys.ACTION][
        0
    ].nonzero(as_tuple=True)
    assert place[0] == 0
    assert len(place) == count
    if len(place) > 1:
        assert place[-1] == length - 2
        stretches = torch.cat([place[1:2] + 1, place[1:].diff()])
        assert stretches.max() - stretches.min() <= 1


def test_an_unknown_alignment_is_refused():
    with pytest.raises(ValueError, match=r"agent\.align = 'middle': expected start or end"):
        Uniform(0.2, 10, align="middle")


def test_random_log_prob_is_that_of_one_set_in_all():
    drawn = fixed_draw(Random(0.5, 10), 10, batch=20)
    expected = torch.full((20,), -math.log(math.comb(8, 4)))
    torch.testing.assert_close(drawn[keys.ACTION_LOG_PROB].sum(1).float(), expected)


@pytest.mark.parametrize("kind", [Uniform, Random])
def test_fixed_agents_step_as_they_draw(kind):
    agent = kind(0.3, 20)
    observation = random_observation(3, 19)
    noise_BT = torch.rand(3, 19)
    drawn = agent.draw(observation, noise_BT)
    observation[keys.TOKEN_COUNT] = drawn[keys.ACTION].cumsum(1) - drawn[keys.ACTION]
    for i in range(19):
        acted = agent(observation[:, i].clone().set(keys.NOISE, noise_BT[:, i]))
        for key in agent.out_keys:
            torch.testing.assert_close(acted[key], drawn[key][:, i])
    assert agent(observation[:, 0].clone())[keys.ACTION].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", [Uniform, Random])
def test_fixed_agents_draw_samples(kind):
    agent = kind(0.3, 20)
    drawn = agent.draw(random_observation(3, 19), torch.rand(4, 3, 19))
    assert drawn.batch_size == (4, 3, 19)
    assert (drawn[keys.ACTION].sum(-1) == 6).all()
