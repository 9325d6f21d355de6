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
def enumeration(request):
    """Make the early exit uniform, so that texts do not differ much more than boundaries do."""
    enumeration = Enumeration(request.param)
    torch.nn.init.zeros_(enumeration.lm.early_head.weight)
    return enumeration


def turn(estimate, true):
    return 1 - torch.cosine_similarity(estimate, true, 0).item()


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
def test_a_baseline_adds_nothing_to_the_discounts_bias(enumeration, estimator, gamma):
    """For lambda < 1 the discount is gamma times lambda."""
    discounted = enumeration.expected(recipes.early_exit(gamma))
    torch.testing.assert_close(enumeration.expected(estimator()), discounted, **EXACT)
    assert relative_bias(discounted, enumeration.true()) > 0.01


@pytest.mark.parametrize("samples", [2, 3])
def test_group_relative_scales_and_turns(enumeration, samples):
    """With a huge epsilon the standard deviation is negligible, and the factor (K - 1) / K remains."""
    big = 1e9
    parts = EarlyExit(), Discount(1.0), GroupRelative(big), ScoreFunction()
    true = enumeration.true()
    estimates = []
    for estimator in (chain(*parts, num_samples=samples), recipes.reinpatch(num_samples=samples)):
        td = enumeration.samples((1 - enumeration.tuples(samples)).double())
        weight_CB = td[keys.ACTION_LOG_PROB].detach().sum((1, 3)).exp()
        estimates.append(enumeration.gradient(estimator, td, weight_CB))
    centred, standardised = estimates
    torch.testing.assert_close(centred * big, true * (samples - 1) / samples, rtol=1e-7, atol=1e-12)
    assert 1e-3 < turn(standardised, true) < 0.5


def test_reinpatch_can_leave_further_samples_to_the_policy_alone():
    samplings = [
        f(num_samples=3, reward_only=True).sampling for f in (recipes.reinpatch, recipes.rloo)
    ]
    assert samplings[0] == samplings[1]
    assert samplings[0].reward_only


def test_standardising_a_small_batch_shrinks_and_turns(enumeration):
    """Its mean is over all decisions it gets, so each of the rollouts goes alone."""
    td, prob_K = enumeration.rollout()
    loss_K = torch.stack(
        [recipes.standardised(1.0)(each)[keys.LOSS_POLICY].sum() for each in td.unbind(0)]
    )
    estimate = flat_gradient((prob_K.detach() * loss_K).sum(), enumeration.inputs)
    true = enumeration.true()
    assert 1e-4 < turn(estimate, true) < 0.3
    assert 0 < estimate @ true < true @ true


def expected_gradient(enumeration, estimator, length_B):
    """Return E[gradient] of a stage's chain, each rollout alone; boundaries in the padding repeat the same rollout."""
    noise = decisive(enumeration.mask_KBT)
    td = rollout(
        enumeration.lm, enumeration.agent, enumeration.symbol_BN, noise=noise, length_B=length_B
    )
    weight_K = td[keys.ACTION_LOG_PROB].detach().sum((1, 2)).exp()
    loss_K = torch.stack([estimator(each)[keys.LOSS_POLICY].sum() for each in td.unbind(0)])
    return flat_gradient((weight_K * loss_K).sum() / weight_K.sum(), enumeration.inputs)


@pytest.mark.parametrize(
    ("window", "lengths", "turned"),
    [(0, (5, 5), 0.0), (2, (4, 4), 0.0), (0, (5, 3), 0.1427), (2, (5, 3), 0.0037)],
)
def test_centring_over_the_batch_keeps_the_direction_at_equal_lengths_only(window, lengths, turned):
    enumeration = Enumeration(window)
    length_B = torch.tensor(lengths)
    centred = chain(EarlyExit(), Discount(1.0), BatchCentre(), ScoreFunction())
    true = expected_gradient(enumeration, recipes.early_exit(1.0), length_B)
    estimate = expected_gradient(enumeration, centred, length_B)
    assert turn(estimate, true) == pytest.approx(turned, rel=0.02, abs=1e-12)
    if not turned:
        torch.testing.assert_close(estimate, true / 2, **EXACT)


@pytest.mark.parametrize(
    ("lengths", "turned"), [((5, 5), 0.0498), ((4, 4), 0.1456)], ids=["6 decisions", "4"]
)
def test_standardising_turns_the_more_the_fewer_decisions_there_are(lengths, turned):
    enumeration = Enumeration(2)
    length_B = torch.tensor(lengths)
    standardised = chain(EarlyExit(), Discount(1.0), Standardise(), ScoreFunction())
    true = expected_gradient(enumeration, recipes.early_exit(1.0), length_B)
    assert turn(expected_gradient(enumeration, standardised, length_B), true) == pytest.approx(
        turned, rel=0.02
    )


def test_clipping_shrinks_only_what_is_large(enumeration):
    true = enumeration.true()

    def expected(limit):
        return enumeration.expected(chain(EarlyExit(), Discount(1.0), Clip(limit), ScoreFunction()))

    torch.testing.assert_close(expected(5.0), true, **EXACT)  # no credit here is that large
    bias = [relative_bias(expected(limit), true) for limit in (3.0, 1.0, 0.3)]
    assert bias == sorted(bias)
    assert bias[0] > 0
    assert bias[-1] < 1


@pytest.mark.parametrize("name", ["bitflip", "branch"])
def test_two_forced_decisions_are_in_each_others_credit(enumeration, name):
    estimator = getattr(recipes, name)(gamma=1.0, positions=2)
    assert not estimator.unbiased
    td, weight_CB = enumeration.branched(estimator, 2, positions=2)
    assert (
        0.01 < relative_bias(enumeration.gradient(estimator, td, weight_CB), enumeration.true()) < 2
    )


def test_a_horizon_weighs_too_few_decisions(enumeration):
    """With three decisions, 2 besides a reward's own are all of them."""
    rate = 0.3
    true = enumeration.true()
    bias = []
    drawn = enumeration.mask_KBT[..., 1:].double()
    weight_KB = (
        (drawn * math.log(rate / (1 - rate)) + math.log(1 - rate))
        .sum((1, 2))
        .exp()[:, None]
        .expand(-1, 2)
    )
    for horizon in (0, 1, 2):
        estimator = recipes.off_policy(rate, gamma=1.0, horizon=horizon)
        assert not estimator.unbiased
        td, _ = enumeration.rollout(sampling=estimator.sampling)
        bias.append(
            relative_bias(enumeration.gradient(estimator, td.unsqueeze(1), weight_KB), true)
        )
    assert bias[0] > bias[1] > 0.01
    assert bias[2] < 1e-10


def test_straight_through_estimates_another_gradient(enumeration):
    """Actions are enumerated, their noise is cut into four; only the gradient of the policy has a path here."""
    true = enumeration.true(enumeration.policy)
    at = (torch.arange(4).double() + 0.5) / 4
    within = torch.cat([torch.full((64, 1), 0.5).double(), torch.cartesian_prod(at, at, at)], 1)
    action = enumeration.masks_CT.repeat_interleave(len(within), 0)[:, None].expand(-1, 2, -1)
    within = within.repeat(len(enumeration.masks_CT), 1)[:, None].expand(-1, 2, -1)
    prob = enumeration.samples(decisive(action)[:, None])[keys.BOUNDARY_PROB].squeeze(1)
    noise = conditional_noise(prob, action, within)
    for part in (StraightThrough(), ReinMax(), GumbelSigmoid(), GumbelRao(draws=4)):
        assert not part.unbiased
        td = rollout(
            enumeration.lm,
            enumeration.agent,
            enumeration.symbol_BN,
            Sampling(relax=part.relax),
            noise=noise,
        )
        assert torch.equal(td[keys.ACTION], action)
        weight_CB = td[keys.ACTION_LOG_PROB].detach().sum(-1).exp() / 64
        torch.testing.assert_close(weight_CB.sum(0), torch.ones(2).double())
        estimate = flat_gradient(
            -(weight_CB * td[keys.LOG_LIKELIHOOD].sum(-1)).sum(), enumeration.policy
        )
        assert estimate.isfinite().all()
        assert relative_bias(estimate, true) > 0.1


@pytest.mark.parametrize("name", ["arm", "disarm", "arms", "rebar", "relax"])
def test_what_needs_an_independent_policy_refuses_another(name):
    enumeration = Enumeration(2)
    estimator = recipes.relax(width=8) if name == "relax" else getattr(recipes, name)()
    assert estimator.requires_factorised_policy
    with pytest.raises(ValueError, match=r"set agent.window=0 for the learned agent"):
        check_compatible(estimator, enumeration.agent, "select")


@pytest.mark.parametrize("name", ["arm", "disarm"])
@pytest.mark.parametrize(("window", "least", "most"), [(0, 0, 1e-10), (2, 0.1, 1)])
def test_whole_chain_antithetic_pairs_are_biased_for_a_policy_with_a_past(
    name, window, least, most
):
    """The two chains diverge at their first different decision, so the policy is rejected with reason."""
    enumeration = Enumeration(window)
    estimator = getattr(recipes, name)(gamma=1.0)
    noise, size = cells([torch.cat([p, 1 - p]) for p in enumeration.breaks()])
    estimate = enumeration.gradient(estimator, enumeration.coupled(estimator, noise, 2), size)
    assert least <= relative_bias(estimate, enumeration.true()) < most


def test_the_strict_policy_scores_only_what_it_draws():
    """Boundaries of another number have probability 0, so importance weights do not exist."""
    agent = ExactCount(8, 5, rate=0.4, window=0).double()
    enumeration = Enumeration(0)
    shape = (2, 4)
    observation = TensorDict(
        {
            keys.ENCODING: torch.randn(*shape, 8).double(),
            keys.POSITION: torch.arange(4).expand(shape),
            keys.DECISION_MASK: (torch.arange(4) > 0).expand(shape),
        },
        batch_size=shape,
    )
    exact = enumeration.mask_KBT.sum(-1).eq(agent.count).all(-1)
    assert (
        agent.score(observation, enumeration.mask_KBT[exact])[keys.ACTION_LOG_PROB].isfinite().all()
    )
    for action in enumeration.mask_KBT[~exact]:
        with pytest.raises(
            ValueError, match=r"draws 2 boundaries in every sequence.*agent.name=learned"
        ):
            agent.score(observation, action)
    estimator = recipes.off_policy(0.4)
    with pytest.raises(ValueError, match="the policy's own draws"):
        rollout(
            enumeration.lm,
            agent,
            enumeration.symbol_BN,
            noise=torch.rand(20, 2, 4).double(),
            sampling=estimator.sampling,
        )
