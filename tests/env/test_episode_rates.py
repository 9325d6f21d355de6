"""Sequences with rates of their own: stepping is still one pass, and nothing else of an episode changes."""

import pytest
import torch
from episodes import Noise, Scripted, random_noise
from rated import RANGE, rate_conditioned_agents, stir
from tensordict.nn import TensorDictSequential
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.core.distributed import Group, use_group
from tokenv.data.corpus import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rescoring import rescore, rescore_head
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv

WIDTH, BATCH, LENGTH = 16, 3, 14
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
TOLD = pytest.mark.parametrize("name", rate_conditioned_agents(WIDTH, LENGTH))


@pytest.fixture
def symbol_BN():
    return torch.randint(256, (BATCH, LENGTH))


def seeded():
    return torch.Generator().manual_seed(0)


def make_env(lm, symbol_BN, rates=RANGE, **options):
    return TokenizationEnv(
        lm, TensorSource(symbol_BN), len(symbol_BN), window=4, rates=rates, **options
    )


def assert_same(one, other):
    assert set(one.keys(True, True)) == set(other.keys(True, True))
    for key in other.keys(True, True):
        assert_close(one[key], other[key], **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@TOLD
def test_stepping_equals_one_pass(tiny_lm, symbol_BN, name):
    """The same seed gives the same rates; every sequence keeps its own to the end."""
    agent = rate_conditioned_agents(WIDTH, LENGTH)[name]
    env = make_env(tiny_lm, symbol_BN)
    drawn = []
    for seed in range(3):
        noise_BT = random_noise(BATCH, LENGTH - 1)
        env.set_seed(seed)
        stepped = env.rollout(LENGTH - 1, TensorDictSequential(Noise(noise_BT), agent))
        env.set_seed(seed)
        assert_same(stepped.detach(), env.one_pass(agent, noise=noise_BT).detach())
        rate_BT = stepped[keys.TARGET_RATE]
        assert torch.equal(rate_BT, rate_BT[:, :1].expand_as(rate_BT))
        assert ((rate_BT >= 0.1) & (rate_BT <= 0.6)).all()
        drawn.append(rate_BT[:, 0])
    assert len(torch.cat(drawn).unique()) == 3 * BATCH


def test_rows_that_start_anew_have_another_rate(tiny_lm, symbol_BN):
    env = make_env(tiny_lm, symbol_BN)
    td = env.reset()
    first = td[keys.TARGET_RATE].clone()
    again = env.reset(td.set("_reset", torch.tensor([[True], [False], [True]])))
    assert (again[keys.TARGET_RATE] == first).tolist() == [False, True, False]
    acted = env.step(again.set(keys.ACTION, torch.ones(BATCH, dtype=torch.long)))
    assert torch.equal(acted["next", keys.TARGET_RATE], again[keys.TARGET_RATE])


def test_the_specs_hold_and_one_number_is_everybodys_rate(tiny_lm, symbol_BN):
    check_env_specs(make_env(tiny_lm, symbol_BN))
    env = make_env(tiny_lm, symbol_BN, rates=0.25)
    assert env.reset()[keys.TARGET_RATE].tolist() == [0.25] * BATCH
    td = env.one_pass(rate_conditioned_agents(WIDTH, LENGTH)["learned, w = 3"])
    assert (td[keys.TARGET_RATE] == 0.25).all()
    assert keys.TARGET_RATE in env.one_pass(Scripted(), noise=random_noise(BATCH, LENGTH - 1))


def test_without_rates_observations_are_what_they_were(tiny_lm, symbol_BN):
    env = TokenizationEnv(tiny_lm, TensorSource(symbol_BN), BATCH)
    assert keys.TARGET_RATE not in env.reset()
    assert keys.TARGET_RATE not in env.one_pass(Learned(WIDTH).double())
    with pytest.raises(ValueError, match=r"rate = 0\.3: this agent does not read a target rate"):
        env.one_pass(Learned(WIDTH).double(), rate=0.3)


@pytest.mark.parametrize("rate", [0.0, 1.0, torch.tensor([0.2, 0.3])])
def test_rates_that_cannot_be_are_refused(tiny_lm, symbol_BN, rate):
    with pytest.raises(
        ValueError, match=r"expected boundaries per symbol in \(0, 1\), one number or 3"
    ):
        rollout(tiny_lm, rate_conditioned_agents(WIDTH, LENGTH)["uniform"], symbol_BN, rate=rate)


@TOLD
def test_a_rate_for_all_is_the_agent_of_that_rate(tiny_lm, symbol_BN, name):
    """At one rate a rate-conditioned agent equals one built for that rate; its gains and shifts start at 0."""
    conditioned = rate_conditioned_agents(WIDTH, LENGTH)[name]
    kind = type(conditioned)
    options = (
        {"rounding": conditioned.rounding}
        if hasattr(conditioned, "rounding")
        else {"width": WIDTH, "window": conditioned.window}
    )
    if "learned" not in name:
        options["seq_len"] = LENGTH
    plain = kind(rate=0.3, **options).double().train(conditioned.training)
    if conditioned.trainable:
        torch.nn.init.zeros_(conditioned.film.last.weight)
        plain.scale = conditioned.scale
        plain.projection.load_state_dict(conditioned.projection.state_dict())
    noise = random_noise(2, BATCH, LENGTH - 1)
    rate_B = torch.full((BATCH,), 0.3, dtype=torch.float64)
    length_B = torch.tensor([LENGTH, LENGTH - 3, 5])
    how = {"noise": noise, "sampling": Sampling(num_samples=2), "length_B": length_B}
    one = rollout(tiny_lm, plain, symbol_BN, **how)
    other = rollout(tiny_lm, conditioned, symbol_BN, rate=rate_B, **how)
    for key in (
        keys.ACTION,
        keys.ACTION_LOG_PROB,
        keys.BOUNDARY_PROB,
        keys.ENTROPY,
        keys.LOG_LIKELIHOOD,
    ):
        assert_close(
            one[key], other[key], rtol=1e-6, atol=1e-6
        ) if "rounding" in name else assert_close(one[key], other[key], **TOLERANCE)


@TOLD
def test_a_sequences_rate_is_its_own_matter(tiny_lm, symbol_BN, name):
    """A row does not depend on the other rows of its batch and their target rates."""
    agent = rate_conditioned_agents(WIDTH, LENGTH)[name]
    noise_BT = random_noise(BATCH, LENGTH - 1)
    rate_B = torch.tensor([0.15, 0.3, 0.55])
    together = rollout(tiny_lm, agent, symbol_BN, noise=noise_BT, rate=rate_B)
    for row in range(BATCH):
        one = slice(row, row + 1)
        alone = rollout(tiny_lm, agent, symbol_BN[one], noise=noise_BT[one], rate=rate_B[one])
        assert torch.equal(alone[keys.ACTION], together[keys.ACTION][one])
        assert_close(alone[keys.LOG_LIKELIHOOD], together[keys.LOG_LIKELIHOOD][one], **TOLERANCE)


def test_drawn_rates_depend_on_the_slot_alone(tiny_lm, symbol_BN):
    """Rates do not depend on the size of the batch, on samples, on the noise of actions or on processes."""
    agent = rate_conditioned_agents(WIDTH, LENGTH)["uniform"]

    def rates(rows, sampling=None, group=None, **options):
        env = make_env(tiny_lm, symbol_BN[rows])
        env.set_seed(7)
        with use_group(group or Group()):
            return env.one_pass(agent, sampling or Sampling(), **options)[keys.TARGET_RATE]

    every = rates(slice(None))[:, 0]
    assert torch.equal(rates(slice(0, 2))[:, 0], every[:2])
    several = rates(slice(None), Sampling(num_samples=2))
    assert torch.equal(several[:, :, 0], every.expand(2, -1))
    for row in range(BATCH):
        noise = random_noise(1, LENGTH - 1)
        assert torch.equal(
            rates(slice(row, row + 1), group=Group(row, BATCH), noise=noise)[0, :1],
            every[row : row + 1],
        )


def test_the_rates_leave_the_noise_alone(tiny_lm, symbol_BN):
    noises = []
    for rates in (None, RANGE):
        env = make_env(tiny_lm, symbol_BN, rates=rates)
        env.set_seed(3)
        agent = Learned(WIDTH, rates=rates).double()
        noises.append(env.one_pass(agent)[keys.NOISE])
    assert torch.equal(*noises)


@pytest.mark.parametrize("name", ["learned, w = 3", "exact_count, w = 2"])
def test_scored_again_a_rollout_stays_what_it_was(tiny_lm, symbol_BN, name):
    agent = rate_conditioned_agents(WIDTH, LENGTH)[name]
    td = rollout(tiny_lm, agent, symbol_BN, Sampling(num_samples=2)).detach()
    for again in (rescore(tiny_lm, agent, td), rescore_head(agent, td)):
        for key in (keys.ACTION_LOG_PROB, keys.ENTROPY, keys.TARGET_RATE):
            assert_close(again[key], td[key], **TOLERANCE)
    head = rescore_head(agent, td)[keys.ACTION_LOG_PROB]
    grads = torch.autograd.grad(head.sum(), list(agent.parameters()))
    assert all(grad.any() for grad in grads)
    assert_close(
        agent.get_dist(td).log_prob(td[keys.ACTION]), td[keys.ACTION_LOG_PROB], **TOLERANCE
    )


@TOLD
def test_generation_equals_one_pass_over_the_result(tiny_lm, name):
    agent = rate_conditioned_agents(WIDTH, LENGTH)[name].eval()
    prompt = torch.randint(256, (BATCH, 4))
    rate_B = torch.tensor([0.15, 0.3, 0.55])
    done = generate(
        tiny_lm,
        agent,
        prompt,
        LENGTH - 4,
        temperature=0,
        rate=rate_B,
        generator=torch.Generator().manual_seed(0),
    )
    noise_BN = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0))
    # A rollout decides nothing at its last symbol, so one more is put there.
    whole = torch.cat([done.symbol_BN, done.symbol_BN[:, :1]], 1)
    td = rollout(tiny_lm, agent, whole, noise=noise_BN, rate=rate_B)
    assert torch.equal(done.action_BN, td[keys.ACTION])
    assert_close(done.boundary_prob_BN, td[keys.BOUNDARY_PROB].to(done.boundary_prob_BN))
    mean = generate(tiny_lm, agent, prompt, 3, generator=seeded())
    at_mean = generate(tiny_lm, agent, prompt, 3, rate=RANGE.mean, generator=seeded())
    assert torch.equal(mean.action_BN, at_mean.action_BN)


def test_strict_counts_are_each_sequences_own(tiny_lm):
    symbol_BN = torch.randint(256, (4, LENGTH))
    rate_B = torch.tensor([0.1, 0.29, 0.5, 0.6])
    for name in ("exact_count, w = 2", "uniform", "random"):
        td = rollout(tiny_lm, rate_conditioned_agents(WIDTH, LENGTH)[name], symbol_BN, rate=rate_B)
        assert td[keys.ACTION].sum(-1).tolist() == [1, 4, 7, 8], name


def test_a_policy_hears_its_rate_and_learns_from_it(tiny_lm, symbol_BN):
    agent = stir(Learned(WIDTH, window=1, scale=1.0, rates=RANGE)).double().eval()
    probs = [
        rollout(tiny_lm, agent, symbol_BN, rate=rate)[keys.BOUNDARY_LOGITS].detach()
        for rate in (0.2, 0.4)
    ]
    start = torch.logit(torch.tensor(0.4)) - torch.logit(torch.tensor(0.2))
    moved = (probs[1] - probs[0])[:, 1:]
    assert (moved - start).abs().max() > 0.01  # beyond the shift that the start gives
