"""Show how far a comparison is, and estimate how long it will take."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import fmean

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tokenv.compare.config import Task
from tokenv.compare.store import same_runs
from tokenv.plotting.characters import escape_line
from tokenv.plotting.console import console
from tokenv.plotting.theme import TERMINOLOGY
from tokenv.storage.progress_file import read_progress


class EtaEstimator:
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


class ProgressDisplay:
    """Bars for the whole and for every run that is going on; where nobody looks, one line a run.

    Args:
        tasks: all runs.
        store: where they are kept.
        visible: whether somebody looks.
    """

    def __init__(self, tasks: Sequence[Task], store: Path, visible: bool) -> None:
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),  # a method may be called [/b]
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
            TextColumn("{task.fields[left]}"),
            console=console(),
            disable=not visible,
        )
        self._tasks, self._store = tasks, store
        self._pace = EtaEstimator([task.method for task in tasks], [task.config.train.symbols for task in tasks])
        self._all = self.bars.add_task("comparison", total=len(tasks), unit="runs", left="")
        self._finished = 0
        self._shown: dict[int, TaskID] = {}
        self._folders: dict[int, Path] = {}

    def watch(self, number: int, where: str = "") -> None:
        """Show how far a run is that is going on; it is looked for where it is kept.

        Args:
            number: of its task.
            where: it is trained, for people.
        """
        task = self._tasks[number]
        if number not in self._shown:
            unit = f"{TERMINOLOGY[task.config.data.kind].symbol}s"
            total = task.config.train.symbols
            self._shown[number] = self.bars.add_task(escape_line(task.label) + where, total=total, unit=unit, left="")
            self._pace.begin(number, time.monotonic())
        if number not in self._folders:  # what it is called is up to Sacred
            found = [run.folder for run in same_runs(task.config, self._store) if run.is_running]
            if found:
                self._folders[number] = found[0]
        told = read_progress(self._folders[number] / "checkpoints") if number in self._folders else None
        if told is not None:
            self._pace.see(number, told.symbols, told.seconds)
            left = in_words(self._pace.left_of(number))
            self.bars.update(self._shown[number], completed=told.symbols, left=left)
        self.bars.update(self._all, left=in_words(self._pace.left()))

    def leave(self, number: int) -> None:
        """Show a run no longer: nobody is at it for now."""
        self._folders.pop(number, None)
        self._pace.leave(number)
        if number in self._shown:
            self.bars.remove_task(self._shown.pop(number))

    def finish(self, number: int) -> None:
        """A run has come to its end, or is there already, or has failed."""
        self._pace.finish(number, time.monotonic())
        self.leave(number)
        self._finished += 1
        self.bars.update(self._all, completed=self._finished, left=in_words(self._pace.left()))

    def say(self, line: str) -> None:
        """Say what has happened."""
        self.bars.console.print(escape_line(line), soft_wrap=True, markup=False)

    @property
    def so_far(self) -> str:
        """Such as ``3 of 12 runs, about 0:20:00 left``."""
        left = in_words(self._pace.left()) if self._finished < len(self._tasks) else ""
        return f"{self._finished} of {len(self._tasks)} runs" + (f", {left}" if left else "")


def in_words(seconds: float) -> str:
    """Such as ``about 0:20:00 left``; empty for NaN, which nobody knows yet."""
    return "" if math.isnan(seconds) else f"about {timedelta(seconds=round(seconds))} left"
