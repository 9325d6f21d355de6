"""How far a comparison is, and how long it will take: bars, or a line a run where nobody looks."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tokenv.compare.options import Task
from tokenv.compare.pace import Pace
from tokenv.compare.store import same_runs
from tokenv.report.characters import plain
from tokenv.report.table import console
from tokenv.report.words import WORDS
from tokenv.run.progress import read_progress


class Bars:
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
        self._pace = Pace([task.method for task in tasks], [task.config.train.symbols for task in tasks])
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
            unit = f"{WORDS[task.config.data.kind].symbol}s"
            total = task.config.train.symbols
            self._shown[number] = self.bars.add_task(plain(task.label) + where, total=total, unit=unit, left="")
            self._pace.begin(number, time.monotonic())
        if number not in self._folders:  # what it is called is up to Sacred
            found = [run.folder for run in same_runs(task.config, self._store) if run.going_on]
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
        self.bars.console.print(plain(line), soft_wrap=True, markup=False)

    @property
    def so_far(self) -> str:
        """Such as ``3 of 12 runs, about 0:20:00 left``."""
        left = in_words(self._pace.left()) if self._finished < len(self._tasks) else ""
        return f"{self._finished} of {len(self._tasks)} runs" + (f", {left}" if left else "")


def in_words(seconds: float) -> str:
    """Such as ``about 0:20:00 left``; empty for NaN, which nobody knows yet."""
    return "" if math.isnan(seconds) else f"about {timedelta(seconds=round(seconds))} left"
