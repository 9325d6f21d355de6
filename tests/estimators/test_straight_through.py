"""Expectations of the straight-through family, for a function of one boundary which can be integrated exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.core import keys
from tokenv.estimators.straight_through import GumbelRao, GumbelSigmoid, ReinMax, StraightThrough

POINTS = 40_000  # midpoints of the noise


def gradients(part, logit, function):
    """Return the estimate of d E[f(a)] / d l for each of many evenly spaced noises."""
    noise = ((torch.arange(POINTS, dtype=torch.float64) + 0.5) / POINTS).unsqueeze(0)
    logits = torch.full_like(noise, logit, requires_grad=True)
    action = (logits > torch.logit(noise)).long()
    drawn = TensorDict({keys.BOUNDARY_LOGITS: logits, keys.ACTION: action}, batch_size=noise.shape)
    boundary = part.relax(drawn, torch.ones_like(action, dtype=torch.bool), noise)
    assert torch.equal(boundary.detach(), action.double())
    (gradient,) = torch.autograd.grad(function(boundary).sum(), logits)
    return gradient.flatten()


def linear(b):
    return 3.0 * b


def quadratic(b):
    return 2.0 * b.square() - 3.0 * b + 1.0


def true(logit, function):
    p = torch.tensor(logit, dtype=torch.float64).sigmoid()
    zero, one = function(torch.tensor([0.0, 1.0], dtype=torch.float64))
    return (p * (1 - p) * (one - zero)).item()


@pytest.mark.parametrize("logit", [-3.0, -1.4, 0.0, 2.0])
def test_plain_straight_through_is_exact_where_the_model_is_linear(logit):
    assert gradients(StraightThrough(), logit, linear).mean().item() == pytest.approx(
        true(logit, linear), rel=1e-6
    )
    p = torch.tensor(logit).sigmoid().item()
    slopes = 4 * torch.tensor([0.0, 1.0]) - 3  # of the quadratic, at 0 and at 1
    expected = p * (1 - p) * ((1 - p) * slopes[0] + p * slopes[1])
    mean = gradients(StraightThrough(), logit, quadratic).mean().item()
    assert mean == pytest.approx(expected.item(), rel=1e-3)
    assert abs(mean - true(logit, quadratic)) > 1e-3 or abs(logit) < 1e-9


@settings(max_examples=20)
@given(st.floats(-4, 4))
def test_reinmax_is_exact_where_the_model_is_quadratic(logit):
    mean = gradients(ReinMax(), logit, quadratic).mean().item()
    assert mean == pytest.approx(true(logit, quadratic), rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("logit", [-1.4, 0.3])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_gumbel_rao_has_gumbel_sigmoids_expectation_and_less_variance(logit, temperature):
    plain = gradients(GumbelSigmoid(temperature), logit, quadratic)
    smooth = gradients(GumbelRao(temperature, draws=16), logit, quadratic)
    assert smooth.mean().item() == pytest.approx(plain.mean().item(), rel=1e-2)
    assert smooth.var() < plain.var()


def test_nobody_decides_nothing_flows():
    noise = torch.rand(2, 3)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    logits = torch.zeros(2, 3, requires_grad=True)
    drawn = TensorDict(
        {keys.BOUNDARY_LOGITS: logits, keys.ACTION: torch.ones(2, 3).long()}, batch_size=(2, 3)
    )
    for part in (StraightThrough(), GumbelSigmoid(), ReinMax(), GumbelRao()):
        (gradient,) = torch.autograd.grad(part.relax(drawn, mask, noise).sum(), logits)
        assert torch.equal(gradient != 0, mask)
