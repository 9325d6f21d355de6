"""How long a comparison will take, by what its runs have taken so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean


class Pace:
    """Seconds a symbol of every method, and seconds beside, measured on runs that go on or were finished meanwhile.

    A run's seconds beside are its start and what is drawn and measured after it, which short runs mostly consist of.
    A method that has not begun is taken to be as slow as the others are in the mean; as many runs at a time as now.

    Args:
        methods: of all runs.
        symbols: that each is to see.
    """

    def __init__(self, methods: Sequence[str], symbols: Sequence[int]) -> None:
        self._methods, self._symbols = methods, symbols
        self._begun: dict[int, float] = {}
        self._first: dict[int, tuple[int, float]] = {}
        self._seen: dict[int, int] = {}
        self._pace: dict[int, float] = {}
        self._beside: dict[int, float] = {}
        self._left = set(range(len(methods)))

    def begin(self, number: int, now: float) -> None:
        """A run has begun, or goes on.

        Args:
            number: which.
            now: seconds by any clock that only goes forward.
        """
        self._begun[number] = now

    def see(self, number: int, symbols: int, seconds: float) -> None:
        """A run has seen so many symbols, by its own clock.

        Args:
            number: which.
            symbols: since it first began.
            seconds: since it began or went on.
        """
        first, since = self._first.setdefault(number, (symbols, seconds))
        if symbols > first and seconds > since:
            self._pace[number] = (seconds - since) / (symbols - first)
        self._seen[number] = symbols

    def finish(self, number: int, now: float) -> None:
        """A run has come to its end, with all that was measured after it."""
        before = self._first.get(number, (0, 0.0))[0]
        if number in self._begun and not before > self._symbols[number] // 2:
            took, trained = now - self._begun[number], max(self._symbols[number] - before, 1)
            self._pace.setdefault(number, took / trained)
            self._beside[number] = max(took - self._pace[number] * trained, 0.0)
        self._left.discard(number)

    def leave(self, number: int) -> None:
        """Nobody is at a run."""
        for of in (self._begun, self._first):
            of.pop(number, None)

    def left_of(self, number: int) -> float:
        """Seconds that a run will take from now on; NaN if nothing is known."""
        pace = self._of_its_like(self._pace, number)
        beside = 0.0 if number in self._seen else self._of_its_like(self._beside, number)
        return pace * max(self._symbols[number] - self._seen.get(number, 0), 0) + (0 if math.isnan(beside) else beside)

    def _of_its_like(self, known: Mapping[int, float], number: int) -> float:
        """What a run has been measured to have, or else its method's runs in the mean, or else all; NaN for none."""
        if number in known:
            return known[number]
        same = [value for other, value in known.items() if self._methods[other] == self._methods[number]]
        each = same or list(known.values())
        return fmean(each) if each else math.nan

    def left(self) -> float:
        """Seconds that all will take from now on; NaN if nothing is known."""
        each = {number: self.left_of(number) for number in self._left}
        at_once = max(len(self._left & self._begun.keys()), 1)
        return max([sum(each.values()) / at_once, *each.values()], default=0.0)
