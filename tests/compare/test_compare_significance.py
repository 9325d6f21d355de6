"""The comparison's statistics against what they should be worth."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tokenv.compare.significance import Scores, difference, document_error, sentence
from tokenv.run.evaluate import clustered_standard_error

GENERATOR = np.random.default_rng(0)


def test_the_bootstrap_agrees_with_the_clustered_formula():
    document_B = np.repeat(np.arange(40), GENERATOR.integers(1, 6, 40))
    value_B = GENERATOR.normal(size=40)[document_B] + 0.3 * GENERATOR.normal(size=len(document_B))
    formula = clustered_standard_error(torch.tensor(value_B), torch.tensor(document_B))
    assert document_error(value_B, document_B) == pytest.approx(formula, rel=0.1)
    assert document_error(value_B, np.arange(len(value_B))) < formula  # sequences of one document are not independent
    assert math.isnan(document_error(value_B, np.zeros(len(value_B), int)))


def test_pairing_takes_out_what_all_methods_find_hard():
    document_B = np.arange(200)
    hard_B = GENERATOR.normal(2.0, 0.5, 200)
    first, second = (
        Scores(hard_B + shift + 0.01 * GENERATOR.normal(size=(3, 200)), document_B, (0, 1, 2)) for shift in (0, 0.1)
    )
    found = difference(first, second)
    assert found.mean == pytest.approx(-0.1, abs=0.01)
    assert found.document_error < 0.01 < first.document_error
    assert found.verdict == "better"
    assert sentence("a", "b", found, "bits per byte").startswith("a is better than b by 0.")
    assert difference(second, first).verdict == "worse"


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 5), st.integers(2, 5), st.floats(0.01, 1), st.floats(0.01, 1))
def test_other_seeds_are_compared_as_welch_does(first_seeds, second_seeds, first_spread, second_spread):
    generator = np.random.default_rng(first_seeds * 7 + second_seeds)
    document_B = np.arange(4)
    # No sequence differs from another: all that is uncertain is the seed.
    first_S = generator.normal(0, first_spread, (first_seeds, 1))
    second_S = generator.normal(0.3, second_spread, (second_seeds, 1))
    found = difference(
        Scores(first_S.repeat(4, 1), document_B, tuple(range(first_seeds))),
        Scores(second_S.repeat(4, 1), document_B, tuple(range(10, 10 + second_seeds))),
    )
    interval = stats.ttest_ind(first_S[:, 0], second_S[:, 0], equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(interval), abs=1e-6)
    assert found.document_error == pytest.approx(0, abs=1e-12)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 5), st.floats(0.01, 1))
def test_the_same_seeds_are_paired(common, spread):
    generator = np.random.default_rng(common)
    hard_S = generator.normal(0, 5, (common, 1))
    first_S, second_S = hard_S + generator.normal(0, spread, (2, common, 1))
    document_B, seeds = np.arange(4), tuple(range(common))
    # The second method has one more seed, which nothing is compared with, and its runs in another order.
    more_S = np.concatenate([second_S[::-1], [[100.0]]])
    found = difference(
        Scores(first_S.repeat(4, 1), document_B, seeds), Scores(more_S.repeat(4, 1), document_B, (*seeds[::-1], 99))
    )
    interval = stats.ttest_rel(first_S[:, 0], second_S[:, 0]).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx(tuple(interval), abs=1e-6)


def test_one_seed_leaves_the_documents():
    document_B = np.arange(100)
    first, second = (Scores(GENERATOR.normal(size=(n, 100)), document_B, tuple(range(n))) for n in (1, 3))
    assert math.isnan(first.seed_error)
    found = difference(first, second)
    assert math.isnan(found.seed_error)
    assert found.high - found.low == pytest.approx(2 * 1.96 * found.document_error, rel=1e-3)
    assert found.low < found.mean < found.high
    # A seed that is easy for all must not make the method that has no other look better.
    assert found.mean == pytest.approx((first.loss_SB[0] - second.loss_SB[0]).mean())
    said = sentence("a", "b", found, "nats per value")
    assert "one seed" in said
    assert "not separable" in said
    assert "nats per value" in said
