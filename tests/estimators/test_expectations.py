"""Estimators have the true gradient as expectation: enumerated over all boundaries of a tiny model, in float64."""

import itertools

import pytest
import torch
from enumeration import EXACT, Enumeration, flat_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.objectives.value.functional import reward2go

from tokenv import estimators
from tokenv.config import registry
from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.estimators.base import ROLLOUT_KEYS, Stage, chain
from tokenv.estimators.baselines import BatchCentre
from tokenv.estimators.credit import Discount, EarlyExit, discounted_sum
from tokenv.estimators.rate_targets import LogitPressure
from tokenv.estimators.recipes import reinforce
from tokenv.estimators.statistics import masked_mean, mean_over_batch
from tokenv.estimators.surrogates import ScoreFunction


class Likelihood(Stage):
    """The plain reward, without early exit."""

    in_keys = [keys.LOG_LIKELIHOOD]
    out_keys = [keys.REWARD]

    def forward(self, tensordict):
        return tensordict.set(keys.REWARD, tensordict[keys.LOG_LIKELIHOOD].detach().unsqueeze(-1))


def plain(gamma=1.0):
    return chain(EarlyExit(), Discount(gamma), ScoreFunction())


CASES = [(0, 5), (2, 5), (2, 6)]


@pytest.mark.parametrize(("window", "length"), CASES)
def test_the_policy_loss_expects_the_true_policy_gradient(window, length):
    """With respect to the policy and, through X, to the encoder: grad of -E_a[sum log p] by its probabilities."""
    enumeration = Enumeration(window, length=length)
    _, prob_K = enumeration.rollout()
    objective = -(prob_K * enumeration.likelihood().detach()).sum()
    true = flat_gradient(objective, [*enumeration.policy, *enumeration.encoder])
    assert true.abs().max() > 1e-3
    torch.testing.assert_close(enumeration.expected(plain()), true, **EXACT)


@pytest.mark.parametrize(("window", "length"), CASES)
def test_language_model_and_policy_loss_expect_the_true_total_gradient(window, length):
    enumeration = Enumeration(window, length=length)
    every = [*enumeration.policy, *enumeration.lm.parameters()]
    _, prob_K = enumeration.rollout()
    true = flat_gradient(-(prob_K * enumeration.likelihood()).sum(), every)
    td, prob_K = enumeration.rollout()
    loss_KBT = plain()(td)[keys.LOSS_POLICY] - td[keys.LOG_LIKELIHOOD]
    estimate = flat_gradient((prob_K.detach() * loss_KBT.sum((1, 2))).sum(), every)
    torch.testing.assert_close(estimate, true, **EXACT)


def test_the_language_models_loss_alone_misses_the_policy():
    """Without the policy loss the encoder's gradient differs, so the test above can fail."""
    enumeration = Enumeration(2)
    td, prob_K = enumeration.rollout()
    late_K = td[keys.LOG_LIKELIHOOD].sum((1, 2))
    true = flat_gradient(-(prob_K * late_K).sum(), enumeration.encoder)
    td, prob_K = enumeration.rollout()
    alone = flat_gradient(
        -(prob_K.detach() * td[keys.LOG_LIKELIHOOD].sum((1, 2))).sum(), enumeration.encoder
    )
    assert (alone - true).norm() > 1e-3 * true.norm()


def test_the_mean_over_decisions_is_the_sum_by_their_number():
    enumeration = Enumeration(2)
    td, _ = enumeration.rollout()
    loss_KBT = plain()(td)[keys.LOSS_POLICY]
    decided = td[keys.DECISION_MASK]
    assert (loss_KBT[~decided] == 0).all()
    torch.testing.assert_close(
        masked_mean(loss_KBT, decided), loss_KBT.sum() / (len(loss_KBT) * 2 * (5 - 2)), **EXACT
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_early_exit_changes_no_expectation(gamma):
    enumeration = Enumeration(2)
    without = chain(Likelihood(), Discount(gamma), ScoreFunction())
    torch.testing.assert_close(
        enumeration.expected(plain(gamma)), enumeration.expected(without), **EXACT
    )
    losses = [
        estimator(enumeration.rollout()[0])[keys.LOSS_POLICY]
        for estimator in (plain(gamma), without)
    ]
    assert not torch.allclose(*losses)


@pytest.mark.parametrize(("batch", "length"), [(2, 5), (3, 4)])
def test_batch_centring_scales_the_expectation(batch, length):
    """By exactly (B - 1) / B, at every position."""
    enumeration = Enumeration(2, batch, length)
    torch.testing.assert_close(
        enumeration.expected(reinforce(gamma=1.0)),
        enumeration.expected(plain()) * (batch - 1) / batch,
        **EXACT,
    )


def test_discounted_expectation_is_the_shorter_sights():
    """Of the gradient's terms grad log pi(a_i) log p(x_{t+1}) each is counted gamma^(t-i), by plain loops."""
    enumeration = Enumeration(2)
    gamma = 0.7
    td, prob_K = enumeration.rollout()
    log_prob = td[keys.ACTION_LOG_PROB]
    late = td[keys.LOG_LIKELIHOOD].detach()
    loss = torch.zeros((), dtype=torch.float64)
    steps = late.shape[-1]
    for k, b, i in itertools.product(range(len(prob_K)), range(2), range(steps)):
        credit = sum(gamma ** (t - i) * late[k, b, t] for t in range(i, steps))
        loss = loss - prob_K[k].detach() * log_prob[k, b, i] * credit
    true = flat_gradient(loss, [*enumeration.policy, *enumeration.encoder])
    torch.testing.assert_close(enumeration.expected(plain(gamma)), true, **EXACT)


def test_the_discounts_bias_vanishes_as_gamma_grows():
    enumeration = Enumeration(2, length=6)
    true = enumeration.expected(plain())
    bias = [
        ((enumeration.expected(plain(gamma)) - true).norm() / true.norm()).item()
        for gamma in (0.0, 0.5, 0.9, 0.99, 0.999)
    ]
    assert bias == sorted(bias, reverse=True)
    assert bias[-1] > 0
    assert bias[-2] < 0.05
    assert bias[-1] / bias[-2] == pytest.approx(0.1, rel=0.05)  # linear in 1 - gamma


def test_samples_estimate_without_each_other():
    """The chain's mean over K samples is the mean of K chains of one sample."""
    enumeration = Enumeration(2)
    together = reinforce()(enumeration.rollout()[0])
    single = [reinforce()(td) for td in enumeration.rollout()[0].unbind(0)]
    for key in (keys.REWARD, keys.ADVANTAGE, keys.LOSS_POLICY):
        torch.testing.assert_close(together[key], torch.stack([td[key] for td in single]))


rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=40)
gammas = st.just(0.0) | st.just(1.0) | st.floats(0, 1)


@settings(max_examples=100)
@given(rewards, gammas)
def test_discounted_sum_equals_the_plain_loop(reward, gamma):
    total = 0.0
    expected = []
    for r in reversed(reward):
        total = r + gamma * total
        expected.append(total)
    actual = discounted_sum(torch.tensor(reward, dtype=torch.float64), gamma)
    torch.testing.assert_close(
        actual, torch.tensor(expected[::-1], dtype=torch.float64), rtol=1e-10, atol=1e-10
    )


@settings(max_examples=25)
@given(st.integers(1, 30), st.sampled_from([0.3, 0.9, 0.99, 1.0]))
def test_discounted_sum_equals_torchrls(steps, gamma):
    """Torchrl's breaks at gamma = 0 and leaves powers below 1e-7 out."""
    reward_BT = torch.randn(3, steps, dtype=torch.float64)
    done_BT = torch.arange(steps).expand(3, -1) == steps - 1
    expected = reward2go(reward_BT.unsqueeze(-1), done_BT.unsqueeze(-1), gamma, time_dim=-2)
    torch.testing.assert_close(
        discounted_sum(reward_BT, gamma), expected.view(3, steps), rtol=1e-5, atol=1e-5
    )


def test_discounted_sum_of_long_sequences_stays_accurate_in_float32():
    reward_T = torch.randn(5000)
    expected = discounted_sum(reward_T.double(), 0.99)
    torch.testing.assert_close(
        discounted_sum(reward_T, 0.99).double(), expected, rtol=1e-5, atol=1e-4
    )


def rate_data(prob, shape=(2, 4)):
    logits = torch.full(shape, prob, dtype=torch.float64).logit() + 0.01 * torch.randn(
        shape, dtype=torch.float64
    )
    logits.requires_grad_()
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., 0] = False
    mask[..., 0, -1] = False
    return TensorDict(
        {
            keys.BOUNDARY_LOGITS: logits,
            keys.BOUNDARY_PROB: logits.sigmoid(),
            keys.DECISION_MASK: mask,
        },
        batch_size=shape,
    )


@pytest.mark.parametrize("shape", [(2, 4), (3, 2, 4)])
@pytest.mark.parametrize(("prob", "direction"), [(0.05, -1), (0.6, 1)])
def test_logit_pressure_pushes_evenly_towards_the_rate(prob, direction, shape):
    """Below the rate a descent step raises all logits by the same amount, above it lowers them."""
    td = rate_data(prob, shape)
    logits = td[keys.BOUNDARY_LOGITS]
    mask = td[keys.DECISION_MASK]
    loss = masked_mean(LogitPressure(0.2)(td)[keys.LOSS_RATE], mask)
    excess = td[keys.BOUNDARY_PROB][mask].mean().detach() - 0.2
    torch.testing.assert_close(loss, logits[mask].mean() * excess)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, mask * excess / mask.sum())
    assert (gradient[mask].sign() == direction).all()


def test_logit_pressure_does_not_see_masked_positions():
    first = rate_data(0.4)
    second = rate_data(0.4)
    mask = first[keys.DECISION_MASK]
    for key in (keys.BOUNDARY_LOGITS, keys.BOUNDARY_PROB):
        second[key] = torch.where(mask, first[key], 0.99)
    losses = [LogitPressure(0.2)(td)[keys.LOSS_RATE] for td in (first, second)]
    torch.testing.assert_close(*losses)
    assert (losses[0][~mask] == 0).all()


@settings(max_examples=15)
@given(
    st.lists(st.integers(2, 9), min_size=3, max_size=3),
    st.none() | st.integers(1, 2),
    st.integers(0, 1000),
)
def test_padding_never_matters(lengths, samples, seed):
    """Neither its symbols nor its noise move any loss, and its own losses are zero."""
    torch.manual_seed(seed)
    enumeration = Enumeration(2)
    length_B = torch.tensor(lengths)
    symbol_BN = torch.randint(256, (3, 9))
    noise = torch.rand(*(() if samples is None else (samples,)), 3, 8, dtype=torch.float64)
    padding_BN = torch.arange(9) >= length_B[:, None]
    outcomes = []
    for change in (0, 1):
        td = rollout(
            enumeration.lm,
            enumeration.agent,
            torch.where(padding_BN, (symbol_BN + change) % 256, symbol_BN),
            noise=torch.where(padding_BN[:, :-1], (noise + 0.5 * change) % 1, noise),
            length_B=length_B,
        )
        td = LogitPressure(0.2)(reinforce(0.9)(td))
        outcomes.append(td)
    for key in (keys.REWARD, keys.LOSS_POLICY, keys.LOSS_RATE):
        torch.testing.assert_close(outcomes[0][key], outcomes[1][key], rtol=1e-9, atol=1e-12)
    assert (outcomes[0][keys.LOSS_POLICY][~outcomes[0][keys.DECISION_MASK]] == 0).all()
    assert (
        outcomes[0][keys.REWARD].squeeze(-1).where(~padding_BN[:, 1:], 0.0)
        == outcomes[0][keys.REWARD].squeeze(-1)
    ).all()


@pytest.mark.parametrize("samples", [(), (3,)])
def test_centring_ignores_sequences_that_have_ended(samples):
    shape = (*samples, 4, 6)
    mask = (torch.rand(shape) < 0.6).contiguous()
    mask[..., 0, :] = True
    advantage = torch.randn(shape, dtype=torch.float64)
    td = TensorDict({keys.ADVANTAGE: advantage, keys.DECISION_MASK: mask}, batch_size=shape)
    other = td.clone().set(keys.ADVANTAGE, torch.where(mask, advantage, 1e6))
    centred, centred_other = (BatchCentre()(x)[keys.ADVANTAGE] for x in (td, other))
    torch.testing.assert_close(centred[mask], centred_other[mask])
    assert mean_over_batch(centred, mask).abs().max() < 1e-12
    alone = mask.sum(-2, keepdim=True).eq(1) & mask
    assert centred[alone].abs().sum() < 1e-12


def test_advantages_take_no_gradient():
    log_prob = torch.randn(2, 3, requires_grad=True)
    advantage = torch.randn(2, 3, requires_grad=True)
    td = TensorDict({keys.ACTION_LOG_PROB: log_prob, keys.ADVANTAGE: advantage}, batch_size=(2, 3))
    ScoreFunction()(td)[keys.LOSS_POLICY].sum().backward()
    assert advantage.grad is None
    torch.testing.assert_close(log_prob.grad, -advantage.detach())


class Odd(Stage):
    """A stage which reads a key that no stage writes."""

    in_keys = ["oddity"]
    out_keys = ["evenness"]

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tensordict):
        return tensordict


class Oddity(Stage):
    in_keys = [keys.REWARD]
    out_keys = ["oddity"]

    def forward(self, tensordict):
        return tensordict


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            (ScoreFunction(),),
            r"stage 0 \(ScoreFunction\) reads 'advantage'.*such as Discount\(\), before",
        ),
        (
            (EarlyExit(), BatchCentre(), Discount()),
            r"stage 1 \(BatchCentre\) reads 'advantage'.*move Discount before it",
        ),
        (
            (EarlyExit(), Odd()),
            r"stage 1 \(Odd\) reads 'oddity'.*put a stage which writes it before",
        ),
        ((Odd(), Oddity()), r"stage 0 \(Odd\) reads 'oddity'.*move Oddity before it"),
        ((), "at least one, such as"),
    ],
)
def test_chains_that_cannot_work_say_why(parts, message):
    with pytest.raises(ValueError, match=message):
        chain(*parts)


def test_a_chain_knows_what_it_reads_and_writes():
    estimator = reinforce()
    assert set(estimator.in_keys) <= ROLLOUT_KEYS
    assert {keys.LOG_LIKELIHOOD, keys.ACTION_LOG_PROB} <= set(estimator.in_keys)
    assert keys.ADVANTAGE not in estimator.in_keys
    assert {keys.ADVANTAGE, keys.LOSS_POLICY} <= set(estimator.out_keys)
    assert "1.seen" in chain(Oddity(), Odd()).state_dict()


def test_a_chain_may_ask_for_samples():
    assert chain(EarlyExit()).sampling.num_samples is None
    assert chain(EarlyExit(), num_samples=4).sampling.num_samples == 4
    with pytest.raises(ValueError, match="num_samples = 0"):
        chain(EarlyExit(), num_samples=0)


@pytest.mark.parametrize("gamma", [-0.1, 1.01])
def test_impossible_discounts_are_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        Discount(gamma)


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        LogitPressure(rate)


def test_recipes_and_stages_are_imported_from_the_package():
    assert set(registry.ESTIMATORS) <= set(dir(estimators))
    for name in registry.ESTIMATORS:
        assert getattr(estimators, name) is registry.find("estimator", name, registry.ESTIMATORS)
    stages = {name.lower() for names in estimators.STAGES.values() for name in names}
    same_name = {name for name in registry.ESTIMATORS if name.replace("_", "") in stages}
    for name in same_name:  # such a stage is what the recipe consists of
        built = registry.build(
            "estimator", {"name": name}, registry.ESTIMATORS, width=8, rate=0.2, seq_len=6
        )
        assert name.replace("_", "") in {type(stage).__name__.lower() for stage in built.stages}
