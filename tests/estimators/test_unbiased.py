"""Every unbiased estimator has the true policy gradient as expectation: enumerated, not sampled."""

import itertools
import math

import pytest
import torch
from enumeration import EXACT, Enumeration, cells, rand_gives

from tokenv.config.registry import ESTIMATORS
from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.estimators import antithetic, branching, recipes

RATE = 0.3
SINGLE = {
    "naive": {},
    "early_exit": {"gamma": 1.0},
    "leave_one_out": {"gamma": 1.0},
    "lambda_return": {"gamma": 1.0, "lam": 1.0},
    "ppo": {"gamma": 1.0},
}
UNBIASED = SINGLE | {
    "moving_average": {"seq_len": 5, "gamma": 1.0},
    "off_policy": {"rate": RATE, "gamma": 1.0, "horizon": None},
    "rloo": {"gamma": 1.0},
    "rloo_clipped": {"gamma": 1.0},
    "linear_critic": {"width": 8, "gamma": 1.0},
    "text_critic": {"width": 8, "gamma": 1.0},
    "arm": {"gamma": 1.0},
    "disarm": {"gamma": 1.0},
    "arms": {"gamma": 1.0},
    "bitflip": {"gamma": 1.0},
    "branch": {"gamma": 1.0},
    "rebar": {"temperature": 1.0},
    "relax": {"width": 4, "temperature": 1.0},
}
BIASED = {
    "reinforce",
    "standardised",
    "reinpatch",
    "boundary_credit",
    "straight",
    "gumbel",
    "reinmax",
    "gumbel_rao",
    "path",
}
WINDOWS = pytest.mark.parametrize("window", [0, 2])


@pytest.fixture(autouse=True, params=[None, (0.2, 0.6)], ids=["one rate", "a rate each"])
def _rates(request, monkeypatch):
    """Run each test for a policy with one rate, and for one with a target rate for each sequence."""
    monkeypatch.setattr(Enumeration, "rates", request.param)


def make(name, **options):
    return getattr(recipes, name)(**UNBIASED[name] | options)


def test_no_estimator_is_forgotten():
    assert set(ESTIMATORS) == UNBIASED.keys() | BIASED
    assert all(make(name).unbiased for name in UNBIASED)
    assert not any(getattr(recipes, name)().unbiased for name in BIASED)


@WINDOWS
@pytest.mark.parametrize("name", SINGLE)
def test_one_sample_has_the_true_gradient(name, window):
    """Both sequences' boundaries jointly, as one may be the other's baseline."""
    enumeration = Enumeration(window)
    torch.testing.assert_close(enumeration.expected(make(name)), enumeration.true(), **EXACT)


@WINDOWS
def test_a_moving_average_of_earlier_rollouts_keeps_the_true_gradient(window):
    enumeration = Enumeration(window)
    estimator = make("moving_average").double()
    for _ in range(3):
        estimator(
            rollout(
                enumeration.lm,
                enumeration.agent,
                enumeration.symbol_BN,
                noise=torch.rand(2, 4).double(),
            )
        )
    assert (estimator.stages[2].mean_T[1:].abs() > 1e-3).all()
    torch.testing.assert_close(enumeration.expected(estimator), enumeration.true(), **EXACT)


@WINDOWS
def test_boundaries_of_a_fixed_rate_keep_the_true_gradient(window):
    enumeration = Enumeration(window)
    estimator = make("off_policy")
    td, _ = enumeration.rollout(sampling=estimator.sampling)
    drawn = enumeration.mask_KBT[..., 1:].double()
    weight_CB = (drawn * math.log(RATE / (1 - RATE)) + math.log(1 - RATE)).sum(-1).exp()
    assert weight_CB.prod(-1).sum().item() == pytest.approx(1.0)
    # Both sequences' probabilities, for the sum over both.
    joint_CB = weight_CB.prod(-1, keepdim=True).expand(-1, 2)
    torch.testing.assert_close(
        enumeration.gradient(estimator, td.unsqueeze(1), joint_CB), enumeration.true(), **EXACT
    )


def learned_critic(**options):
    """Build a critic with parameters and a state as after training."""
    estimator = make("text_critic", **options).double().eval()
    critic = estimator.stages[1]
    torch.nn.init.normal_(critic.network[-1].weight)
    critic.rollouts_done.fill_(critic.warmup)
    if "num_samples" in options:
        estimator.stages[3].product.fill_(0.3)
        estimator.stages[3].square.fill_(0.5)
    return estimator


@WINDOWS
def test_a_critic_that_reads_the_whole_text_keeps_the_true_gradient(window):
    enumeration = Enumeration(window)
    estimator = learned_critic()
    td, _ = enumeration.rollout()
    rewards = make("early_exit")(td.clone())[keys.REWARD]
    assert (estimator(td)[keys.REWARD] - rewards)[:, :, 1:].abs().min() > 1e-6
    torch.testing.assert_close(enumeration.expected(estimator), enumeration.true(), **EXACT)


@WINDOWS
def test_a_linear_critic_of_single_rewards_keeps_the_true_gradient(window):
    enumeration = Enumeration(window)
    estimator = make("linear_critic").double().eval()
    critic = estimator.stages[1]
    torch.nn.init.normal_(critic.table.weight)
    critic.rollouts_done.fill_(critic.warmup)
    td, _ = enumeration.rollout()
    rewards = make("naive")(td.clone())[keys.REWARD]
    assert (estimator(td)[keys.REWARD] - rewards)[:, :, 1:].abs().min() > 1e-6
    torch.testing.assert_close(enumeration.expected(estimator), enumeration.true(), **EXACT)


@WINDOWS
def test_a_critic_and_a_share_of_the_other_sample_keep_the_true_gradient(window):
    enumeration = Enumeration(window)
    estimator = learned_critic(num_samples=2)
    assert estimator.stages[3].beta.item() == pytest.approx(0.6)
    td = enumeration.samples((1 - enumeration.tuples(2)).double())
    weight_CB = td[keys.ACTION_LOG_PROB].detach().sum((1, 3)).exp()
    torch.testing.assert_close(
        enumeration.gradient(estimator, td, weight_CB), enumeration.true(), **EXACT
    )


@WINDOWS
@pytest.mark.parametrize(
    ("name", "samples", "reward_only"),
    [("rloo", 2, False), ("rloo", 2, True), ("rloo", 3, False), ("rloo_clipped", 2, True)],
)
def test_samples_of_the_same_sequence_keep_the_true_gradient(name, samples, reward_only, window):
    enumeration = Enumeration(window)
    td = enumeration.samples((1 - enumeration.tuples(samples)).double())
    weight_CB = td[keys.ACTION_LOG_PROB].detach().sum((1, 3)).exp()
    estimator = make(name, num_samples=samples, reward_only=reward_only)
    torch.testing.assert_close(
        enumeration.gradient(estimator, td, weight_CB), enumeration.true(), **EXACT
    )


@pytest.mark.parametrize("name", ["arm", "disarm"])
@pytest.mark.parametrize("length", [5, 6])
def test_antithetic_pairs_have_the_true_gradient(name, length):
    """Between the points p and 1 - p of each u_i the integrand is linear in u_i: its middle is its mean."""
    enumeration = Enumeration(0, length=length)
    estimator = make(name)
    noise, size = cells([torch.cat([p, 1 - p]) for p in enumeration.breaks()])
    td = enumeration.coupled(estimator, noise, 2)
    torch.testing.assert_close(
        enumeration.gradient(estimator, td, size), enumeration.true(), **EXACT
    )


def arms_probability(prob, drawn_K):
    """P(these actions) of one decision: inclusion and exclusion of P(d_k > t for all k in S) = (1 - |S| t)_+^(K-1).

    ``a_k = [u_k < p] = [d_k > t]`` with ``t = 1 - p^(1/(K-1))``.
    """
    samples = len(drawn_K)
    ones = sum(drawn_K)
    t = 1 - prob ** (1 / (samples - 1))
    return sum(
        (-1) ** more
        * math.comb(samples - ones, more)
        * (1 - (ones + more) * t).clamp(min=0) ** (samples - 1)
        for more in range(samples - ones + 1)
    )


@pytest.mark.parametrize("samples", [2, 3])
def test_arms_has_the_true_gradient(samples):
    enumeration = Enumeration(0)
    estimator = make("arms", num_samples=samples)
    tuples = enumeration.tuples(samples)
    td = enumeration.samples((1 - tuples).double())
    assert torch.equal(td[keys.ACTION][..., 1:], tuples[..., 1:].expand(-1, -1, 2, -1))
    prob_BT = td[keys.BOUNDARY_PROB][0, 0]
    pattern = {
        drawn: arms_probability(prob_BT, drawn)
        for drawn in itertools.product((0, 1), repeat=samples)
    }
    torch.testing.assert_close(sum(pattern.values()), torch.ones_like(prob_BT))
    each = [
        [pattern[tuple(drawn)][:, t] for t, drawn in enumerate(row, start=1)]
        for row in tuples[:, :, 0, 1:].mT.tolist()
    ]
    weight_CB = torch.stack([torch.stack(factors).prod(0) for factors in each])
    torch.testing.assert_close(
        enumeration.gradient(estimator, td, weight_CB), enumeration.true(), **EXACT
    )


@pytest.mark.parametrize("samples", [2, 3, 4])
def test_arms_couples_as_its_formula_says(samples):
    """Each u is uniform, and two of them meet below p as often as ``joint_probability`` says."""
    draws = 100_000
    u = (
        antithetic.ARMS()
        .couple(torch.rand(samples, draws, 1).double(), torch.ones(draws, 1).bool(), None)
        .squeeze(-1)
    )
    for prob in (0.1, 0.3, 0.5, 0.7, 0.9):
        below = u < prob
        error = 4.5 * math.sqrt(prob * (1 - prob) / draws)
        assert (below.double().mean(1) - prob).abs().max() < error
        joint = antithetic.joint_probability(torch.tensor(prob).double(), samples).item()
        both = [
            (below[i] & below[j]).double().mean().item()
            for i, j in itertools.combinations(range(samples), 2)
        ]
        assert both == pytest.approx([joint] * len(both), abs=error)
        assert joint < prob**2
        exact = sum(
            arms_probability(torch.tensor(prob).double(), (1, 1, *rest))
            for rest in itertools.product((0, 1), repeat=samples - 2)
        )
        assert exact.item() == pytest.approx(joint, abs=1e-12)


@WINDOWS
@pytest.mark.parametrize(("name", "samples"), [("bitflip", 2), ("branch", 2), ("branch", 3)])
def test_one_forced_decision_keeps_the_true_gradient(name, samples, window):
    """All choices of the decision, times all cells between the values that p_i can take after some prefix."""
    enumeration = Enumeration(window)
    estimator = make(name) if samples == 2 else make(name, num_samples=samples)
    td, weight_CB = enumeration.branched(estimator, samples)
    torch.testing.assert_close(weight_CB.sum(0), torch.ones(2).double())
    torch.testing.assert_close(
        enumeration.gradient(estimator, td, weight_CB), enumeration.true(), **EXACT
    )


@WINDOWS
def test_bitflips_weights_give_the_language_models_expected_loss(window):
    """One of two decisions is forced, so that an unweighted mean over the pair would differ."""
    enumeration = Enumeration(window)
    estimator = make("bitflip")
    td, weight_CB = enumeration.branched(estimator, 2)
    late = td[keys.LOG_LIKELIHOOD].detach().sum(-1)
    share = estimator(td)[keys.SAMPLE_WEIGHT][..., 0]
    joint, prob_K = enumeration.rollout()
    true = (prob_K * joint[keys.LOG_LIKELIHOOD].sum((1, 2))).sum().item()
    assert ((share * late).sum(1) * weight_CB).sum().item() == pytest.approx(true, rel=1e-10)
    assert (late.mean(1) * weight_CB).sum().item() != pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize(("decisions", "positions"), [(3, 1), (5, 2), (4, 4), (2, 3), (0, 1)])
def test_every_decision_has_the_chance_that_its_weight_undoes(decisions, positions):
    mask = torch.zeros(1, 6, dtype=torch.bool)
    mask[0, 1 : 1 + decisions] = True
    steps = 60
    at = (torch.arange(steps)[:, None].double() + 0.5).expand(-1, positions) / steps
    with rand_gives(at[:, None]):
        chosen = branching.choose_positions(mask, positions, torch.Size((steps, 1, 6)), None)
    total = branching.inverse_probability(mask, chosen, positions).mean(0)
    torch.testing.assert_close(total, mask.to(total.dtype))
