"""How long a comparison will take: right where runs go at a constant eta."""

import math

from hypothesis import given
from hypothesis import strategies as st

from tokenv.compare.progress import EtaEstimator, format_remaining


def test_nothing_is_known_before_something_has_been_seen() -> None:
    eta = EtaEstimator(["a", "b"], [100, 100])
    assert math.isnan(eta.remaining())
    eta.start(0, 0.0)
    eta.update(0, 0, 5.0)
    assert math.isnan(eta.remaining())
    assert format_remaining(eta.remaining()) == ""


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
    done = int(share * symbols)
    eta = EtaEstimator(["a"] * 8, [symbols] * 8)
    for number in range(at_once):
        eta.start(number, 0.0)
        eta.update(number, done, start)
        eta.update(number, done + 1, start + seconds)
    assert math.isclose(
        eta.remaining_of(0), (symbols - done - 1) * seconds, rel_tol=1e-6, abs_tol=1e-6
    )
    whole = 8 * symbols - at_once * (done + 1)
    assert math.isclose(
        eta.remaining(), max(whole * seconds / at_once, symbols * seconds), rel_tol=1e-6
    )


def test_methods_differ_and_what_is_finished_counts_as_a_whole() -> None:
    eta = EtaEstimator(["slow", "fast", "slow", "fast", "new"], [100] * 5)
    for number, took in ((0, 200.0), (1, 50.0)):
        eta.start(number, 10.0)
        eta.finish(number, 10.0 + took)  # with start, pictures and measurements
        eta.pause(number)
    assert eta.remaining_of(2) == 200
    assert eta.remaining_of(3) == 50
    assert eta.remaining_of(4) == 125  # the mean of all
    assert eta.remaining() == 375
    eta.start(2, 300.0)
    eta.start(3, 300.0)
    assert eta.remaining() == 200  # two at a time, and the longest decides
    assert format_remaining(eta.remaining()) == "about 0:03:20 left"
    for number in (2, 3, 4):
        eta.finish(number, 0.0)
    assert eta.remaining() == 0


def test_a_run_that_had_finished_before_counts_for_no_pace() -> None:
    eta = EtaEstimator(["a", "a"], [100, 100])
    eta.finish(0, 1e6)
    assert math.isnan(eta.remaining())


@given(st.floats(0.01, 10), st.floats(0, 1000), st.integers(10, 10**6), st.integers(10, 10**6))
def test_a_runs_start_and_end_take_no_longer_for_more_symbols(
    seconds: float, beside: float, some: int, many: int
) -> None:
    eta = EtaEstimator(["a", "a"], [some, many])
    eta.start(0, 0.0)
    eta.update(0, 1, seconds)
    eta.update(0, some - 1, seconds * (some - 1))
    # what it saw before its first sign of life counts as seen
    eta.finish(0, seconds * (some - 1) + beside)
    expected = seconds * many + max(beside, 0.0)
    assert math.isclose(eta.remaining_of(1), expected, rel_tol=1e-6)
