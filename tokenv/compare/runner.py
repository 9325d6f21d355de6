"""Having all runs of a comparison: those that are missing are trained, some at a time, each by one comparison."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path

import yaml
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tokenv.compare.assessment import assessed
from tokenv.compare.claims import Claim, Elsewhere, claim
from tokenv.compare.options import CompareOptions, Task
from tokenv.compare.process import Job
from tokenv.compare.store import find_run, same_runs
from tokenv.config.schema import Config
from tokenv.errors import REPORT
from tokenv.report.characters import plain
from tokenv.report.table import console
from tokenv.report.words import WORDS
from tokenv.run.progress import read_progress
from tokenv.storage import trust


class StoppedError(Exception):
    """The comparison was interrupted, and so was this run."""


def run_all(
    tasks: Sequence[Task], options: CompareOptions, *, progress: bool
) -> tuple[list[Path | None], dict[str, str]]:
    """Train what is missing and measure what is not yet measured.

    Args:
        tasks: all runs.
        options: of the comparison.
        progress: show bars; else one line a run.

    Returns:
        Each task's folder, None if it failed; and the failed ones' labels with what went wrong.

    Raises:
        KeyboardInterrupt: Ctrl-C; the runs that were going on have saved.
    """
    folders: list[Path | None] = [None] * len(tasks)
    failed: dict[str, str] = {}
    shown = _Progress(len(tasks), progress)
    stop = threading.Event()
    with shown.bars, tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:

        def have(numbers: Iterable[int], *, wait: bool) -> list[int]:
            """Have these tasks' runs; those that somebody else is at are given back, unless they are waited for."""
            elsewhere = []
            work = {
                pool.submit(_have, tasks[number], options, Path(scratch) / str(number), shown, stop, wait): number
                for number in numbers
            }
            for future in as_completed(work):
                number = work[future]
                try:
                    folders[number] = future.result()
                except RuntimeError as error:
                    failed[tasks[number].label] = str(error)
                    shown.say(f"{tasks[number].label} failed: {error}")
                if folders[number] is None and tasks[number].label not in failed:
                    elsewhere.append(number)
                else:
                    shown.advance()
            return elsewhere

        try:
            have(have(range(len(tasks)), wait=False), wait=True)
        except KeyboardInterrupt:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise KeyboardInterrupt(
                f"stopped; the same command goes on: finished and saved runs are found in {options.store}"
            ) from None
    return folders, failed


def _have(
    task: Task, options: CompareOptions, scratch: Path, shown: _Progress, stop: threading.Event, wait: bool
) -> Path | None:
    """One task's folder, trained and assessed, each in a process of its own; None if it is left to somebody else.

    Raises:
        RuntimeError: it failed; the message is its last line.
        StoppedError: ``stop`` was set.
    """
    store = Path(options.store)
    run = find_run(task.config, store)
    if run is not None and run.finished and (task.wishes is None or assessed(run.folder, task.wishes)):
        return run.folder
    try:
        claimed = claim(task.config, store)
        if isinstance(claimed, Elsewhere):
            if not wait:
                return None
            claimed = _claim_later(task, store, claimed, shown, stop)
    except OSError as error:
        raise RuntimeError(f"{store}: cannot be written to ({error.strerror})") from error
    try:
        return _train(task, options, scratch, shown, stop, claimed)
    finally:
        claimed.release()


def _claim_later(task: Task, store: Path, other: Elsewhere, shown: _Progress, stop: threading.Event) -> Claim:
    """Wait until nobody else is at a run; then it is finished, or there is reason to go on with it."""
    shown.say(f"{task.label}: waiting for {other.who}")
    with shown.bar(task, ", elsewhere") as bar:
        watch = _Watch(task.config, store, bar, since=0.0)
        while True:
            if stop.wait(1):
                raise StoppedError
            watch()
            claimed = claim(task.config, store)
            if isinstance(claimed, Claim):
                return claimed


def _train(
    task: Task, options: CompareOptions, scratch: Path, shown: _Progress, stop: threading.Event, claimed: Claim
) -> Path:
    """Train and assess what is not yet, under a claim."""
    store = Path(options.store)
    run = find_run(task.config, store)
    scratch.mkdir()
    threads = _threads(options.jobs)
    if run is None or not run.finished:
        source = scratch / "run.yaml" if run is None else f"resume={run.folder}"
        (scratch / "run.yaml").write_text(yaml.safe_dump(task.config.as_dict()))
        words = ["train", "with", str(source), *trust.words(), "-F", options.store]
        with shown.bar(task) as bar:
            job = Job("tokenv.cli.main:main", [words], scratch / "log", threads)
            _finish(job, scratch / "log", stop, claimed, _Watch(task.config, store, bar, time.time()))
        run = find_run(task.config, store)
        if run is None or not run.finished:
            raise RuntimeError(f"it ended, but {store} holds no finished run of its configuration")
    if task.wishes is not None:
        job = Job("tokenv.compare.assess:assess", [run.folder, task.wishes], scratch / "log", threads)
        _finish(job, scratch / "log", stop, claimed, lambda: None)
    shown.say(f"{task.label}: {run.folder}")
    return run.folder


def _finish(job: Job, log: Path, stop: threading.Event, claimed: Claim, watch: Callable[[], None]) -> None:
    """See a job through; look once a second.

    Raises:
        RuntimeError: it failed; the message is its last line.
        StoppedError: ``stop`` was set, and it was told to end as by Ctrl-C.
    """
    with suppress(OSError):  # where the store is gone, the process will tell
        claimed.tell(job.pid)
    while (code := job.wait(1)) is None:
        if stop.is_set():
            job.interrupt()
            job.wait()
        claimed.refresh()
        watch()
    if stop.is_set():
        raise StoppedError
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip() not in ("", REPORT)]
        raise RuntimeError(lines[-1].strip().removeprefix("tokenv: ") if lines else f"exit status {code}")


class _Watch:
    """Shows how far the run of a configuration is that somebody has written to since then."""

    def __init__(self, config: Config, store: Path, bar: _Bar, since: float) -> None:
        self._config, self._store, self._bar, self._since = config, store, bar, since
        self._folder: Path | None = None

    def __call__(self) -> None:
        if self._folder is None:  # what it is called is up to Sacred
            runs = same_runs(self._config, self._store, since=self._since)
            self._folder = runs[0].folder if runs else None
        told = None if self._folder is None else read_progress(self._folder / "checkpoints")
        if told is not None:
            self._bar.update(told.symbols)


def _threads(jobs: int) -> int:
    """Of each of some processes, which share the cores instead of using all; 0 where the user has decided."""
    return 0 if jobs == 1 or "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // jobs)


class _Bar:
    """A run's bar, which goes when the run does."""

    def __init__(self, bars: Progress, task: Task, where: str) -> None:
        self._bars = bars
        unit = f"{WORDS[task.config.data.kind].symbol}s"
        self._id = bars.add_task(plain(task.label) + where, total=task.config.train.symbols, unit=unit)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.remove_task(self._id)

    def update(self, seen: int) -> None:
        self._bars.update(self._id, completed=seen)


class _Progress:
    """Bars for the whole and for every run that is going on; where nobody looks, one line a run."""

    def __init__(self, runs: int, visible: bool) -> None:
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),  # a method may be called [/b]
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} {task.fields[unit]}"),
            TimeRemainingColumn(),
            console=console(),
            disable=not visible,
        )
        self._all = self.bars.add_task("comparison", total=runs, unit="runs")

    def bar(self, task: Task, where: str = "") -> _Bar:
        return _Bar(self.bars, task, where)

    def advance(self) -> None:
        self.bars.advance(self._all)

    def say(self, line: str) -> None:
        self.bars.console.print(plain(line), soft_wrap=True, markup=False)
