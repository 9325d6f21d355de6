"""Binomial prior and ratio loss against their formulas; logit pressure has its tests in test_estimators."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv import keys
from tokenv.estimators.rate import BinomialPrior, RatioLoss, ratio_loss
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


def test_the_binomial_prior_is_torchs_own():
    td = rollout_of(0.3)
    loss = BinomialPrior(RATE)(td)[keys.LOSS_RATE]
    count_B = td[keys.ACTION][:, 1:].sum(-1).double()
    expected_B = -torch.distributions.Binomial(29, probs=torch.tensor(RATE).double()).log_prob(count_B) / 29
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
    logits, mask = td[keys.BOUNDARY_LOGITS], td[keys.DECISION_MASK]
    (gradient,) = torch.autograd.grad(masked_mean(target(RATE)(td)[keys.LOSS_RATE], mask), logits)
    assert (gradient[mask].sign() == direction).all()
    assert (gradient[~mask] == 0).all()


@settings(deadline=None, max_examples=50)
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.05, 0.95))
def test_the_ratio_loss_is_the_published_formula(drawn, meant, rate):
    n = 1 / rate
    published = n / (n - 1) * ((1 - drawn) * (1 - meant) + (n - 1) * drawn * meant)
    got = ratio_loss(torch.tensor(drawn, dtype=torch.float64), torch.tensor(meant, dtype=torch.float64), rate)
    assert got.item() == pytest.approx(published)
    at_target = ratio_loss(*2 * [torch.tensor(rate, dtype=torch.float64)], rate)
    assert at_target.item() == pytest.approx(1.0)


def published(boundary, prob, rate):
    """H-Net's own lines (utils/train.py) over all symbols of a minibatch, given as flat lists."""
    n = 1 / rate
    true_ratio, average_prob = sum(boundary) / len(boundary), sum(prob) / len(prob)
    return ((1 - true_ratio) * (1 - average_prob) + true_ratio * average_prob * (n - 1)) * n / (n - 1)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 8), min_size=2, max_size=4), st.none() | st.integers(1, 2), st.integers(0, 1000))
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
    batch, each = (masked_mean(RatioLoss(0.2, over)(td)[keys.LOSS_RATE], mask) for over in ("batch", "sequence"))
    # With F = G the loss is 1 + n^2 / (n - 1) (F - 1 / n)^2, and first boundaries count in the batch.
    assert batch.item() == pytest.approx(1 + 6.25 * (18 / 82 - 0.2) ** 2)
    assert each.item() == pytest.approx(1 + 6.25 * 0.1**2)


def test_the_ratio_loss_is_over_something():
    with pytest.raises(ValueError, match="over = 'tokens': expected 'batch' or 'sequence'"):
        RatioLoss(RATE, over="tokens")
