"""Estimators which are declared unbiased and are not: ``check_estimator`` finds each, however rare its mistake is."""

import pytest
import torch

from tokenv.core import keys
from tokenv.estimators.base import Stage, chain
from tokenv.estimators.baselines import LeaveOneOutBatch, LeaveOneOutSamples, MovingAverage
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.estimators.statistics import leave_one_out_mean
from tokenv.estimators.surrogates import ScoreFunction
from tokenv.testing import check_estimator


class Shifted(Stage):
    """Adds ``shift`` to the credit; subclasses say by how much."""

    in_keys = [keys.ADVANTAGE, keys.ACTION, keys.DECISION_MASK]
    out_keys = [keys.ADVANTAGE]

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, td):
        self.calls += 1
        return td.set(keys.ADVANTAGE, td[keys.ADVANTAGE] + self.shift(td))


class OwnAction(Shifted):
    def shift(self, td):
        return 0.001 * td[keys.ACTION]


class OwnLateAction(Shifted):
    def shift(self, td):
        late = torch.arange(td.shape[-1]) > 6
        return 0.001 * td[keys.ACTION] * late


class OwnActionInLargeBatches(Shifted):
    def shift(self, td):
        return 0.001 * td[keys.ACTION] * (td.shape[-2] > 2)


class OwnActionOfLastText(Shifted):
    def shift(self, td):
        last = torch.arange(td.shape[-2]) == 3
        return 0.001 * td[keys.ACTION] * last[:, None]


class OwnActionWithPadding(Shifted):
    def shift(self, td):
        padded = ~td[keys.DECISION_MASK][..., 1:].all()
        return 0.001 * td[keys.ACTION] * padded


class OwnActionOfShortTexts(Shifted):
    def shift(self, td):
        short = ~td[keys.DECISION_MASK][..., 1:].all(-1, keepdim=True)
        return 0.001 * td[keys.ACTION] * short


class OwnActionInABatchOfOne(Shifted):
    def shift(self, td):
        return 0.001 * td[keys.ACTION] * (td.shape[-2] == 1)


class OwnActionInACritic(Shifted):
    """A critic whose last layer is zero until it has been trained."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def shift(self, td):
        return self.weight.detach() * td[keys.ACTION]


class OwnActionFromFifthCall(Shifted):
    def shift(self, td):
        return 0.001 * td[keys.ACTION] * (self.calls >= 5)


class EarlierAction(Shifted):
    """Is no mistake: what was decided before may be read."""

    def shift(self, td):
        return 0.1 * torch.nn.functional.pad(td[keys.ACTION][..., :-1], (1, 0))


class LaterActions(Shifted):
    def shift(self, td):
        return 0.001 * (td[keys.ACTION].sum(-1, keepdim=True) - td[keys.ACTION].cumsum(-1))


class OwnCreditInTheMean(Shifted):
    def shift(self, td):
        return -0.001 * td[keys.ADVANTAGE].mean(-2, keepdim=True)


class AllSamplesMean(Shifted):
    samples = 2

    def shift(self, td):
        return -td[keys.ADVANTAGE].mean(-3, keepdim=True)


class FirstSampleOnly(Shifted):
    """The first sample reads its own action; the others do not."""

    def shift(self, td):
        first = torch.zeros(td.shape[-3], 1, 1)
        first[0] = 0.001
        return first * td[keys.ACTION]


class ThirdSampleOnly(Shifted):
    def shift(self, td):
        third = torch.zeros(td.shape[-3], 1, 1)
        third[2] = 0.001
        return third * td[keys.ACTION]


class Scaled(Shifted):
    def shift(self, td):
        return 1e-6 * td[keys.ADVANTAGE]


class Normalised(Shifted):
    def shift(self, td):
        advantage = td[keys.ADVANTAGE]
        return advantage / advantage.std((-2, -1), keepdim=True) - advantage


class LateCredit(Shifted):
    """The first reward after the action is left out."""

    def shift(self, td):
        return torch.roll(td[keys.ADVANTAGE], -1, -1) - td[keys.ADVANTAGE]


class WrongMeanOfTexts(Shifted):
    """Leaves the next text out instead of the own one."""

    def shift(self, td):
        mean = leave_one_out_mean(td[keys.ADVANTAGE], td[keys.DECISION_MASK], -2)
        return -0.01 * mean.roll(1, -2)


class UpdatedFirst(MovingAverage):
    """Updates its average before it subtracts it."""

    def forward(self, td):
        super().forward(td.clone())
        return super().forward(td)


class UpdatedFirstLater(MovingAverage):
    """The same from its third call on."""

    def __init__(self, seq_len, decay=0.99):
        super().__init__(seq_len, decay)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, td):
        self.calls += 1
        if self.calls >= 3:
            super().forward(td.clone())
        return super().forward(td)


def one_sample(stage):
    return chain(EarlyExit(), Discount(1.0), LeaveOneOutBatch(), stage, ScoreFunction())


def with_samples(stage, count):
    return chain(
        EarlyExit(), Discount(1.0), LeaveOneOutSamples(), stage, ScoreFunction(), num_samples=count
    )


def averaged(stage):
    def build(seq_len):
        return chain(EarlyExit(), Discount(1.0), stage(seq_len), ScoreFunction())

    return build


WRONG = {
    "own action": lambda: one_sample(OwnAction()),
    "own late action": lambda: one_sample(OwnLateAction()),
    "own action in large batches": lambda: one_sample(OwnActionInLargeBatches()),
    "own action of the last text": lambda: one_sample(OwnActionOfLastText()),
    "own action with padding": lambda: one_sample(OwnActionWithPadding()),
    "own action of short texts": lambda: one_sample(OwnActionOfShortTexts()),
    "own action in a batch of one": lambda: one_sample(OwnActionInABatchOfOne()),
    "own action in a critic": lambda: one_sample(OwnActionInACritic()),
    "own action from the fifth call": lambda: one_sample(OwnActionFromFifthCall()),
    "later actions": lambda: one_sample(LaterActions()),
    "own credit in the mean": lambda: one_sample(OwnCreditInTheMean()),
    "scaled": lambda: one_sample(Scaled()),
    "normalised": lambda: one_sample(Normalised()),
    "late credit": lambda: one_sample(LateCredit()),
    "wrong mean of texts": lambda: one_sample(WrongMeanOfTexts()),
    "own action, 2 samples": lambda: with_samples(OwnAction(), 2),
    "own action, 3 samples": lambda: with_samples(OwnAction(), 3),
    "own action, 4 samples": lambda: with_samples(OwnAction(), 4),
    "own late action, 4 samples": lambda: with_samples(OwnLateAction(), 4),
    "later actions, 4 samples": lambda: with_samples(LaterActions(), 4),
    "mean of all samples, 3 samples": lambda: chain(
        EarlyExit(), Discount(1.0), AllSamplesMean(), ScoreFunction(), num_samples=3
    ),
    "first of 4 samples": lambda: with_samples(FirstSampleOnly(), 4),
    "third of 4 samples": lambda: with_samples(ThirdSampleOnly(), 4),
    "updated first": averaged(UpdatedFirst),
    "updated first, later": averaged(UpdatedFirstLater),
}


LONG = {"later actions, 4 samples", "own late action, 4 samples", "updated first, later"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in WRONG]
)
def test_a_wrong_estimator_is_reported(name):
    """Either by an error, or by what is returned as not exact."""
    try:
        report = "".join(check_estimator(WRONG[name], windows=(2,)))
    except AssertionError as error:
        report = str(error)
    assert "gradient" in report
    assert "off" in report


@pytest.mark.parametrize(
    "name",
    ["own action", "own action, 2 samples", "own action, 3 samples", "own action, 4 samples"],
)
def test_a_small_bias_is_an_error(name):
    with pytest.raises(AssertionError, match="its expected gradient is off by"):
        check_estimator(WRONG[name], windows=(2,))


@pytest.mark.parametrize("samples", [1, 3])
def test_a_baseline_may_read_earlier_actions(samples):
    right = (
        (lambda: one_sample(EarlierAction()))
        if samples == 1
        else (lambda: with_samples(EarlierAction(), samples))
    )
    assert check_estimator(right, windows=(2,)) == []


@pytest.mark.parametrize(
    "name",
    ["own action in a batch of one", "own action in a critic", "own action from the fifth call"],
)
def test_a_bias_in_one_setting_is_an_error(name):
    """The mean over draws of the other boundaries proves it where they cannot all be enumerated."""
    with pytest.raises(AssertionError, match="its expected gradient is off by about"):
        check_estimator(WRONG[name], windows=(0,))


class OfOneLength(Shifted):
    def shift(self, td):
        return torch.zeros(4)


def test_a_stage_of_one_length_is_not_refused():
    (unchecked,) = check_estimator(lambda: one_sample(OfOneLength()), windows=(0,))
    assert "it fails with RuntimeError" in unchecked


class ByTheNextTextsAction(Shifted):
    """Weighs each text by a number of mean 1: right on average over the next text's boundaries only."""

    in_keys = [*Shifted.in_keys, keys.BOUNDARY_PROB]

    def shift(self, td):
        first = td[keys.ACTION][..., 1] - td[keys.BOUNDARY_PROB][..., 1].detach()
        weight = first.roll(1, -1).unsqueeze(-1) * (td.shape[-2] > 1)
        return 0.5 * weight * td[keys.ADVANTAGE]


def test_an_estimator_which_is_right_only_on_average_is_not_refused():
    (unchecked,) = check_estimator(lambda: one_sample(ByTheNextTextsAction()), windows=(0,))
    assert "so that only the others' losses could make up for it" in unchecked
