"""Biases of estimators are as documented, and policies are rejected only where an estimator is biased."""

import math

import pytest
import torch
from enumeration import EXACT, Enumeration, cells, decisive, flat_gradient, relative_bias
from tensordict import TensorDict

from tokenv.agents.exact_count import ExactCount
from tokenv.core import keys
from tokenv.core.contracts import Sampling, check_compatible
from tokenv.env.rollout import rollout
from tokenv.estimators import recipes
from tokenv.estimators.base import chain
from tokenv.estimators.baselines import BatchCentre, GroupRelative
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.estimators.statistics import conditional_noise
from tokenv.estimators.straight_through import GumbelRao, GumbelSigmoid, ReinMax, StraightThrough
from tokenv.estimators.surrogates import Clip, ScoreFunction, Standardise


@pytest.fixture(params=[0, 2])
def world(request):
    """Make the early exit uniform, so that texts do not differ much more than boundaries do."""
    world = Enumeration(request.param)
    torch.nn.init.zeros_(world.lm.early_head.weight)
    return world


def turn(found, true):
    return 1 - torch.cosine_similarity(found, true, 0).item()


@pytest.mark.parametrize(
    ("estimator", "gamma"),
    [
        (lambda: recipes.leave_one_out(0.8), 0.8),
        (lambda: recipes.ppo(0.8), 0.8),
        (lambda: recipes.lambda_return(1.0, 0.8), 0.8),
        (lambda: recipes.lambda_return(0.9, 0.8), 0.72),
    ],
    ids=["leave_one_out", "ppo", "lambda", "gamma and lambda"],
)
def test_a_baseline_adds_nothing_to_the_discounts_bias(world, estimator, gamma):
    """For lambda < 1 the discount is gamma times lambda."""
    discounted = world.expected(recipes.early_exit(gamma))
    torch.testing.assert_close(world.expected(estimator()), discounted, **EXACT)
    assert relative_bias(discounted, world.true()) > 0.01


@pytest.mark.parametrize("samples", [2, 3])
def test_group_relative_scales_and_turns(world, samples):
    """With a huge epsilon the standard deviation is negligible, and the factor (K - 1) / K remains."""
    big = 1e9
    parts = EarlyExit(), Discount(1.0), GroupRelative(big), ScoreFunction()
    true, found = world.true(), []
    for estimator in (chain(*parts, num_samples=samples), recipes.reinpatch(num_samples=samples)):
        td = world.samples((1 - world.tuples(samples)).double())
        weight_CB = td[keys.ACTION_LOG_PROB].detach().sum((1, 3)).exp()
        found.append(world.gradient(estimator, td, weight_CB))
    centred, standardised = found
    torch.testing.assert_close(centred * big, true * (samples - 1) / samples, rtol=1e-7, atol=1e-12)
    assert 1e-3 < turn(standardised, true) < 0.5


def test_reinpatch_can_leave_further_samples_to_the_policy_alone():
    wanted = [
        f(num_samples=3, reward_only=True).sampling for f in (recipes.reinpatch, recipes.rloo)
    ]
    assert wanted[0] == wanted[1]
    assert wanted[0].reward_only


def test_standardising_a_small_batch_shrinks_and_turns(world):
    """Its mean is over all decisions it gets, so each of the rollouts goes alone."""
    td, prob_K = world.rollout()
    loss_K = torch.stack(
        [recipes.standardised(1.0)(each)[keys.LOSS_POLICY].sum() for each in td.unbind(0)]
    )
    found, true = flat_gradient((prob_K.detach() * loss_K).sum(), world.inputs), world.true()
    assert 1e-4 < turn(found, true) < 0.3
    assert 0 < found @ true < true @ true


def expected_gradient(world, estimator, length_B):
    """Return E[gradient] of a stage's chain, each rollout alone; boundaries in the padding repeat the same rollout."""
    noise = decisive(world.mask_KBT)
    td = rollout(world.lm, world.agent, world.symbol_BN, noise=noise, length_B=length_B)
    weight_K = td[keys.ACTION_LOG_PROB].detach().sum((1, 2)).exp()
    loss_K = torch.stack([estimator(each)[keys.LOSS_POLICY].sum() for each in td.unbind(0)])
    return flat_gradient((weight_K * loss_K).sum() / weight_K.sum(), world.inputs)


@pytest.mark.parametrize(
    ("window", "lengths", "turned"),
    [(0, (5, 5), 0.0), (2, (4, 4), 0.0), (0, (5, 3), 0.1427), (2, (5, 3), 0.0037)],
)
def test_centring_over_the_batch_keeps_the_direction_at_equal_lengths_only(window, lengths, turned):
    world, length_B = Enumeration(window), torch.tensor(lengths)
    centred = chain(EarlyExit(), Discount(1.0), BatchCentre(), ScoreFunction())
    true = expected_gradient(world, recipes.early_exit(1.0), length_B)
    found = expected_gradient(world, centred, length_B)
    assert turn(found, true) == pytest.approx(turned, rel=0.02, abs=1e-12)
    if not turned:
        torch.testing.assert_close(found, true / 2, **EXACT)


@pytest.mark.parametrize(
    ("lengths", "turned"), [((5, 5), 0.0498), ((4, 4), 0.1456)], ids=["6 decisions", "4"]
)
def test_standardising_turns_the_more_the_fewer_decisions_there_are(lengths, turned):
    world, length_B = Enumeration(2), torch.tensor(lengths)
    standardised = chain(EarlyExit(), Discount(1.0), Standardise(), ScoreFunction())
    true = expected_gradient(world, recipes.early_exit(1.0), length_B)
    assert turn(expected_gradient(world, standardised, length_B), true) == pytest.approx(
        turned, rel=0.02
    )


def test_clipping_shrinks_only_what_is_large(world):
    true = world.true()

    def expected(limit):
        return world.expected(chain(EarlyExit(), Discount(1.0), Clip(limit), ScoreFunction()))

    torch.testing.assert_close(expected(5.0), true, **EXACT)  # no credit here is that large
    bias = [relative_bias(expected(limit), true) for limit in (3.0, 1.0, 0.3)]
    assert bias == sorted(bias)
    assert bias[0] > 0
    assert bias[-1] < 1


@pytest.mark.parametrize("name", ["bitflip", "branch"])
def test_two_forced_decisions_are_in_each_others_credit(world, name):
    estimator = getattr(recipes, name)(gamma=1.0, positions=2)
    assert not estimator.unbiased
    td, weight_CB = world.branched(estimator, 2, positions=2)
    assert 0.01 < relative_bias(world.gradient(estimator, td, weight_CB), world.true()) < 2


def test_a_horizon_weighs_too_few_decisions(world):
    """With three decisions, 2 besides a reward's own are all of them."""
    rate, true, bias = 0.3, world.true(), []
    drawn = world.mask_KBT[..., 1:].double()
    weight_KB = (
        (drawn * math.log(rate / (1 - rate)) + math.log(1 - rate))
        .sum((1, 2))
        .exp()[:, None]
        .expand(-1, 2)
    )
    for horizon in (0, 1, 2):
        estimator = recipes.off_policy(rate, gamma=1.0, horizon=horizon)
        assert not estimator.unbiased
        td, _ = world.rollout(sampling=estimator.sampling)
        bias.append(relative_bias(world.gradient(estimator, td.unsqueeze(1), weight_KB), true))
    assert bias[0] > bias[1] > 0.01
    assert bias[2] < 1e-10


def test_straight_through_estimates_another_gradient(world):
    """Actions are enumerated, their noise is cut into four; only the gradient of the policy has a path here."""
    true = world.true(world.policy)
    at = (torch.arange(4).double() + 0.5) / 4
    within = torch.cat([torch.full((64, 1), 0.5).double(), torch.cartesian_prod(at, at, at)], 1)
    action = world.masks_CT.repeat_interleave(len(within), 0)[:, None].expand(-1, 2, -1)
    within = within.repeat(len(world.masks_CT), 1)[:, None].expand(-1, 2, -1)
    prob = world.samples(decisive(action)[:, None])[keys.BOUNDARY_PROB].squeeze(1)
    noise = conditional_noise(prob, action, within)
    for part in (StraightThrough(), ReinMax(), GumbelSigmoid(), GumbelRao(draws=4)):
        assert not part.unbiased
        td = rollout(
            world.lm, world.agent, world.symbol_BN, Sampling(relax=part.relax), noise=noise
        )
        assert torch.equal(td[keys.ACTION], action)
        weight_CB = td[keys.ACTION_LOG_PROB].detach().sum(-1).exp() / 64
        torch.testing.assert_close(weight_CB.sum(0), torch.ones(2).double())
        found = flat_gradient(-(weight_CB * td[keys.LOG_LIKELIHOOD].sum(-1)).sum(), world.policy)
        assert found.isfinite().all()
        assert relative_bias(found, true) > 0.1


@pytest.mark.parametrize("name", ["arm", "disarm", "arms", "rebar", "relax"])
def test_what_needs_an_independent_policy_refuses_another(name):
    world = Enumeration(2)
    estimator = recipes.relax(width=8) if name == "relax" else getattr(recipes, name)()
    assert estimator.requires_factorised_policy
    with pytest.raises(ValueError, match="give the learned agent window=0"):
        check_compatible(estimator, world.agent, "select")


@pytest.mark.parametrize("name", ["arm", "disarm"])
@pytest.mark.parametrize(("window", "least", "most"), [(0, 0, 1e-10), (2, 0.1, 1)])
def test_whole_chain_antithetic_pairs_are_biased_for_a_policy_with_a_past(
    name, window, least, most
):
    """The two chains diverge at their first different decision, so the policy is rejected with reason."""
    world, estimator = Enumeration(window), getattr(recipes, name)(gamma=1.0)
    noise, size = cells([torch.cat([p, 1 - p]) for p in world.breaks()])
    found = world.gradient(estimator, world.coupled(estimator, noise, 2), size)
    assert least <= relative_bias(found, world.true()) < most


def test_the_strict_policy_scores_only_what_it_draws():
    """Boundaries of another number have probability 0, so importance weights do not exist."""
    agent, world = ExactCount(8, 5, rate=0.4, window=0).double(), Enumeration(0)
    shape = (2, 4)
    observation = TensorDict(
        {
            keys.ENCODING: torch.randn(*shape, 8).double(),
            keys.POSITION: torch.arange(4).expand(shape),
            keys.DECISION_MASK: (torch.arange(4) > 0).expand(shape),
        },
        batch_size=shape,
    )
    exact = world.mask_KBT.sum(-1).eq(agent.count).all(-1)
    assert agent.score(observation, world.mask_KBT[exact])[keys.ACTION_LOG_PROB].isfinite().all()
    for action in world.mask_KBT[~exact]:
        with pytest.raises(
            ValueError, match=r"draws 2 boundaries in every sequence.*agent.name=learned"
        ):
            agent.score(observation, action)
    estimator = recipes.off_policy(0.4)
    with pytest.raises(ValueError, match="the policy's own draws"):
        rollout(
            world.lm,
            agent,
            world.symbol_BN,
            noise=torch.rand(20, 2, 4).double(),
            sampling=estimator.sampling,
        )
