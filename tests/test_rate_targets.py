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
    return TensorDict(
        {keys.BOUNDARY_LOGITS: logits, keys.ACTION: action, keys.DECISION_MASK: mask}, batch_size=(batch, steps)
    )


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


@pytest.mark.parametrize("target", [BinomialPrior, RatioLoss])
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
