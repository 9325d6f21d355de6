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
from tokenv.core.processes import Progress as RunProgress
from tokenv.core.processes import read_progress
from tokenv.plotting.characters import escape_line
from tokenv.plotting.console import console


class EtaEstimator:
    """Estimates the remaining time of all runs from those which are running or were finished meanwhile.

    Every method has its seconds per symbol and its overhead: seconds for the start and for drawing and evaluating
    after training, which short runs mostly consist of. A method which has not begun is taken to be as slow as the
    others on average, and as many runs are assumed at a time as now.

    Args:
        methods: method of every run.
        symbols: training symbols of every run.
    """

    def __init__(self, methods: Sequence[str], symbols: Sequence[int]) -> None:
        self._methods, self._symbols = methods, symbols
        self._started: dict[int, float] = {}
        self._first: dict[int, tuple[int, float]] = {}
        self._seen: dict[int, int] = {}
        self._seconds_per_symbol: dict[int, float] = {}
        self._overhead: dict[int, float] = {}
        self._unfinished = set(range(len(methods)))

    def start(self, index: int, now: float) -> None:
        """Note that a run begins or goes on.

        Args:
            index: index of the run.
            now: seconds by any monotonic clock.
        """
        self._started[index] = now

    def update(self, index: int, symbols: int, seconds: float) -> None:
        """Note how far a run is.

        Args:
            index: index of the run.
            symbols: training symbols since it first began.
            seconds: seconds since it began or was resumed, by its own clock.
        """
        first, since = self._first.setdefault(index, (symbols, seconds))
        if symbols > first and seconds > since:
            self._seconds_per_symbol[index] = (seconds - since) / (symbols - first)
        self._seen[index] = symbols

    def finish(self, index: int, now: float) -> None:
        """Note that a run has ended, and everything after training, too."""
        before = self._first.get(index, (0, 0.0))[0]
        if index in self._started and before <= self._symbols[index] // 2:
            seconds, trained = now - self._started[index], max(self._symbols[index] - before, 1)
            self._seconds_per_symbol.setdefault(index, seconds / trained)
            self._overhead[index] = max(seconds - self._seconds_per_symbol[index] * trained, 0.0)
        self._unfinished.discard(index)

    def pause(self, index: int) -> None:
        """Note that no process works on a run."""
        self._started.pop(index, None)
        self._first.pop(index, None)

    def remaining_of(self, index: int) -> float:
        """Return the remaining seconds of a run; NaN if nothing is known yet."""
        overhead = 0.0 if index in self._seen else self._measured(self._overhead, index)
        symbols = max(self._symbols[index] - self._seen.get(index, 0), 0)
        training = self._measured(self._seconds_per_symbol, index) * symbols
        return training + (0.0 if math.isnan(overhead) else overhead)

    def _measured(self, values: Mapping[int, float], index: int) -> float:
        """Return a run's own value, or else the mean of its method's runs, or else of all runs; NaN for none."""
        if index in values:
            return values[index]
        same = [
            value for other, value in values.items() if self._methods[other] == self._methods[index]
        ]
        known = same or list(values.values())
        return fmean(known) if known else math.nan

    def remaining(self) -> float:
        """Return the remaining seconds of all runs; NaN if nothing is known yet."""
        each = [self.remaining_of(index) for index in sorted(self._unfinished)]
        at_once = max(len(self._unfinished & self._started.keys()), 1)
        return max([sum(each) / at_once, *each], default=0.0)


class ProgressDisplay:
    """Progress bars of the comparison and of every run which is going on; off a terminal, one line per run.

    Args:
        tasks: all runs.
        store: folder where they are stored.
        visible: whether to draw bars.
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
        self._eta = EtaEstimator(
            [task.method for task in tasks], [task.config.train.symbols for task in tasks]
        )
        self._all = self.bars.add_task("comparison", total=len(tasks), unit="runs", left="")
        self._finished = 0
        self._bar_of: dict[int, TaskID] = {}
        self._folder_of: dict[int, Path] = {}

    def update(self, index: int, suffix: str = "", since: float = 0.0) -> None:
        """Show how far a running run is, as its progress file says.

        Args:
            index: index of its task.
            suffix: text after the run's label.
            since: time, by the file system's clock, at which its job began.
        """
        task = self._tasks[index]
        if index not in self._bar_of:
            unit = f"{task.config.data.options.words.symbol}s"
            total = task.config.train.symbols
            self._bar_of[index] = self.bars.add_task(
                escape_line(task.label) + suffix, total=total, unit=unit, left=""
            )
            self._eta.start(index, time.monotonic())
        progress = self._read_progress(index, since)
        if progress is not None:
            self._eta.update(index, progress.symbols, progress.seconds)
            left = format_remaining(self._eta.remaining_of(index))
            self.bars.update(self._bar_of[index], completed=progress.symbols, left=left)
        self.bars.update(self._all, left=format_remaining(self._eta.remaining()))

    def _read_progress(self, index: int, since: float) -> RunProgress | None:
        if index not in self._folder_of:  # Sacred chooses its name
            for run in same_runs(self._tasks[index].config, self._store):
                if run.status == "RUNNING" and run.last_heartbeat >= since:
                    self._folder_of[index] = run.folder
                    break
        if index not in self._folder_of:
            return None
        return read_progress(self._folder_of[index] / "checkpoints")

    def remove(self, index: int) -> None:
        """Remove a run's bar, because nothing works on it for now."""
        self._folder_of.pop(index, None)
        self._eta.pause(index)
        if index in self._bar_of:
            self.bars.remove_task(self._bar_of.pop(index))

    def finish(self, index: int) -> None:
        """Count a run which has ended, was finished before, or has failed."""
        self._eta.finish(index, time.monotonic())
        self.remove(index)
        self._finished += 1
        self.bars.update(
            self._all, completed=self._finished, left=format_remaining(self._eta.remaining())
        )

    def print(self, line: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(escape_line(line), soft_wrap=True, markup=False)

    @property
    def summary(self) -> str:
        """Summary such as ``3 of 12 runs, about 0:20:00 left``."""
        left = format_remaining(self._eta.remaining()) if self._finished < len(self._tasks) else ""
        return f"{self._finished} of {len(self._tasks)} runs" + (f", {left}" if left else "")


def format_remaining(seconds: float) -> str:
    """Return text such as ``about 0:20:00 left``; empty for NaN."""
    return "" if math.isnan(seconds) else f"about {timedelta(seconds=round(seconds))} left"
