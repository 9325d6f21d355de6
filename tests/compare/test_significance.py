"""The comparison's statistics against what they should be worth."""

import itertools
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from comparisons import a_method
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import tokenv
from tokenv.compare.comparison import build_comparison
from tokenv.compare.score_statistics import (
    Difference,
    Scores,
    adjust_p_values,
    apply_holm,
    compare_scores,
    describe_difference,
    estimate_difference,
)
from tokenv.core.clustered_errors import clustered_degrees_of_freedom, clustered_standard_error

GENERATOR = np.random.default_rng(0)


def test_the_documents_error_is_the_bootstraps():
    document_B = np.repeat(np.arange(40), GENERATOR.integers(1, 6, 40))
    value_B = GENERATOR.normal(size=40)[document_B] + 0.3 * GENERATOR.normal(size=len(document_B))
    total_C = np.bincount(document_B, value_B)
    count_C = np.bincount(document_B)
    drawn = stats.bootstrap(
        (total_C, count_C), lambda t, c, axis: t.sum(axis) / c.sum(axis), paired=True, rng=0
    )
    assert clustered_standard_error(value_B, document_B) == pytest.approx(
        drawn.standard_error, rel=0.1
    )
    assert (
        clustered_standard_error(value_B, np.arange(len(value_B))) < drawn.standard_error
    )  # those of one are not independent
    assert math.isnan(clustered_standard_error(value_B, np.zeros(len(value_B), int)))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=12))
def test_unequal_documents_have_bell_and_mccaffreys_error_and_degrees(lengths):
    """Against the plain matrices of the quadratic form."""
    length_C = np.array(lengths)
    document_B = np.repeat(np.arange(len(length_C)), length_C)
    value_B = np.random.default_rng(len(document_B)).normal(size=len(document_B))
    share_C = length_C / length_C.sum()
    form_CB = np.zeros((len(length_C), len(document_B)))
    form_CB[document_B, np.arange(len(document_B))] = 1
    form_CB = form_CB @ (np.eye(len(document_B)) - 1 / len(document_B)) / len(document_B)
    form_CB /= np.sqrt(1 - share_C)[:, None]
    square_CC = form_CB @ form_CB.T
    assert clustered_standard_error(value_B, document_B) == pytest.approx(
        np.linalg.norm(form_CB @ value_B)
    )
    degrees = np.trace(square_CC) ** 2 / np.trace(square_CC @ square_CC)
    assert clustered_degrees_of_freedom(document_B) == pytest.approx(degrees)
    if len(set(lengths)) == 1:
        assert degrees == pytest.approx(len(lengths) - 1)


def test_the_verdict_is_the_corrected_one():
    difference = Difference(-1.0, 0.1, 0.1, -1.5, -0.5, p=0.02)
    assert difference.verdict == replace(difference, p_holm=0.04).verdict == "better"
    assert replace(difference, p_holm=0.06).verdict == "not separable"


def test_pairing_takes_out_what_all_methods_find_hard():
    document_B = np.arange(200)
    hard_B = GENERATOR.normal(2.0, 0.5, 200)
    first, second = (
        Scores(hard_B + shift + 0.01 * GENERATOR.normal(size=(3, 200)), document_B, (0, 1, 2))
        for shift in (0, 0.1)
    )
    difference = estimate_difference(first, second)
    assert difference.mean == pytest.approx(-0.1, abs=0.01)
    assert difference.document_error < 0.01 < first.document_error
    assert difference.verdict == "better"
    assert describe_difference("a", "b", difference, "bits per byte").startswith(
        "a is better than b by 0."
    )
    assert estimate_difference(second, first).verdict == "worse"


@settings(max_examples=20)
@given(st.integers(2, 5), st.integers(2, 5), st.floats(0.01, 1), st.floats(0.01, 1))
def test_other_seeds_are_compared_as_welch_does(
    first_seeds, second_seeds, first_spread, second_spread
):
    generator = np.random.default_rng(first_seeds * 7 + second_seeds)
    document_B = np.arange(4)
    # No sequence differs from another: all that is uncertain is the seed.
    first_S = generator.normal(0, first_spread, (first_seeds, 1))
    second_S = generator.normal(0.3, second_spread, (second_seeds, 1))
    difference = estimate_difference(
        Scores(first_S.repeat(4, 1), document_B, tuple(range(first_seeds))),
        Scores(second_S.repeat(4, 1), document_B, tuple(range(10, 10 + second_seeds))),
    )
    test = stats.ttest_ind(first_S[:, 0], second_S[:, 0], equal_var=False)
    assert (difference.low, difference.high) == pytest.approx(
        tuple(test.confidence_interval(0.95)), abs=1e-6
    )
    assert difference.p == pytest.approx(test.pvalue)
    assert difference.document_error == pytest.approx(0, abs=1e-12)


@settings(max_examples=20)
@given(st.integers(2, 5), st.floats(0.01, 1))
def test_the_same_seeds_are_paired(common, spread):
    generator = np.random.default_rng(common)
    hard_S = generator.normal(0, 5, (common, 1))
    first_S, second_S = hard_S + generator.normal(0, spread, (2, common, 1))
    document_B = np.arange(4)
    seeds = tuple(range(common))
    # The second method has one more seed, which nothing is compared with, and its runs in another order.
    more_S = np.concatenate([second_S[::-1], [[100.0]]])
    difference = estimate_difference(
        Scores(first_S.repeat(4, 1), document_B, seeds),
        Scores(more_S.repeat(4, 1), document_B, (*seeds[::-1], 99)),
    )
    test = stats.ttest_rel(first_S[:, 0], second_S[:, 0])
    assert (difference.low, difference.high) == pytest.approx(
        tuple(test.confidence_interval(0.95)), abs=1e-6
    )
    assert difference.p == pytest.approx(test.pvalue)


@pytest.mark.parametrize(
    ("first_seeds", "second_seeds"), [((0,), (0,)), ((0,), (0, 1, 2)), ((0,), (7, 8))]
)
def test_one_seed_never_decides(first_seeds, second_seeds):
    document_B = np.arange(100)
    first, second = (
        Scores(GENERATOR.normal(level, 1e-3, (len(seeds), 100)), document_B, seeds)
        for level, seeds in ((0, first_seeds), (1, second_seeds))
    )
    assert math.isnan(first.seed_error)
    difference = estimate_difference(first, second)
    assert math.isnan(difference.seed_error)
    assert math.isnan(difference.p)
    assert difference.high - difference.low == pytest.approx(
        2 * stats.t.ppf(0.975, 99) * difference.document_error
    )
    assert difference.low < difference.mean < difference.high < 0
    assert difference.verdict == (-difference).verdict == "not separable"
    # A seed that is easy for all must not make the method that has no other look better.
    same = second.loss_SB[0] if 0 in second_seeds else second.loss_SB.mean(0)
    assert difference.mean == pytest.approx((first.loss_SB[0] - same).mean())
    description = describe_difference("a", "b", difference, "nats per value")
    assert "one seed" in description
    assert "not separable" in description
    assert "nats per value" in description


@settings(max_examples=50)
@given(
    st.integers(2, 4), st.integers(1, 6), st.floats(0, 1), st.integers(10, 60), st.integers(0, 1000)
)
def test_more_agreeing_seeds_never_lose_a_verdict(seeds, more, spread, documents, draw):
    generator = np.random.default_rng(draw)
    document_B = np.arange(documents)
    # Seeds that are added say the same as those that were there on average: the spread only shrinks.
    few_S = generator.normal(0, spread, seeds)
    many_S = np.concatenate([few_S, np.full(more, few_S.mean())])
    gap_B = generator.normal(0.4, 1, documents)
    few, many = (
        estimate_difference(
            Scores(gap_S[:, None] + gap_B, document_B, tuple(range(len(gap_S)))),
            Scores(np.zeros((len(gap_S), documents)), document_B, tuple(range(len(gap_S)))),
        )
        for gap_S in (few_S, many_S)
    )
    assert many.mean == pytest.approx(few.mean)
    assert many.high - many.low <= (few.high - few.low) * (1 + 1e-9)
    assert few.verdict in ("not separable", many.verdict)


def test_a_seed_that_only_one_more_pair_shares_takes_no_verdict():
    document_B = np.arange(50)
    seeds = ((0, 1), (2, 3), (2, 3, 0))
    losses = [
        GENERATOR.normal(level, 0.01, (len(each), 50))
        for level, each in zip((0, 1, 1), seeds, strict=True)
    ]
    first, second, more = (
        Scores(loss, document_B, each) for loss, each in zip(losses, seeds, strict=True)
    )
    assert (
        estimate_difference(first, second).verdict
        == estimate_difference(first, more).verdict
        == "better"
    )


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holms_correction_is_the_closed_test_of_bonferronis(p):
    """An hypothesis falls where every set that it is in falls, each by its smallest p-value times its size."""
    everyone = range(len(p))
    sets = [
        chosen for size in range(1, len(p) + 1) for chosen in itertools.combinations(everyone, size)
    ]
    value = {chosen: min(1.0, len(chosen) * min(p[i] for i in chosen)) for chosen in sets}
    assert adjust_p_values(p) == pytest.approx(
        [max(value[chosen] for chosen in sets if i in chosen) for i in everyone]
    )


def test_pairs_of_one_seed_are_not_counted():
    pair = Difference(-1.0, 0.1, 0.1, -1.5, -0.5, p=0.02)
    alone = replace(pair, seed_error=math.nan, p=math.nan)
    corrected = apply_holm({"ab": pair, "ac": replace(pair, p=0.001), "bc": alone})
    assert [corrected[name].p_holm for name in ("ab", "ac")] == pytest.approx([0.02, 0.002])
    assert math.isnan(corrected["bc"].p_holm)
    assert "p = 0.001, after Holm's correction 0.002" in describe_difference(
        "a", "c", corrected["ac"], "bits per byte"
    )


def test_plain_arrays_give_the_numbers_of_a_report():
    """Scores by document with lengths, by sequence with documents, and a whole comparison agree."""
    length_C = np.array([1, 3, 2, 5, 1, 4])
    document_B = np.repeat(np.arange(len(length_C)), length_C)
    losses = {
        name: GENERATOR.normal(place, 1, (3, len(document_B))) for place, name in enumerate("abc")
    }
    measured = {}
    for name, loss_SB in losses.items():
        runs = a_method(name, seeds=3).runs
        own = [{"loss": loss_B.tolist(), "document": document_B.tolist()} for loss_B in loss_SB]
        measured[name] = [
            replace(run, evaluation=replace(run.evaluation, **each))
            for run, each in zip(runs, own, strict=True)
        ]
    report = build_comparison(measured, "", {}, reference="b")
    table = tokenv.compare_scores(
        losses, documents=[f"file {i}" for i in document_B], reference="b"
    )
    assert table.differences.keys() == report.differences.keys()
    for pair, each in table.differences.items():
        np.testing.assert_equal(vars(each), vars(report.differences[pair]))
    for method in report.methods:
        row = table.methods.loc[method.name]
        assert (row["mean"], row.seed_error, row.document_error) == (
            method.loss,
            method.seed_error,
            method.document_error,
        )
        assert row.low < row["mean"] < row.high
    assert list(table.pairs.loc[("a", "b")])[-1] == report.differences["a", "b"].verdict
    assert table.pairs.p_holm.notna().tolist() == [True, False, True]
    by_document = {
        name: np.stack([np.bincount(document_B, row) / length_C for row in loss_SB])
        for name, loss_SB in losses.items()
    }
    weighted = tokenv.compare_scores(by_document, lengths=length_C, reference="b")
    numbers = [name for name in table.pairs if name != "verdict"]
    np.testing.assert_allclose(
        weighted.pairs[numbers].astype(float), table.pairs[numbers].astype(float)
    )
    np.testing.assert_allclose(weighted.methods, table.methods)


def test_a_baseline_has_no_seeds_and_is_compared_with_methods_alone():
    losses = {name: GENERATOR.normal(0, 1, (2, 9)) for name in "ab"}
    table = compare_scores(
        losses | {"naive": np.ones(9), "zero": np.zeros(9)}, seeds={"a": (3, 4), "b": (4, 5)}
    )
    assert list(table.methods.seeds) == [2, 2, 0, 0]
    assert list(table.pairs.index) == [
        ("a", "b"),
        ("a", "naive"),
        ("a", "zero"),
        ("b", "naive"),
        ("b", "zero"),
    ]
    same = compare_scores({"a": losses["a"], "naive": np.ones((2, 9))}).differences["a", "naive"]
    assert replace(table.differences["a", "naive"], p_holm=same.p_holm) == same
    assert table.differences["a", "b"].mean == pytest.approx(
        losses["a"].mean() - losses["b"].mean()
    )


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        (
            {"a": [[1.0, 2.0]], "b": [[1.0]]},
            {},
            r"scores\['b'\] has shape \(1, 1\): expected \[seeds, 2\]",
        ),
        ({"a": [[1.0, 2.0]]}, {"documents": [0]}, "documents has 1 values: expected 2"),
        ({"a": [[1.0, 2.0]]}, {"lengths": [1, 2, 3]}, "lengths has 3 values: expected 2"),
        (
            {"a": [[1.0], [2.0]]},
            {"seeds": {"a": [1, 1]}},
            r"seeds\['a'\] = \(1, 1\): expected 2 different ones",
        ),
        ({"a": [[1.0]]}, {"reference": "b"}, "reference = 'b': expected one of a"),
    ],
)
def test_arrays_which_cannot_be_compared_are_refused(scores, options, message):
    with pytest.raises(ValueError, match=message):
        compare_scores(scores, **options)


def test_the_statistics_need_no_torch():
    program = (
        "import sys, tokenv; tokenv.compare_scores; "
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
