"""Every built-in estimator keeps to what ``check_estimator`` asks, and those that do not are caught."""

import inspect

import pytest
import torch

from tokenv.config import registry
from tokenv.core import keys
from tokenv.estimators.antithetic import ARM
from tokenv.estimators.base import Stage, chain
from tokenv.estimators.baselines import MovingAverage
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.estimators.surrogates import ScoreFunction
from tokenv.testing import check_estimator

EXACT = {"lambda_return": {"gamma": 1.0, "lam": 1.0}, "off_policy": {"gamma": 1.0, "horizon": None}}


def undiscounted(name):
    """Options with which an estimator should be unbiased, if it ever is."""
    takes = inspect.signature(registry.find("estimator", name, registry.ESTIMATORS)).parameters
    return EXACT.get(name, {"gamma": 1.0} if "gamma" in takes else {})


@pytest.mark.parametrize("name", registry.ESTIMATORS)
def test_every_estimator_passes(name):
    check_estimator(name, **undiscounted(name))


@pytest.mark.slow
def test_a_critic_with_samples():
    check_estimator("text_critic", windows=(0,), gamma=1.0, num_samples=2)


@pytest.mark.parametrize("name", ["rloo", "branch"])
def test_samples_that_serve_rewards_only(name):
    check_estimator(
        name, gamma=1.0, num_samples=2, **({"reward_only": True} if name == "rloo" else {})
    )


def test_what_is_declared_unbiased():
    declared = {
        name
        for name in registry.ESTIMATORS
        if registry.build(
            "estimator",
            {"name": name} | undiscounted(name),
            registry.ESTIMATORS,
            width=8,
            rate=0.2,
            seq_len=6,
        ).unbiased
    }
    biased = {
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
    assert declared == set(registry.ESTIMATORS) - biased


class Leaky(MovingAverage):
    """Updates before it subtracts."""

    def forward(self, td):
        super().forward(td.clone())
        return super().forward(td)


class Scaled(Stage):
    in_keys = out_keys = [keys.ADVANTAGE]

    def forward(self, td):
        return td.set(keys.ADVANTAGE, 1.1 * td[keys.ADVANTAGE])


class Unmasked(Stage):
    """Centres over the batch, padding included."""

    in_keys = out_keys = [keys.ADVANTAGE]
    unbiased = False

    def forward(self, td):
        symbols = td[keys.SYMBOL].sum(-1, keepdim=True)
        return td.set(keys.ADVANTAGE, td[keys.ADVANTAGE] - symbols)


class Drunk(Stage):
    in_keys = out_keys = [keys.ADVANTAGE]

    def forward(self, td):
        return td.set(keys.ADVANTAGE, td[keys.ADVANTAGE] + torch.randn(()))


class Forgetful(Stage):
    """Keeps its state where no state_dict finds it."""

    in_keys = out_keys = [keys.ADVANTAGE]

    def __init__(self):
        super().__init__()
        self.last = 0.0

    def forward(self, td):
        advantage = td[keys.ADVANTAGE]
        last = self.last
        self.last = advantage.mean().item()
        return td.set(keys.ADVANTAGE, advantage - last)


class Detached(Stage):
    in_keys = [keys.ADVANTAGE, keys.ACTION_LOG_PROB]
    out_keys = [keys.LOSS_POLICY]

    def forward(self, td):
        log_prob = td[keys.ACTION_LOG_PROB].detach().requires_grad_()
        return td.set(keys.LOSS_POLICY, -td[keys.ADVANTAGE] * log_prob)


class Everywhere(Stage):
    """Has a loss where nobody decides."""

    in_keys = [keys.ADVANTAGE, keys.BOUNDARY_LOGITS]
    out_keys = [keys.LOSS_POLICY]
    unbiased = False

    def forward(self, td):
        return td.set(keys.LOSS_POLICY, td[keys.BOUNDARY_LOGITS].square())


class CarelessARM(ARM):
    requires_factorised_policy = False


class Halting(Stage):
    in_keys = out_keys = [keys.ADVANTAGE]

    def forward(self, td):
        return td.set(keys.ADVANTAGE, td[keys.ADVANTAGE] / 0.0)


class Trailing(Stage):
    in_keys = [keys.ADVANTAGE, keys.ACTION_LOG_PROB]
    out_keys = [keys.LOSS_POLICY]

    def forward(self, td):
        return td.set(
            keys.LOSS_POLICY, (td[keys.ACTION_LOG_PROB] * td[keys.ADVANTAGE]).unsqueeze(-1)
        )


def around(*parts, **options):
    return lambda: chain(EarlyExit(), Discount(1.0), *parts, ScoreFunction(), **options)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda seq_len: around(Leaky(seq_len))(),
            "declares itself unbiased, but its expected gradient is off by",
        ),
        (around(Scaled()), r"off by 0\.1 of the true one"),
        (around(Unmasked()), "symbols in the padding move the loss"),
        (around(Drunk()), "the same noise gave two losses"),
        (lambda: around(Forgetful())(), "state_dict does not bring its state back"),
        (around(Halting()), "not finite"),
        (lambda: chain(EarlyExit(), Discount(1.0)), "writes no 'loss_policy'"),
        (lambda: chain(EarlyExit(), Discount(1.0), Detached()), "no gradient reaches the policy"),
        (lambda: chain(EarlyExit(), Discount(1.0), Everywhere()), "where decision_mask is False"),
        (
            lambda: chain(EarlyExit(), Discount(1.0), Trailing()),
            r"shape \(2, 4, 1\), the rollout \(2, 4\)",
        ),
        (
            lambda: chain(EarlyExit(), Discount(1.0), CarelessARM(), num_samples=2),
            "standard errors off",
        ),
    ],
)
def test_broken_estimators_are_caught(build, message):
    with pytest.raises(AssertionError, match=message):
        check_estimator(build)


def test_a_refusal_that_does_not_come_is_caught(monkeypatch):
    monkeypatch.setattr("tokenv.agents.learned.Learned.autoregressive", False)
    with pytest.raises(AssertionError, match="was not refused"):
        check_estimator("arm", windows=(2,))


class Indexes(Stage):
    """Takes it that there are samples."""

    in_keys = out_keys = [keys.ADVANTAGE]

    def forward(self, td):
        return td.set(keys.ADVANTAGE, td[keys.ADVANTAGE] - td[keys.ADVANTAGE][7])


def test_exceptions_of_a_stage_are_reported_with_the_action():
    message = (
        r"a rollout that it is applied to \(policy with window 0, 2 sequences\) "
        r"fails with IndexError.*, raised in the stage Indexes$"
    )
    with pytest.raises(AssertionError, match=message):
        check_estimator(around(Indexes()))


def test_unchecked_properties_are_returned():
    assert check_estimator("leave_one_out", windows=(0,), gamma=1.0) == []
    (unchecked,) = check_estimator("leave_one_out", windows=(0,), gamma=0.9)
    assert (
        unchecked
        == "window 0: the expected gradient, for discounting biases it: check it with gamma=1.0, too"
    )
    (unchecked,) = check_estimator("straight", windows=(0,))
    assert (
        unchecked
        == "window 0: the expected gradient, for it declares itself biased (a part says unbiased = False)"
    )
    assert len(check_estimator("leave_one_out", gamma=0.9)) == 2
