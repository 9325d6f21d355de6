"""Binomial prior and ratio loss against their formulas; logit pressure has its tests in test_expectations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.core import keys
from tokenv.estimators.rate_targets import BinomialPrior, LogitPressure, RatioLoss, ratio_loss
from tokenv.estimators.statistics import masked_mean

RATE = 0.2


def rollout_of(prob, batch=3, steps=30):
    logits = torch.full((batch, steps), prob, dtype=torch.float64).logit().requires_grad_()
    mask = torch.ones(batch, steps, dtype=torch.bool)
    mask[:, 0] = False
    action = torch.where(mask, (torch.rand(batch, steps) < prob).long(), 1)
    position = torch.arange(steps).expand(batch, -1)
    values = {
        keys.BOUNDARY_LOGITS: logits,
        keys.ACTION: action,
        keys.DECISION_MASK: mask,
        keys.POSITION: position,
    }
    return TensorDict(values, batch_size=(batch, steps))


def per_sequence(rate):
    return RatioLoss(rate, over="sequence")


EVERY = pytest.mark.parametrize("target", [LogitPressure, BinomialPrior, RatioLoss, per_sequence])


def of_rates(prob_B, rate_B, steps=400):
    """Sequences with these boundary probabilities, as many boundaries as these mean, and these targets."""
    prob_BT, rate_BT = (
        torch.tensor(x).double()[:, None].expand(-1, steps + 1) for x in (prob_B, rate_B)
    )
    mask_BT = (torch.arange(steps + 1) > 0).expand(prob_BT.shape)
    drawn_BT = torch.arange(steps + 1) <= prob_BT * steps
    values = {
        keys.BOUNDARY_LOGITS: prob_BT.logit().requires_grad_(),
        keys.BOUNDARY_PROB: prob_BT,
        keys.ACTION: drawn_BT.long(),
        keys.DECISION_MASK: mask_BT,
        keys.POSITION: torch.arange(steps + 1).expand(prob_BT.shape),
        keys.TARGET_RATE: rate_BT,
    }
    return TensorDict(values, batch_size=prob_BT.shape)


def push(target, td):
    """Gradient of each sequence's logits."""
    loss = masked_mean(target(RATE)(td)[keys.LOSS_RATE], td[keys.DECISION_MASK])
    (gradient,) = torch.autograd.grad(loss, td[keys.BOUNDARY_LOGITS])
    return gradient[..., 1:].sum(-1)


@EVERY
@pytest.mark.parametrize("samples", [None, 3])
def test_equal_targets_of_sequences_are_one_target(target, samples):
    """With padding, and with several samples."""
    shape = (*(() if samples is None else (samples,)), 4, 30)
    position = torch.arange(30).expand(shape)
    mask = (position > 0) & (position < torch.tensor([30, 20, 11, 2])[:, None])
    logits = torch.randn(shape, dtype=torch.float64)
    values = {
        keys.BOUNDARY_LOGITS: logits.requires_grad_(),
        keys.BOUNDARY_PROB: torch.where(mask, logits.detach().sigmoid(), (position == 0).double()),
        keys.ACTION: torch.where(mask, torch.randint(2, shape), (position == 0).long()),
        keys.DECISION_MASK: mask,
        keys.POSITION: position,
    }
    results = []
    for more in ({}, {keys.TARGET_RATE: torch.full(shape, RATE, dtype=torch.float64)}):
        loss = target(RATE)(TensorDict(values | more, batch_size=shape))[keys.LOSS_RATE]
        results.append((loss, *torch.autograd.grad(masked_mean(loss, mask), logits)))
    assert results[0][1].abs().sum() > 0
    torch.testing.assert_close(*results)


@EVERY
def test_sequences_with_unlike_targets_do_not_trade(target):
    """The mean over the sequences is right, but each sequence is wrong."""
    few, many = push(target, of_rates([0.5, 0.05], [0.05, 0.5]))
    assert few > 0 > many


@pytest.mark.parametrize("target", [LogitPressure, RatioLoss])
def test_sequences_with_like_targets_do(target):
    alone, _ = push(target, of_rates([0.1, 0.1], [0.2, 0.2]))
    assert push(target, of_rates([0.1, 0.3], [0.2, 0.2])).abs().max() < 0.06 * alone.abs()


def test_logits_that_are_as_far_off_are_pushed_as_hard_at_every_rate():
    """Targets are far apart, so that there is no interaction; both are a little too high in logits."""
    rates = torch.tensor([0.02, 0.5], dtype=torch.float64)
    few, many = push(
        LogitPressure, of_rates((rates.logit() + 0.05).sigmoid().tolist(), rates.tolist())
    )
    assert few.item() == pytest.approx(many.item(), rel=0.05)


@EVERY
def test_descent_brings_every_rate_to_its_target(target):
    """A policy whose logits deviate by a curve of the rate converges to the target rates."""
    torch.manual_seed(0)
    low, high = torch.tensor([0.05, 0.5]).double().logit()
    curve = torch.tensor([0.8, -0.7, 0.5], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([curve], lr=0.05)

    def logits_of(rate_B):
        place_B = (2 * rate_B.logit() - low - high) / (high - low)
        return rate_B.logit() + torch.stack([place_B**0, place_B, place_B**2], -1) @ curve

    for step in range(400):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / 400)
        rate_B = 0.05 * 10 ** torch.rand(16, dtype=torch.float64)
        logits_BT = logits_of(rate_B)[:, None].expand(-1, 200)
        prob_BT = logits_BT.detach().sigmoid()
        position_BT = torch.arange(200).expand(16, -1)
        values = {
            keys.BOUNDARY_LOGITS: logits_BT,
            keys.BOUNDARY_PROB: prob_BT,
            keys.ACTION: (torch.rand(16, 200) < prob_BT).long(),
            keys.DECISION_MASK: position_BT > 0,
            keys.POSITION: position_BT,
            keys.TARGET_RATE: rate_B[:, None].expand(-1, 200),
        }
        td = TensorDict(values, batch_size=(16, 200))
        optimizer.zero_grad()
        masked_mean(target(RATE)(td)[keys.LOSS_RATE], td[keys.DECISION_MASK]).backward()
        optimizer.step()
    requested = torch.tensor([0.05, 0.1, 0.2, 0.35, 0.5], dtype=torch.float64)
    reached = logits_of(requested).sigmoid()
    assert (reached / requested - 1).abs().max() < 0.12, reached


def test_the_binomial_prior_is_torchs_own():
    td = rollout_of(0.3)
    loss = BinomialPrior(RATE)(td)[keys.LOSS_RATE]
    count_B = td[keys.ACTION][:, 1:].sum(-1).double()
    expected_B = (
        -torch.distributions.Binomial(29, probs=torch.tensor(RATE).double()).log_prob(count_B) / 29
    )
    torch.testing.assert_close(masked_mean(loss, td[keys.DECISION_MASK]), expected_B.mean())
    assert (loss[:, 0] == 0).all()


def test_the_binomial_prior_reads_the_relaxed_boundary_where_there_is_one():
    td = rollout_of(0.3)
    boundary = td[keys.ACTION].double().requires_grad_()
    td.set(keys.BOUNDARY, boundary)
    loss = masked_mean(BinomialPrior(RATE)(td)[keys.LOSS_RATE], td[keys.DECISION_MASK])
    (gradient,) = torch.autograd.grad(loss, boundary)
    assert gradient[:, 1:].abs().min() > 0
    assert (gradient[:, 0] == 0).all()


@pytest.mark.parametrize("target", [BinomialPrior, RatioLoss, per_sequence])
@pytest.mark.parametrize(("prob", "direction"), [(0.02, -1), (0.7, 1)])
def test_descent_moves_the_rate_to_the_target(target, prob, direction):
    torch.manual_seed(0)
    td = rollout_of(prob)
    logits = td[keys.BOUNDARY_LOGITS]
    mask = td[keys.DECISION_MASK]
    (gradient,) = torch.autograd.grad(masked_mean(target(RATE)(td)[keys.LOSS_RATE], mask), logits)
    assert (gradient[mask].sign() == direction).all()
    assert (gradient[~mask] == 0).all()


@settings(max_examples=50)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 0.95))
def test_the_ratio_loss_is_the_published_formula(drawn, meant, rate):
    n = 1 / rate
    published = n / (n - 1) * ((1 - drawn) * (1 - meant) + (n - 1) * drawn * meant)
    loss = ratio_loss(
        torch.tensor(drawn, dtype=torch.float64), torch.tensor(meant, dtype=torch.float64), rate
    )
    assert loss.item() == pytest.approx(published)
    at_target = ratio_loss(*2 * [torch.tensor(rate, dtype=torch.float64)], rate)
    assert at_target.item() == pytest.approx(1.0)


def published(boundary, prob, rate):
    """H-Net's own lines (utils/train.py) over all symbols of a minibatch, given as flat lists."""
    n = 1 / rate
    true_ratio = sum(boundary) / len(boundary)
    average_prob = sum(prob) / len(prob)
    return (
        ((1 - true_ratio) * (1 - average_prob) + true_ratio * average_prob * (n - 1)) * n / (n - 1)
    )


@settings(max_examples=20)
@given(
    st.lists(st.integers(1, 8), min_size=2, max_size=4),
    st.none() | st.integers(1, 2),
    st.integers(0, 1000),
)
def test_the_ratio_loss_is_hnets_over_the_minibatch(lengths, samples, seed):
    """First symbols with their certain boundaries count, padding does not, and the decisions' mean is the loss."""
    torch.manual_seed(seed)
    lengths[0] += 1  # somebody decides
    steps = max(lengths)
    shape = (*(() if samples is None else (samples,)), len(lengths), steps)
    logits = torch.randn(shape, dtype=torch.float64)
    position = torch.arange(steps).expand(shape)
    valid = position < torch.tensor(lengths)[:, None]
    mask = valid & (position > 0)
    action = torch.where(mask, torch.randint(2, shape), (position == 0).long())
    values = {
        keys.BOUNDARY_LOGITS: logits,
        keys.ACTION: action,
        keys.DECISION_MASK: mask,
        keys.POSITION: position,
    }
    loss = RatioLoss(RATE)(TensorDict(values, batch_size=shape))[keys.LOSS_RATE]
    prob = torch.where(position == 0, 1.0, logits.sigmoid())
    expected = published(action[valid].tolist(), prob[valid].tolist(), RATE)
    assert masked_mean(loss, mask).item() == pytest.approx(expected)
    assert (loss[~mask] == 0).all()


def test_only_the_ratio_loss_over_the_batch_lets_sequences_differ():
    """One with many boundaries and one with few, at the target together: only one of the losses pushes them."""
    td = rollout_of(0.2, batch=2, steps=41)
    with torch.no_grad():
        td[keys.BOUNDARY_LOGITS][:] = torch.tensor([[0.1], [0.3]]).logit()
    td[keys.ACTION][:, 1:] = torch.arange(40) < torch.tensor([[4], [12]])
    mask = td[keys.DECISION_MASK]
    batch, each = (
        masked_mean(RatioLoss(0.2, over)(td)[keys.LOSS_RATE], mask)
        for over in ("batch", "sequence")
    )
    # With F = G the loss is 1 + n^2 / (n - 1) (F - 1 / n)^2, and first boundaries count in the batch.
    assert batch.item() == pytest.approx(1 + 6.25 * (18 / 82 - 0.2) ** 2)
    assert each.item() == pytest.approx(1 + 6.25 * 0.1**2)


def test_the_ratio_loss_is_over_something():
    with pytest.raises(ValueError, match="over = 'tokens': expected batch or sequence"):
        RatioLoss(RATE, over="tokens")


def test_logit_pressure_counts_forced_boundaries_if_asked():
    """Two more of probability 1 in each sequence; the push on all logits stays equal."""
    td = rollout_of(0.3, steps=12)
    td.set(keys.BOUNDARY_PROB, torch.where(td[keys.DECISION_MASK], 0.3, 1.0).double())
    loss = LogitPressure(RATE, count_forced=True)(td)[keys.LOSS_RATE]
    mean = (11 * 0.3 + 2) / 13
    torch.testing.assert_close(
        loss, td[keys.BOUNDARY_LOGITS] * (mean - RATE) * td[keys.DECISION_MASK]
    )
    same = td.set(keys.TARGET_RATE, torch.full((3, 12), RATE, dtype=torch.float64))
    torch.testing.assert_close(LogitPressure(RATE, count_forced=True)(same)[keys.LOSS_RATE], loss)
