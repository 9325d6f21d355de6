"""How long a comparison will take: right where all runs go at one speed."""

import math
import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tokenv.compare import progress
from tokenv.compare.progress import ProgressDisplay


class Runs:
    """Runs which train at one speed, and the display of them."""

    def __init__(self, symbols: list[int]) -> None:
        self.now = 0.0
        data = SimpleNamespace(options=SimpleNamespace(words=SimpleNamespace(symbol="byte")))
        tasks = []
        for number, count in enumerate(symbols):
            config = SimpleNamespace(data=data, train=SimpleNamespace(symbols=count))
            tasks.append(SimpleNamespace(label=f"run {number}", config=config))
        self.trained = dict.fromkeys(range(len(symbols)), 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress, "console", lambda: Console(get_time=lambda: self.now))
            self.display = ProgressDisplay(tasks, Path(), visible=False)
        self.display._read_progress = lambda index, _: SimpleNamespace(symbols=self.trained[index])

    def go_on(self, seconds: float, speed: dict[int, float]) -> None:
        self.now += seconds
        for index, own in speed.items():
            self.trained[index] += round(own * seconds)
            self.display.update(index)

    @property
    def left(self) -> timedelta | None:
        found = re.search(r", about (.*) left", self.display.summary)
        if found is None:
            return None
        hours, minutes, seconds = map(int, found[1].split(":"))
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)


def test_nothing_is_known_before_something_has_been_seen():
    runs = Runs([100, 100])
    assert runs.display.summary == "0 of 2 runs"
    runs.go_on(5, {0: 0})
    assert runs.display.summary == "0 of 2 runs"


@given(st.integers(10, 1000), st.integers(1, 50), st.integers(1, 4))
def test_of_runs_at_one_speed_it_is_exact(speed, seconds, at_once):
    """But for the first of the updates, with which the clock begins."""
    updates = 100
    symbols = 2 * updates * speed * seconds
    runs = Runs([symbols] * 8)
    for _ in range(updates):
        runs.go_on(seconds, dict.fromkeys(range(at_once), speed))
    expected = (8 / at_once - 0.5) * symbols / speed
    assert math.isclose(runs.left.total_seconds(), expected, rel_tol=0.02)


def test_a_finished_run_counts_with_what_came_after_its_training():
    runs = Runs([1000, 1000, 1000])
    runs.go_on(0, {0: 0})
    for _ in range(9):
        runs.go_on(1, {0: 100})
    runs.now += 11  # pictures and measurements
    runs.display.finish(0)
    assert runs.display.summary == "1 of 3 runs, about 0:00:43 left"  # 900 in 19 s


def test_what_a_resumed_run_had_trained_before_takes_no_time():
    runs = Runs([1000, 2000])
    runs.trained[0] = 800
    runs.go_on(0, {0: 0})
    assert runs.display.summary == "0 of 2 runs"
    for _ in range(10):
        runs.go_on(1, {0: 10})
    assert runs.display.summary == "0 of 2 runs, about 0:03:30 left"
    runs.display.finish(0)
    runs.display.update(1)
    assert runs.left > timedelta(0)  # a further run does not make the speed unknown


def test_a_run_which_had_finished_before_takes_no_time():
    runs = Runs([1000, 1000])
    runs.display.finish(0)
    assert runs.display.summary == "1 of 2 runs"
    for _ in range(3):
        runs.go_on(10, {1: 20})
    assert runs.display.summary == "1 of 2 runs, about 0:00:20 left"
    runs.display.finish(1)
    assert runs.display.summary == "2 of 2 runs"
