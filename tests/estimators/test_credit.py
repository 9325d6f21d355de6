"""Credit until the k-th next boundary, the critic and the shrunk mean against plain references."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from enumeration import EXACT, Enumeration
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.core import keys
from tokenv.estimators import recipes
from tokenv.estimators.baselines import (
    BatchCentre,
    LeaveOneOutSamples,
    LinearCritic,
    RewardCentre,
    ShrunkLeaveOneOut,
    TextCritic,
)
from tokenv.estimators.credit import BoundaryCredit, Discount


def credited(reward, action, gamma, boundaries):
    """By loops over one sequence."""
    credit = []
    for i in range(len(reward)):
        total, met = 0.0, 0
        for t in range(i, len(reward)):
            met += action[t] if t > i else 0
            if met == boundaries:
                break
            total += gamma ** (t - i) * reward[t]
        credit.append(total)
    return credit


def rollout_of(action, reward):
    values = {keys.ACTION: action, keys.DECISION_MASK: torch.ones_like(action, dtype=torch.bool)}
    td = TensorDict(values, batch_size=action.shape)
    return td.set(keys.REWARD, reward.unsqueeze(-1))


@settings(max_examples=40)
@given(
    st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, 0.7, 1.0]), st.integers(0, 1000)
)
def test_credit_ends_at_the_kth_next_boundary(steps, boundaries, gamma, seed):
    torch.manual_seed(seed)
    action = (torch.rand(2, 3, steps) < 0.4).long()
    reward = torch.randn(2, 3, steps).double()
    advantage = BoundaryCredit(gamma, boundaries)(rollout_of(action, reward))[
        keys.ADVANTAGE
    ].flatten(0, 1)
    for row, a, r in zip(
        advantage, action.flatten(0, 1).tolist(), reward.flatten(0, 1).tolist(), strict=True
    ):
        assert row.tolist() == pytest.approx(credited(r, a, gamma, boundaries), abs=1e-9)


def test_the_cut_is_annealed_in_and_remembered():
    """From the discount to the cut in four rollouts; evaluation does not count, a copy goes on."""
    action = (torch.rand(3, 20) < 0.4).long()
    reward = torch.randn(3, 20).double()
    part = BoundaryCredit(0.9, 2, anneal=4)

    def now(which):
        return which(rollout_of(action, reward))[keys.ADVANTAGE]

    whole = now(Discount(0.9))
    cut = now(BoundaryCredit(0.9, 2))
    for done in range(6):
        alpha = min(done / 4, 1)
        torch.testing.assert_close(now(part.eval()), (1 - alpha) * whole + alpha * cut)
        copy = BoundaryCredit(0.9, 2, anneal=4)
        copy.load_state_dict(part.state_dict())
        assert torch.equal(now(copy), now(part.train()))


@pytest.mark.parametrize(("option", "value"), [("gamma", 1.1), ("boundaries", 0), ("anneal", -1)])
def test_impossible_cuts_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} = {value}"):
        BoundaryCredit(**{option: value})


def two_samples(shared, batch=400, steps=5):
    """Return credits of two samples per text: a common term, and one for each sample."""
    text = torch.randn(1, batch, steps).double()
    own = torch.randn(2, batch, steps).double()
    td = TensorDict({keys.ADVANTAGE: shared * text + own}, batch_size=own.shape)
    return td.set(keys.DECISION_MASK, torch.ones(own.shape, dtype=torch.bool))


def test_the_share_of_the_other_sample_is_learned():
    """The factor converges to s^2 / (s^2 + 1), of least variance; the first rollout is as in leave-one-out."""
    for shared in (0.0, 1.0, 5.0):
        part = ShrunkLeaveOneOut()
        td = two_samples(shared)
        torch.testing.assert_close(part(td.clone()), LeaveOneOutSamples()(td))
        for _ in range(30):
            part(two_samples(shared))
        assert part.beta.item() == pytest.approx(shared**2 / (shared**2 + 1), abs=0.05)
        fresh = two_samples(shared)
        centred = [
            each(fresh.clone())[keys.ADVANTAGE].var().item()
            for each in (part, LeaveOneOutSamples())
        ]
        assert centred[0] < centred[1] * 1.001


def test_the_share_is_from_earlier_rollouts():
    first = two_samples(1.0)
    second = two_samples(1.0)
    part = ShrunkLeaveOneOut()
    part(first)
    beta = part.beta.item()
    others = second[keys.ADVANTAGE].flip(0)
    expected = second[keys.ADVANTAGE] - beta * others
    torch.testing.assert_close(part(second.clone())[keys.ADVANTAGE], expected)
    assert part.beta.item() != beta
    with pytest.raises(ValueError, match="decay = 1"):
        ShrunkLeaveOneOut(decay=1)


def text_of(batch=32, steps=6, width=4):
    """Return rewards which the text determines up to a little noise."""
    encoding = torch.randn(batch, steps + 1, width)
    early = -torch.rand(batch, steps)
    reward = 0.5 * encoding[:, 1:, 0] - early + 0.1 * torch.randn(batch, steps)
    mask = (torch.arange(steps) > 0).expand(batch, -1).clone()
    mask[0, 3:] = False
    td = TensorDict(
        {keys.ENCODING: encoding[:, :-1], keys.DECISION_MASK: mask}, batch_size=(batch, steps)
    )
    td.set(keys.NEXT_ENCODING, encoding[:, 1:]).set(
        keys.NEXT_SYMBOL, torch.randint(3, (batch, steps))
    )
    return td.set(keys.LOG_LIKELIHOOD_EARLY, early).set(keys.REWARD, reward.unsqueeze(-1))


def test_the_critic_learns_what_the_text_says_and_waits_for_its_turn():
    critic = TextCritic(4, hidden=16, warmup=3)
    td = text_of()
    for _ in range(3):
        assert torch.equal(critic(td.clone())[keys.REWARD], td[keys.REWARD])
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(300):
        critic(text_of())[keys.LOSS_CRITIC].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fresh = text_of()
    mask = fresh[keys.DECISION_MASK]
    before = fresh[keys.REWARD][mask]
    after = critic(fresh.clone())[keys.REWARD][mask]
    assert after.var() < 0.2 * before.var()
    assert torch.equal(critic(fresh.clone())[keys.REWARD][~mask], fresh[keys.REWARD][~mask])


def test_a_linear_critic_is_the_least_squares_fit():
    """Compare with a regression on the features which the docstring names, for a third of its symbols each."""
    torch.manual_seed(0)
    td = text_of(batch=64)
    critic = LinearCritic(4, vocabulary=3, warmup=0).double()
    td = td.apply(lambda x: x.double() if x.is_floating_point() else x)
    optimizer = torch.optim.LBFGS(
        critic.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0
    )

    def loss():
        optimizer.zero_grad()
        mean = critic(td.clone())[keys.LOSS_CRITIC].mean()
        mean.backward()
        return mean

    optimizer.step(loss)
    here, following = (F.layer_norm(td[key], (4,)) for key in (keys.ENCODING, keys.NEXT_ENCODING))
    symbol = F.one_hot(td[keys.NEXT_SYMBOL], 3).double()
    products = (symbol.unsqueeze(-1) * F.pad(here, (0, 1), value=1.0).unsqueeze(-2)).flatten(-2)
    mask = td[keys.DECISION_MASK]
    features = torch.cat([products, following], -1)[mask].numpy()
    reward = td[keys.REWARD].squeeze(-1)[mask].numpy()
    fitted = features @ np.linalg.lstsq(features, reward, rcond=None)[0]
    left = critic(td.clone())[keys.REWARD].squeeze(-1)[mask].detach().numpy()
    np.testing.assert_allclose(left, reward - fitted, atol=1e-5)


def test_a_linear_critic_needs_numbered_symbols():
    with pytest.raises(
        ValueError, match=r"vocabulary = 0: .*choose an estimator with the early exit"
    ):
        LinearCritic(4, vocabulary=0)


def test_only_the_critic_is_trained_by_its_loss():
    """Through ``loss_policy``, whose value stays that of the surrogate."""
    estimator = recipes.text_critic(4, warmup=0)
    td = text_of()
    log_prob = torch.randn(td.shape, requires_grad=True)
    td.set(keys.ACTION_LOG_PROB, log_prob).set(keys.LOG_LIKELIHOOD, td[keys.REWARD].squeeze(-1))
    td = estimator(td)
    assert torch.equal(td[keys.LOSS_POLICY], -log_prob * td[keys.ADVANTAGE])
    td[keys.LOSS_POLICY].mean().backward()
    torch.testing.assert_close(log_prob.grad, -td[keys.ADVANTAGE] / td.numel())
    assert estimator.stages[1].network[-1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize(("option", "value"), [("hidden", 0), ("warmup", -1)])
def test_impossible_critics_are_refused(option, value):
    with pytest.raises(ValueError, match=f"{option} = {value}"):
        TextCritic(4, **{option: value})


def unequal_rewards():
    """Return rewards of three sequences of 3, 6 and 6 decisions, the first of which ends early."""
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[0, 3:] = False
    reward = torch.randn(3, 6, 1, dtype=torch.float64)
    return TensorDict({keys.REWARD: reward, keys.DECISION_MASK: mask}, batch_size=(3, 6))


def test_centred_rewards_are_centred_advantages_only_if_lengths_are_equal():
    equal = unequal_rewards()
    equal[keys.DECISION_MASK].fill_(value=True)
    first = Discount(0.8)(RewardCentre()(equal.clone()))[keys.ADVANTAGE]
    last = BatchCentre()(Discount(0.8)(equal.clone()))[keys.ADVANTAGE]
    torch.testing.assert_close(first, last, rtol=1e-12, atol=1e-13)
    unequal = unequal_rewards()
    first = Discount(0.8)(RewardCentre()(unequal.clone()))[keys.ADVANTAGE]
    last = BatchCentre()(Discount(0.8)(unequal.clone()))[keys.ADVANTAGE]
    assert (first - last).abs()[unequal[keys.DECISION_MASK]].max() > 1e-3


def test_rewards_are_centred_over_the_sequences_which_go_on():
    td = unequal_rewards()
    reward = td[keys.REWARD].squeeze(-1)
    expected = torch.zeros(3, 6, dtype=torch.float64)
    for i in range(6):
        rows = [0, 1, 2] if i < 3 else [1, 2]
        mean = sum(reward[b, i] for b in rows) / len(rows)
        for b in rows:
            expected[b, i] = reward[b, i] - mean
    centred = RewardCentre()(td.clone())[keys.REWARD].squeeze(-1)
    torch.testing.assert_close(centred, expected, rtol=1e-12, atol=1e-13)


def test_what_reinforce_leaves_out_is_what_other_recipes_lack():
    enumeration = Enumeration(2)
    for options, other in (
        ({"centred": "none"}, recipes.early_exit(0.9)),
        ({"centred": "none", "early_exit": False, "gamma": 1.0}, recipes.naive()),
        ({"centred": "reward"}, recipes.reinforce(0.9)),
    ):
        estimator = recipes.reinforce(**({"gamma": 0.9} | options))
        torch.testing.assert_close(
            enumeration.expected(estimator), enumeration.expected(other), **EXACT
        )
    assert not recipes.reinforce(early_exit=False).reads_early_exit


def test_a_warm_start_weighs_each_decision_by_its_own_ratio_and_ends():
    enumeration = Enumeration(2)
    rate = 0.3
    estimator = recipes.reinforce(0.9, centred="reward", warm_start=2, rate=rate)
    after = recipes.reinforce(0.9, centred="reward")
    td, _ = enumeration.rollout()
    noise = torch.tensor([0.1, 0.29, 0.31, 0.9])
    loss = after(td.clone())[keys.LOSS_POLICY]
    prob = td[keys.ACTION_LOG_PROB].exp()
    action = td[keys.ACTION]
    ratio = torch.where(action == 1, prob / rate, prob / (1 - rate)).where(
        td[keys.DECISION_MASK], 1.0
    )
    for _ in range(2):
        assert estimator.sampling.propose(noise).tolist() == [1, 1, 0, 0]
        torch.testing.assert_close(
            estimator(td.clone())[keys.LOSS_POLICY], loss * ratio.detach(), **EXACT
        )
    assert estimator.sampling.propose(noise) is None
    torch.testing.assert_close(estimator(td.clone())[keys.LOSS_POLICY], loss, **EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"centred": "batch"}, "centred = 'batch'.*advantage, reward or none"),
        ({"warm_start": -1}, "rollouts = -1"),
        ({"warm_start": 5, "head_epochs": 1}, "warm_start = 5 with head_epochs = 1"),
        ({"warm_start": 5, "rate": 1.5}, "rate = 1.5"),
    ],
)
def test_reinforce_says_which_options_it_cannot_have(options, message):
    with pytest.raises(ValueError, match=message):
        recipes.reinforce(**options)
