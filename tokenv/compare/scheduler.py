"""Having all runs of a comparison: those that are missing are trained, some at a time, each by one comparison."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.executors import ExecutorHandle, open_executor
from tokenv.compare.job import GOING, STOP, JobResult, JobSpec
from tokenv.compare.locks import holder
from tokenv.compare.progress import ProgressDisplay
from tokenv.compare.run_evaluation import load_evaluation
from tokenv.compare.store import find_run, read_run
from tokenv.core.errors import RunFailedError, UserError
from tokenv.storage import processes, trust
from tokenv.storage.trust import read_json

WORK_DIR = ".compare-"
MAX_ATTEMPTS = 3  # of a run whose processes are killed
LATE_SECONDS = 90.0  # after which every machine sees what another has written


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
        FailedError: the executor is gone.
        KeyboardInterrupt: Ctrl-C; the runs that were going on have saved.
        UserError: the executor cannot be had.
    """
    store = Path(options.store)
    shown = ProgressDisplay(tasks, store, progress)
    runs = _Runs(tasks, options, shown)
    with shown.bars:
        missing, finished = runs.find(), True
        if missing:
            with (
                _work_dir(store, whole=options.executor == "local") as work_dir,
                open_executor(options, tasks, work_dir, _threads(options.jobs)) as workshop,
            ):
                if workshop.told:
                    shown.say(workshop.told)
                finished = runs.have(missing, work_dir, workshop)
    if not finished:
        raise KeyboardInterrupt(f"stopped; the same command goes on: finished and saved runs are found in {store}")
    return runs.folders, runs.failed


class _Runs:
    """All runs, and what has become of them.

    Attributes:
        folders: of each, None while it is missing.
        failed: label to what went wrong.
    """

    def __init__(self, tasks: Sequence[Task], options: CompareOptions, shown: ProgressDisplay) -> None:
        self.folders: list[Path | None] = [None] * len(tasks)
        self.failed: dict[str, str] = {}
        self._tasks, self._options, self._shown = tasks, options, shown
        self._store = Path(options.store)
        self._tries = [0] * len(tasks)
        self._names = (str(number) for number in itertools.count())
        self._orders: dict[Future[JobResult], tuple[int, JobSpec]] = {}
        self._elsewhere: dict[int, str] = {}
        self._waited_for: set[int] = set()

    def find(self) -> list[int]:
        """Find what is there already, and say which are not."""
        for number, task in enumerate(self._tasks):
            run = find_run(task.config, self._store)
            if (
                run is not None
                and run.finished
                and (task.evaluation_request is None or load_evaluation(run.folder, task.evaluation_request))
            ):
                self.folders[number] = run.folder
                self._shown.finish(number)
        return [number for number, folder in enumerate(self.folders) if folder is None]

    def have(self, numbers: Sequence[int], work_dir: Path, workshop: ExecutorHandle) -> bool:
        """See runs through; False if that was interrupted.

        Args:
            numbers: of those that are missing.
            work_dir: the comparison's own folder.
            workshop: which has them.
        """
        self._desk, self._workshop = work_dir, workshop
        try:
            for number in numbers:
                self._submit(number)
            while self._orders or self._elsewhere:
                self._look()
        except KeyboardInterrupt:
            self._stop()
            return False
        return True

    def _submit(self, number: int) -> None:
        task, options = self._tasks[number], self._options
        self._tries[number] += 1
        order = JobSpec(
            config=task.config,
            evaluation_request=task.evaluation_request,
            store=options.store,
            here=str(Path.cwd()),
            work_dir=str(self._desk),
            name=next(self._names),
            threads=self._workshop.threads,
            ranks=options.ranks,
            trusted=trust.granted(),
            paths=[str(Path(path).absolute()) for path in sys.path],
        )
        self._orders[self._workshop.executor.submit(self._workshop.job, order)] = (number, order)

    def _look(self) -> None:
        """Wait a second, or until something has happened; look around."""
        if self._orders:
            done, _ = wait(self._orders, timeout=1, return_when=FIRST_COMPLETED)
        else:
            done = set()
            time.sleep(1)
        for future in done:
            number, _ = self._orders.pop(future)
            self._settle(number, _outcome(future))
        for number, order in self._orders.values():
            if order.job_dir.exists():
                self._shown.watch(number)
        for number in list(self._elsewhere):
            self._poll_external(number)

    def _settle(self, number: int, outcome: JobResult) -> None:
        task = self._tasks[number]
        if outcome.lost:
            self._check()
        folder = self._store / outcome.run
        if outcome.run and not _seen(folder):
            why = "is said to be finished, but cannot be read here: expected the same version of tokenv on all machines"
            outcome = JobResult(failed=f"{folder} {why}")
        if outcome.run:
            self.folders[number] = folder
            self._shown.finish(number)
            self._shown.say(f"{task.label}: {folder} ({self._shown.so_far})")
        elif outcome.elsewhere:
            self._shown.leave(number)
            self._elsewhere[number] = outcome.elsewhere
        elif outcome.lost and self._tries[number] < MAX_ATTEMPTS:
            self._shown.leave(number)
            self._shown.say(f"{task.label} was lost ({outcome.failed}): it is gone on with")
            self._submit(number)
        else:
            why = outcome.failed or "it was stopped, but not by this comparison"
            self.failed[task.label] = f"{why}, {MAX_ATTEMPTS} times in a row" if outcome.lost else why
            self._shown.finish(number)
            self._shown.say(f"{task.label} failed: {self.failed[task.label]}")

    def _check(self) -> None:
        """Whether there is somebody left to go on with what was lost.

        Raises:
            FailedError: there is not.
        """
        try:
            self._workshop.check()
        except UserError as error:
            raise RunFailedError(
                f"{error}; the same command goes on: finished and saved runs are found in {self._store}"
            ) from error

    def _poll_external(self, number: int) -> None:
        """Once nobody else is at a run, it is finished, or there is reason to go on with it."""
        task = self._tasks[number]
        if holder(task.config, self._store) is None:
            del self._elsewhere[number]
            self._tries[number] -= 1
            self._submit(number)
        elif not self._orders:
            if number not in self._waited_for:
                self._waited_for.add(number)
                self._shown.say(f"{task.label}: waiting for {self._elsewhere[number]}")
            self._shown.watch(number, ", elsewhere")

    def _stop(self) -> None:
        """Tell all jobs to stop, and wait for those that have begun."""
        with suppress(OSError):  # the store is gone, which ends them, too
            (self._desk / GOING).rename(self._desk / STOP)  # which a full disk lets one do
        begun = [future for future, (_, order) in self._orders.items() if order.job_dir.exists()]
        for future in self._orders.keys() - begun:
            future.cancel()
        if begun:
            self._shown.say(f"stopping: {len(begun)} runs save; Ctrl-C once more leaves them alone")
        wait(begun)


def _outcome(future: Future[JobResult]) -> JobResult:
    """What has become of an order; who had it may be gone."""
    try:
        return future.result()
    except CancelledError:
        return JobResult(failed="the scheduler has given it up", lost=True)
    except Exception as error:  # a scheduler's own, of which each has others
        return JobResult(failed=f"{type(error).__name__}: {str(error).strip()}".splitlines()[-1], lost=True)


def _seen(folder: Path) -> bool:
    """Whether this machine sees that a run is finished, which may be late where another has written that."""
    until = time.monotonic() + LATE_SECONDS
    while True:
        run = read_run(folder)
        if run is not None and run.finished:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(1)


@contextmanager
def _work_dir(store: Path, *, whole: bool) -> Iterator[Path]:
    """A folder of the comparison's own in the store, where all machines see it.

    Args:
        store: where runs are kept.
        whole: whether all that the comparison starts ends with it.

    Raises:
        UserError: it cannot be made.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        _clear(store)
        work_dir = Path(tempfile.mkdtemp(dir=store, prefix=WORK_DIR))
        (work_dir / GOING).write_text(json.dumps(processes.describe()) if whole else "")
    except OSError as error:
        raise UserError(f"{store}: cannot be written to ({error.strerror}): expected a folder for runs") from error
    try:
        yield work_dir
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _clear(store: Path) -> None:
    """Delete what comparisons that were killed have left, unless what they had started may go on."""
    for path in store.glob(f"{WORK_DIR}*/{GOING}"):
        with suppress(OSError, ValueError):
            told = read_json(path)
            if processes.alive_pids(told) == []:
                shutil.rmtree(path.parent, ignore_errors=True)


def _threads(jobs: int) -> int:
    """Of each of some processes, which share the cores instead of using all; 0 where the user has decided."""
    return 0 if jobs == 1 or "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // jobs)
