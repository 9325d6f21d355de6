"""How long a comparison will take: right where runs go at a constant pace."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tokenv.compare.progress import EtaEstimator, in_words


def test_nothing_is_known_before_something_has_been_seen() -> None:
    pace = EtaEstimator(["a", "b"], [100, 100])
    assert math.isnan(pace.left())
    pace.begin(0, 0.0)
    pace.see(0, 0, 5.0)
    assert math.isnan(pace.left())
    assert in_words(pace.left()) == ""


@given(
    st.floats(0.01, 10),
    st.integers(10, 10**6),
    st.floats(0, 0.9),
    st.floats(0, 1000),
    st.integers(1, 4),
)
def test_of_runs_at_one_pace_it_is_exact(
    seconds: float, symbols: int, share: float, start: float, at_once: int
) -> None:
    """However long a run took to begin, and also where it goes on from a checkpoint."""
    seen = int(share * symbols)
    pace = EtaEstimator(["a"] * 8, [symbols] * 8)
    for number in range(at_once):
        pace.begin(number, 0.0)
        pace.see(number, seen, start)
        pace.see(number, seen + 1, start + seconds)
    assert math.isclose(pace.left_of(0), (symbols - seen - 1) * seconds, rel_tol=1e-6, abs_tol=1e-6)
    whole = 8 * symbols - at_once * (seen + 1)
    assert math.isclose(pace.left(), max(whole * seconds / at_once, symbols * seconds), rel_tol=1e-6)


def test_methods_differ_and_what_is_finished_counts_as_a_whole() -> None:
    pace = EtaEstimator(["slow", "fast", "slow", "fast", "new"], [100] * 5)
    for number, took in ((0, 200.0), (1, 50.0)):
        pace.begin(number, 10.0)
        pace.finish(number, 10.0 + took)  # with start, pictures and measurements
        pace.leave(number)
    assert pace.left_of(2) == 200
    assert pace.left_of(3) == 50
    assert pace.left_of(4) == 125  # the mean of all
    assert pace.left() == 375
    pace.begin(2, 300.0)
    pace.begin(3, 300.0)
    assert pace.left() == 200  # two at a time, and the longest decides
    assert in_words(pace.left()) == "about 0:03:20 left"
    for number in (2, 3, 4):
        pace.finish(number, 0.0)
    assert pace.left() == 0


def test_a_run_that_was_found_finished_says_nothing_of_pace() -> None:
    pace = EtaEstimator(["a", "a"], [100, 100])
    pace.finish(0, 1e6)
    assert math.isnan(pace.left())


@given(st.floats(0.01, 10), st.floats(0, 1000), st.integers(10, 10**6), st.integers(10, 10**6))
def test_a_runs_start_and_end_take_no_longer_for_more_symbols(
    seconds: float, beside: float, some: int, many: int
) -> None:
    pace = EtaEstimator(["a", "a"], [some, many])
    pace.begin(0, 0.0)
    pace.see(0, 1, seconds)
    pace.see(0, some - 1, seconds * (some - 1))
    pace.finish(0, seconds * (some - 1) + beside)  # what it saw before its first sign of life counts as seen
    expected = seconds * many + max(beside, 0.0)
    assert math.isclose(pace.left_of(1), expected, rel_tol=1e-6)
