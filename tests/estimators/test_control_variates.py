"""REBAR and RELAX expect the true gradient: actions are enumerated, and their noise is integrated by quadrature."""

import numpy as np
import pytest
import torch
from enumeration import Enumeration, flat_gradient, rand_gives, relative_bias
from tensordict import TensorDict

from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.estimators import control_variates, recipes
from tokenv.estimators.base import chain
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.estimators.statistics import conditional_noise

WIDTH = 4


def nodes(number, steep):
    """Gauss-Legendre on (0, 1), [n] and [n]; with ``steep`` after a change of variable that is flat at both ends.

    At temperature 1 all relaxed boundaries are fractions of polynomials in the noise; z itself, which RELAX's network
    reads, grows as log u does.
    """
    x, weight = (torch.from_numpy(a) for a in np.polynomial.legendre.leggauss(number))
    x = (x + 1) / 2
    weight = weight / 2
    if steep:
        return x**4 * (35 - 84 * x + 70 * x**2 - 20 * x**3), weight * 140 * (x * (1 - x)) ** 3
    return x, weight


class Bandit:
    """Two decisions in each of two sequences, whose reward also takes fractions of boundaries; no language model.

    ``past`` is how much the first decision moves the second one's logit.
    """

    def __init__(self, past=0.0, number=10, steep=False):
        self.past = past
        self.theta_BT = torch.randn(2, 3).double().requires_grad_()
        self.linear_BTT = torch.randn(2, 3, 3).double().tril()
        self.pair_BT = torch.randn(2, 3).double()
        self.encoding_BTD = torch.randn(2, 3, WIDTH).double()
        bits = torch.tensor([0.0, 1.0]).double()
        one = torch.ones(2).double()
        x, weight = nodes(number, steep)
        at_CA = torch.cartesian_prod(bits, bits, x, x, x, x)
        self.size_C = torch.cartesian_prod(one, one, *[weight] * 4).prod(-1)

        def with_first(columns):
            first = torch.full((len(at_CA), 1), 0.5).double()
            return torch.cat([first, columns], 1)[:, None].expand(-1, 2, -1)

        self.action_CBT, self.within_CBT, self.fresh_CBT = (
            with_first(at_CA[:, i : i + 2]) for i in (0, 2, 4)
        )
        self.action_CBT = self.action_CBT.ceil()  # the first boundary is forced
        self.mask_BT = torch.tensor([False, True, True]).expand(2, 3)

    def reward(self, boundary):
        """Return a smooth function of the boundaries up to each position: [C, B, T] -> [C, B, T]."""
        before = torch.nn.functional.pad(boundary, (1, 0))[..., :-1]
        return torch.tanh(
            (self.linear_BTT @ boundary.unsqueeze(-1)).squeeze(-1)
            + self.pair_BT * boundary * before
        )

    def logits(self, action):
        earlier = torch.nn.functional.pad(action[..., 1:-1], (2, 0))
        return self.theta_BT + self.past * earlier

    def log_prob(self, action):
        logits = self.logits(action)
        return (action * logits - torch.nn.functional.softplus(logits)).where(self.mask_BT, 0.0)

    def true(self):
        action = torch.unique(self.action_CBT, dim=0)
        chance_CB = self.log_prob(action).sum(-1).exp()
        torch.testing.assert_close(chance_CB.sum(0), torch.ones(2).double())
        return flat_gradient(-(chance_CB * self.reward(action).sum(-1)).sum(), [self.theta_BT])

    def expected(self, estimator):
        estimator = estimator.double()
        action = self.action_CBT
        logits = self.logits(self.action_CBT)
        prob = logits.sigmoid().detach()
        noise = conditional_noise(prob, action, self.within_CBT)
        td = TensorDict(
            {
                keys.ACTION: action,
                keys.BOUNDARY_LOGITS: logits,
                keys.DECISION_MASK: self.mask_BT.expand(action.shape),
                keys.ENCODING: self.encoding_BTD.expand(*action.shape, -1),
            },
            batch_size=action.shape,
        )
        with rand_gives(self.fresh_CBT):
            soft = estimator.sampling.relaxations(td, self.mask_BT, noise, None)
        early = torch.randn(action.shape).double()
        relaxed = torch.stack([self.reward(s) for s in soft.unbind(-1)], -1)
        td.set(keys.LOG_LIKELIHOOD, self.reward(action) + early).set(
            keys.LOG_LIKELIHOOD_EARLY, early
        )
        # The early exit's share is a constant of each cell here, which no control variate may turn into a gradient.
        td.set(keys.LOG_LIKELIHOOD_RELAXED, relaxed + early.unsqueeze(-1))
        weight_CB = self.log_prob(action).detach().sum(-1).exp() * self.size_C[:, None]
        loss_CB = estimator(td)[keys.LOSS_POLICY].sum(-1)
        return flat_gradient((weight_CB * loss_CB).sum(), [self.theta_BT])


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.6])
def test_rebar_has_the_true_gradient(scale):
    """With any scale; ten nodes a dimension give eight digits."""
    bandit = Bandit()
    estimator = recipes.rebar(temperature=1.0)
    estimator.stages[-1].scale.data.fill_(scale)
    torch.testing.assert_close(bandit.expected(estimator), bandit.true(), rtol=1e-8, atol=1e-9)


def test_relax_has_the_true_gradient():
    """With a network which is not zero; twelve nodes per dimension give six digits."""
    bandit = Bandit(number=12, steep=True)
    part = control_variates.RELAX(WIDTH, temperature=1.0, hidden=3)
    torch.nn.init.normal_(part.network[-1].weight)
    estimate = bandit.expected(chain(EarlyExit(), Discount(1.0), part))
    torch.testing.assert_close(estimate, bandit.true(), rtol=1e-6, atol=2e-6)


def test_rebar_is_biased_for_a_policy_with_a_past():
    """The first decision changes the second one's logit by 1.5, so the policy is rejected."""
    bandit = Bandit(past=1.5)
    assert relative_bias(bandit.expected(recipes.rebar(temperature=1.0)), bandit.true()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_at_its_ends_gives_finite_gradients(dtype):
    """``torch.rand`` returns 0 once in 2^24 draws of float32."""
    enumeration = Enumeration(0)
    estimator = recipes.relax(width=8).to(dtype)
    torch.nn.init.normal_(estimator.stages[-1].network[-1].weight)
    noise = torch.tensor([[0.5, 0.0, 1.0, 0.3], [0.2, 1.0, 0.6, 0.0]], dtype=dtype)
    td = rollout(
        enumeration.lm.to(dtype),
        enumeration.agent.to(dtype),
        enumeration.symbol_BN,
        noise=noise,
        sampling=estimator.sampling,
    )
    loss = estimator(td)[keys.LOSS_POLICY].sum()
    assert flat_gradient(loss, [*estimator.parameters(), *enumeration.policy]).isfinite().all()
