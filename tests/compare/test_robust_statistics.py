"""Interquartile means, probabilities of improvement and performance profiles."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from comparisons import a_comparison, a_method, rows
from hypothesis import given
from hypothesis import strategies as st
from pages import Page
from scipy import stats

from tokenv.compare.comparison import build_comparison
from tokenv.compare.report.page import comparison_page
from tokenv.compare.report.pictures import draw_profiles
from tokenv.compare.report.report_tables import print_comparison, robust_table, write_tables
from tokenv.compare.robust_statistics import (
    bootstrap_error,
    compare_robustly,
    improvement_interval,
    interquartile_mean,
    iqm_interval,
    profile_intervals,
)
from tokenv.compare.score_statistics import compare_scores

LOSSES = st.integers(3, 5).flatmap(
    lambda seeds: st.lists(
        st.lists(st.integers(0, 4), min_size=4, max_size=4), min_size=seeds, max_size=seeds
    )
)


@given(LOSSES, LOSSES)
def test_the_statistics_are_rliables_with_lower_for_higher(first, second):
    """Against scipy's functions, which rliable calls, of the negative losses."""
    x_SC = np.array(first, float)
    y_TC = np.array(second, float)
    assert interquartile_mean(x_SC) == pytest.approx(-stats.trim_mean(-x_SC, 0.25, axis=None))
    each_C = [
        0.5
        if len({*x, *y}) == 1
        else stats.mannwhitneyu(-x, -y, alternative="greater").statistic / (len(x) * len(y))
        for x, y in zip(x_SC.T, y_TC.T, strict=True)
    ]
    there, back = (
        improvement_interval(*pair, paired=False) for pair in ((x_SC, y_TC), (y_TC, x_SC))
    )
    assert there.value == pytest.approx(np.mean(each_C)) == pytest.approx(1 - back.value)
    assert 0 <= there.low <= there.value <= there.high <= 1
    threshold_P = np.array([-0.5, 1.0, 2.5, 4.0])
    share, low, high = profile_intervals(x_SC, threshold_P).T
    assert share.tolist() == pytest.approx([np.mean(-x_SC >= -tau) for tau in threshold_P])
    assert (low <= share).all()
    assert (share <= high).all()
    assert (share[0], share[-1]) == (0, 1)


def test_exact_values_by_hand():
    losses = {
        "a": np.array([[1.0, 5.0], [1.0, 5.0], [2.0, 9.0]]),
        "b": np.array([[3.0, 5.0], [1.0, 5.0], [4.0, 7.0]]),
    }
    table = compare_scores(losses).robust
    # Documents' means are 2 and 6, in all 4: a's losses are -1, -1, 0 and -1, -1, 3, b's 1, -1, 2 and -1, -1, 1.
    assert table.iqm["a"].value == pytest.approx(4 + (-1 - 1 - 1 + 0) / 4)
    assert table.iqm["b"].value == pytest.approx(4 + (-1 - 1 + 1 + 1) / 4)
    # Of nine pairs of seeds a wins 2 + 2 + 2 and ties 2 on the first document; wins 2 and ties 4 on the second.
    assert table.improvement["a", "b"].value == pytest.approx(
        ((6 + 2 / 2) / 9 + (2 + 4 / 2) / 9) / 2
    )
    assert list(table.profiles["a"][[0, -1], 0]) == pytest.approx([4 / 6, 6 / 6], abs=0.17)
    assert list(table.methods.columns) == ["iqm", "iqm_low", "iqm_high"]
    assert list(table.pairs.loc[("b", "a")]) == pytest.approx(list(table.improvement["b", "a"]))


def test_an_exceptional_seed_moves_the_mean_alone():
    generator = np.random.default_rng(0)
    hardness_C = generator.normal(2, 1, 30)
    a, b = (hardness_C + shift + 0.01 * generator.normal(size=(8, 30)) for shift in (0.0, 0.05))
    before = compare_scores({"a": a, "b": b}).robust
    a[0] += 1
    after = compare_scores({"a": a, "b": b})
    assert after.estimates["a"].mean > after.estimates["b"].mean
    iqm = after.robust.iqm
    gap, gap_before = (each["b"].value - each["a"].value for each in (iqm, before.iqm))
    assert gap == pytest.approx(gap_before, abs=0.01) == pytest.approx(0.05, abs=0.01)
    assert after.robust.improvement["a", "b"].value == pytest.approx(7 / 8, abs=0.01)


def test_a_documents_hardness_changes_nothing():
    generator = np.random.default_rng(1)
    losses = {name: generator.normal(size=(4, 12)) for name in "ab"}
    seeds = dict.fromkeys(losses, range(4))
    plain = compare_robustly(losses, seeds, 0.0)
    hard = compare_robustly(
        {name: x + 10 * np.arange(12) for name, x in losses.items()}, seeds, 0.0
    )
    assert hard.iqm["a"] == pytest.approx(plain.iqm["a"])
    assert hard.improvement["a", "b"] == pytest.approx(plain.improvement["a", "b"])
    assert hard.profiles["b"] == pytest.approx(plain.profiles["b"])


def test_the_order_of_seeds_and_columns_of_one_document_change_nothing():
    generator = np.random.default_rng(2)
    a, b = generator.normal(size=(2, 4, 6))
    one = compare_scores({"a": a, "b": b}, documents=list("uvwxyz"))
    lengths = [1, 3] * 6
    split = {"a": np.repeat(a, 2, 1), "b": np.repeat(b[::-1], 2, 1)}
    other = compare_scores(
        split, documents=list("uuvvwwxxyyzz"), lengths=lengths, seeds={"b": (3, 2, 1, 0)}
    )
    assert other.robust.improvement["a", "b"] == pytest.approx(one.robust.improvement["a", "b"])
    assert other.robust.iqm["b"] == pytest.approx(one.robust.iqm["b"])


def test_the_bootstraps_error_of_a_mean_is_the_means():
    value_S = np.random.default_rng(3).normal(size=9)
    assert bootstrap_error(np.mean, value_S) == pytest.approx(stats.sem(value_S), rel=0.07)
    win_SS = np.random.default_rng(3).normal(size=(9, 9))
    every = [win_SS[np.ix_(index, index)].mean() for index in itertools.product(range(3), repeat=3)]
    error = bootstrap_error(np.mean, win_SS[:3, :3], axes=(0, 1))
    assert error == pytest.approx(np.std(every) * math.sqrt(3 / 2), rel=0.1)


@pytest.mark.parametrize(("seeds", "kinds", "least"), [(3, 1, 0.9), (8, 1, 0.9), (8, 2, 0.87)])
def test_the_interval_of_the_interquartile_mean_covers_the_truth(seeds, kinds, least):
    generator = np.random.default_rng(4)

    def draw(seeds):
        place_S = (
            generator.normal(size=seeds) if kinds == 1 else generator.choice([0, 0, 0, 2.0], seeds)
        )
        document_C = 0.5 * generator.normal(size=12)
        return place_S[:, None] + document_C + 0.5 * generator.normal(size=(seeds, 12))

    truth = 0.0 if kinds == 1 else np.mean([interquartile_mean(draw(1000)) for _ in range(100)])
    intervals = [iqm_interval(draw(seeds)) for _ in range(100)]
    covered = np.mean([low <= truth <= high for _, low, high in intervals])
    assert least <= covered < 1


def test_fewer_than_three_seeds_have_no_interval(tmp_path, capsys):
    two = a_comparison([a_method("a", 2.0), a_method("b", 2.1)])
    assert two.robust.iqm["a"].value == pytest.approx(2.005)
    assert dict(robust_table(two).cells())["b"] == {
        "interquartile mean (95% interval)": "2.1050 (–)",
        "P(better than a)": "0.00 (–)",
    }
    print_comparison(two)
    assert "2.1050 (–)" in capsys.readouterr().out
    assert draw_profiles(two) is None
    write_tables(two, tmp_path)
    assert [row["iqm_low"] for row in rows(tmp_path / "methods.csv")] == ["nan", "nan"]


def test_the_report_shows_the_intervals_and_the_profile(tmp_path):
    generator = np.random.default_rng(5)
    measured = {}
    for name in "ab":
        own = [
            {"loss": list(generator.normal(2, 1, 6)), "document": [0, 0, 1, 2, 3, 4]}
            for _ in range(3)
        ]
        runs = zip(a_method(name, seeds=3).runs, own, strict=True)
        measured[name] = [
            replace(run, evaluation=replace(run.evaluation, **each)) for run, each in runs
        ]
    comparison = build_comparison(measured, "", {})
    profiles = draw_profiles(comparison)
    page = Page(comparison_page(comparison, {profiles.name: profiles}))
    for _, cells in robust_table(comparison).cells():
        assert set(cells.values()) - {""} <= set(page.cells)
    write_tables(comparison, tmp_path)
    (pair,) = rows(tmp_path / "pairs.csv")
    assert (
        float(pair["improvement"])
        == comparison.robust.improvement[pair["first"], pair["second"]].value
    )
    for row in rows(tmp_path / "methods.csv"):
        assert float(row["iqm_high"]) == comparison.robust.iqm[row["method"]].high
