"""Every built-in rate target keeps to what ``check_rate_target`` asks, and those that do not are caught."""

import pytest
import torch

from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.estimators.rate_targets import LogitPressure, RateTarget
from tokenv.testing import check_rate_target


@pytest.mark.parametrize("name", registry.RATE_TARGETS)
def test_every_rate_target_passes(name):
    check_rate_target(name)


def test_options_reach_the_rate_target():
    check_rate_target("ratio", over="sequence")


class Square(RateTarget):
    """A new one: the squared distance of the mean probability from the target."""

    in_keys = [keys.BOUNDARY_LOGITS, keys.DECISION_MASK]

    def forward(self, td):
        mask = td[keys.DECISION_MASK]
        prob = td[keys.BOUNDARY_LOGITS].sigmoid()
        mean = (prob * mask).sum() / mask.expand(prob.shape).sum()
        return td.set(keys.LOSS_RATE, (mean - self.rate).square() * mask)


def test_a_new_one_passes():
    assert check_rate_target(Square) == []


def changed(change):
    class Changed(LogitPressure):
        def forward(self, td):
            td = super().forward(td)
            return td.set(keys.LOSS_RATE, change(td[keys.LOSS_RATE], td))

    return Changed


class Silent(LogitPressure):
    def forward(self, td):
        return td


class Unmasked(LogitPressure):
    """Looks at the padding, too."""

    def forward(self, td):
        return (
            super()
            .forward(td)
            .set(
                keys.LOSS_RATE, td[keys.LOSS_RATE] + td[keys.SYMBOL].sum() * td[keys.DECISION_MASK]
            )
        )


class Forgetful(LogitPressure):
    def __init__(self, rate):
        super().__init__(rate)
        self.calls = 0

    def forward(self, td):
        self.calls += 1
        return super().forward(td).set(keys.LOSS_RATE, td[keys.LOSS_RATE] * self.calls)


class Indexes(LogitPressure):
    def forward(self, td):
        return super().forward(td[0, 0, 0])


class Constant(LogitPressure):
    """As strong near the target as far from it."""

    def forward(self, td):
        mask = td[keys.DECISION_MASK]
        mean = td[keys.BOUNDARY_PROB][mask.expand(td.shape)].mean()
        sign = 1.0 if mean > self.rate - 0.1 else -1.0
        return td.set(keys.LOSS_RATE, td[keys.BOUNDARY_LOGITS] * sign * mask)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Silent, "writes no 'loss_rate'"),
        (changed(lambda loss, td: loss.sum(-1)), "fails with|shape"),
        (changed(lambda loss, td: loss / 0), "not finite"),
        (changed(lambda loss, td: loss.detach()), "has no gradient"),
        (changed(lambda loss, td: loss * torch.rand(())), "the same rollout gave two losses"),
        (
            changed(lambda loss, td: td[keys.BOUNDARY_LOGITS] * loss.sum()),
            "not 0 where decision_mask is False",
        ),
        (Unmasked, "symbols in the padding move the loss"),
        (Forgetful, "a state_dict does not bring its state back"),
        (Indexes, r"a rollout of batch size \[2, 4\] fails with"),
        (changed(lambda loss, td: -loss), "does not push the logits down at a rate of 0.9"),
        (Constant, "pushes no less where the rate is at its target"),
    ],
)
def test_broken_rate_targets_are_caught(target, message):
    with pytest.raises(AssertionError, match=message):
        check_rate_target(target)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("ratoi", {}, r"rate_target\.name = 'ratoi' is unknown"),
        ("ratio", {"over": "all"}, "over = 'all'"),
        (lambda: 3, {}, "has built 3"),
    ],
)
def test_what_cannot_be_built_is_the_users(target, options, message):
    with pytest.raises(UserError, match=message):
        check_rate_target(target, **options)
