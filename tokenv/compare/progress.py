"""Show how far a comparison is, and how long it will take at the mean speed so far."""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tokenv.compare.config import Task
from tokenv.compare.store import same_runs
from tokenv.core.processes import Progress as RunProgress
from tokenv.core.processes import read_progress
from tokenv.plotting.characters import escape_line
from tokenv.plotting.console import console


class ProgressDisplay:
    """Progress bars of the comparison and of every run which is going on; off a terminal, one line per run.

    The comparison's bar counts training symbols, without those of before it began: of runs which had finished, or which
    go on from a checkpoint.

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
            TimeRemainingColumn(),
            console=console(),
            disable=not visible,
            speed_estimate_period=float("inf"),  # speeds are means over all of the time
        )
        self._tasks = tasks
        self._store = store
        self._finished = 0
        self._before: dict[int, int] = {}  # training symbols of runs before the comparison
        self._trained: dict[int, int] = {}  # and since
        self._bar_of: dict[int, TaskID] = {}
        self._folder_of: dict[int, Path] = {}
        self._total = sum(task.config.train.symbols for task in tasks)
        self._all = self._add_bar("comparison", tasks[0], self._total)

    def _add_bar(self, description: str, task: Task, total: int) -> TaskID:
        symbol = task.config.data.options.words.symbol
        return self.bars.add_task(description, total=total, unit=f"{symbol}s")

    def update(self, index: int, suffix: str = "", since: float = 0.0) -> None:
        """Show how far a running run is, as its progress file says.

        Args:
            index: index of its task.
            suffix: text after the run's label.
            since: time, by the file system's clock, at which its job began.
        """
        task = self._tasks[index]
        if index not in self._bar_of:
            self._bar_of[index] = self._add_bar(
                escape_line(task.label) + suffix, task, task.config.train.symbols
            )
        progress = self._read_progress(index, since)
        if progress is not None:
            # the last update goes beyond the total
            trained = min(progress.symbols, task.config.train.symbols)
            self.bars.update(self._bar_of[index], completed=trained)
            self._trained[index] = trained - self._before.setdefault(index, trained)
            self._update_all()

    def _update_all(self) -> None:
        # assigned, because rich forgets the speed where a total is updated
        self.bars.tasks[0].total = self._total - sum(self._before.values())
        self.bars.update(self._all, completed=sum(self._trained.values()))

    def _read_progress(self, index: int, since: float) -> RunProgress | None:
        if index not in self._folder_of:  # Sacred chooses its name
            running = [
                run.folder
                for run in same_runs(self._tasks[index].config, self._store)
                if run.status == "RUNNING" and run.last_heartbeat >= since
            ]
            if not running:
                return None
            self._folder_of[index] = running[0]
        return read_progress(self._folder_of[index] / "checkpoints")

    def remove(self, index: int) -> None:
        """Remove a run's bar, because nothing works on it for now."""
        self._folder_of.pop(index, None)
        if index in self._bar_of:
            self.bars.remove_task(self._bar_of.pop(index))

    def finish(self, index: int) -> None:
        """Count a run which has ended, was finished before, or has failed."""
        self._finished += 1
        symbols = self._tasks[index].config.train.symbols
        if index in self._bar_of:
            self._trained[index] = symbols - self._before.get(index, 0)
        else:
            self._before[index] = symbols
        self._update_all()
        self.remove(index)

    def print(self, line: str) -> None:
        """Print a line above the bars."""
        self.bars.console.print(escape_line(line), soft_wrap=True, markup=False)

    @property
    def summary(self) -> str:
        """Summary such as ``3 of 12 runs, about 0:20:00 left``."""
        text = f"{self._finished} of {len(self._tasks)} runs"
        seconds = self.bars.tasks[0].time_remaining
        if seconds:
            text += f", about {timedelta(seconds=round(seconds))} left"
        return text
