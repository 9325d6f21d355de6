"""Run all jobs of a comparison on one executor: submit, wait, try again, and stop on Ctrl-C."""

import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tokenv.compare.config import CompareOptions, Task
from tokenv.compare.executors import check_executor, open_executor
from tokenv.compare.job import STOP_FILE, Job, JobResult, JobSpec
from tokenv.compare.locks import is_locked
from tokenv.compare.progress import ProgressDisplay
from tokenv.compare.run_evaluation import load_evaluation
from tokenv.compare.store import find_run, read_run
from tokenv.core import trust
from tokenv.core.errors import RunFailedError, UserError

WORK_DIR = ".compare-"
COMPARISON_LOCK = "comparison.lock"  # in a comparison's folder, held as long as its process exists
GO_FILE = "go"  # renamed to stop all jobs, which is possible on a full disk
MAX_ATTEMPTS = 3  # of a run whose processes are killed
VISIBLE_SECONDS = 90.0  # after which every machine sees what another has written


def run_all(
    tasks: Sequence[Task], options: CompareOptions, *, progress: bool
) -> tuple[list[Path | None], dict[str, str]]:
    """Train and evaluate all runs which are not finished and evaluated yet.

    Args:
        tasks: all runs.
        options: options of the comparison.
        progress: show progress bars; else print one line per run.

    Returns:
        The folder of every task's run, None if it failed; and the failed tasks' labels with what went wrong.

    Raises:
        KeyboardInterrupt: Ctrl-C; the runs which were going on have saved.
        RunFailedError: the executor is gone.
        UserError: the executor cannot be used.
    """
    if not tasks:
        return [], {}
    store = Path(options.store)
    display = ProgressDisplay(tasks, store, progress)
    scheduler = _Scheduler(tasks, options, display)
    with display.bars:
        missing = scheduler.find_finished()
        if missing:
            with (
                _work_dir(store) as work_dir,
                open_executor(options, tasks, work_dir, display.print) as executor,
            ):
                interrupted = not scheduler.run(missing, work_dir, executor)
            if interrupted:
                raise KeyboardInterrupt(
                    f"stopped; the same command goes on: finished and saved runs are found in {store}"
                )
    return scheduler.folders, scheduler.failed


class _Scheduler:
    """Submits the runs of a comparison, and handles their results.

    Attributes:
        folders: folder of every task's finished run, None while it is missing.
        failed: label of a task to what went wrong.
    """

    def __init__(
        self, tasks: Sequence[Task], options: CompareOptions, display: ProgressDisplay
    ) -> None:
        self.folders: list[Path | None] = [None] * len(tasks)
        self.failed: dict[str, str] = {}
        self._tasks = tasks
        self._options = options
        self._display = display
        self._store = Path(options.store)
        self._attempts = [0] * len(tasks)
        self._job_names = (str(number) for number in itertools.count())
        self._submitted: dict[Future[JobResult], tuple[int, JobSpec]] = {}
        self._locked: set[int] = set()  # indices of tasks on which a process elsewhere works
        self._announced: set[int] = set()

    def find_finished(self) -> list[int]:
        """Find the runs which are finished and evaluated already, and return the indices of all others."""
        for index, task in enumerate(self._tasks):
            run = find_run(task.config, self._store)
            if run is None or not run.finished:
                continue
            request = task.evaluation_request
            if request is None or load_evaluation(run.folder, request) is not None:
                self.folders[index] = run.folder
                self._display.finish(index)
        return [index for index, folder in enumerate(self.folders) if folder is None]

    def run(self, indices: Sequence[int], work_dir: Path, executor: Executor) -> bool:
        """Run jobs until all have ended; False if Ctrl-C stopped them.

        Args:
            indices: indices of the missing tasks.
            work_dir: folder of this comparison.
            executor: executor of the jobs.
        """
        self._work_dir = work_dir
        self._executor = executor
        try:
            for index in indices:
                self._submit(index)
            while self._submitted or self._locked:
                self._poll()
        except KeyboardInterrupt:
            self._stop()
            return False
        except BaseException:
            self._request_stop()
            raise
        return True

    def _submit(self, index: int) -> None:
        task = self._tasks[index]
        options = self._options
        self._attempts[index] += 1
        spec = JobSpec(
            config=task.config,
            evaluation_request=task.evaluation_request,
            store=options.store,
            cwd=str(Path.cwd()),
            folder=str(self._work_dir / next(self._job_names)),
            threads=_threads(options),
            ranks=options.ranks,
            runs_per_gpu=options.runs_per_gpu,
            trusted=trust.granted(),
            paths=[str(Path(path).absolute()) for path in sys.path],
        )
        self._submitted[self._executor.submit(Job(spec))] = (index, spec)

    def _poll(self) -> None:
        """Wait until a job has ended, at most a second; handle results and update the display."""
        if self._submitted:
            done, _ = wait(self._submitted, timeout=1, return_when=FIRST_COMPLETED)
        else:
            done = set()
            time.sleep(1)
        for future in done:
            index, _ = self._submitted.pop(future)
            self._handle_result(index, _result_of(future))
        for index, spec in self._submitted.values():
            if spec.job_dir.exists():
                self._display.update(index, since=spec.job_dir.stat().st_ctime)
        for index in list(self._locked):
            self._poll_locked(index)

    def _handle_result(self, index: int, result: JobResult) -> None:
        task = self._tasks[index]
        status = result.status
        detail = result.detail
        if status == "finished":
            folder = self._store / detail
            if _becomes_visible(folder):
                self.folders[index] = folder
                self._display.finish(index)
                self._display.print(f"{task.label}: {folder} ({self._display.summary})")
                return
            detail = (
                f"{folder} is said to be finished, but cannot be read here: expected the same version of tokenv on all "
                "machines"
            )
        elif status == "locked":
            self._display.remove(index)
            self._locked.add(index)
            return
        elif status == "lost" and self._attempts[index] < MAX_ATTEMPTS:
            self._resubmit(index, detail)
            return
        elif status == "lost":
            detail += f", {MAX_ATTEMPTS} times in a row"
        self.failed[task.label] = detail
        self._display.finish(index)
        self._display.print(f"{task.label} failed: {detail}")

    def _resubmit(self, index: int, detail: str) -> None:
        """Submit a lost run again, which goes on from its last checkpoint.

        Raises:
            RunFailedError: the executor is gone.
        """
        try:
            check_executor(self._options)
            self._display.remove(index)
            self._display.print(f"{self._tasks[index].label} was lost ({detail}): it is resumed")
            self._submit(index)
        except Exception as error:  # a scheduler's own, of which each has others
            raise RunFailedError(
                f"{error}; the same command goes on: finished and saved runs are found in {self._store}"
            ) from error

    def _poll_locked(self, index: int) -> None:
        """Submit a run again as soon as no other process works on it: it is finished, or can be gone on with."""
        task = self._tasks[index]
        if not is_locked(task.config, self._store):
            self._locked.remove(index)
            self._attempts[index] -= 1
            self._submit(index)
        elif not self._submitted:
            if index not in self._announced:
                self._announced.add(index)
                self._display.print(f"{task.label}: waiting for another process, which trains it")
            self._display.update(index, ", elsewhere")

    def _stop(self) -> None:
        """Stop all jobs, and wait until those which have begun have saved."""
        self._request_stop()
        begun = [future for future, (_, spec) in self._submitted.items() if spec.job_dir.exists()]
        for future in self._submitted.keys() - begun:
            future.cancel()
        if begun:
            self._display.print(
                f"stopping: {len(begun)} runs save; Ctrl-C once more leaves them alone"
            )
        wait(begun)

    def _request_stop(self) -> None:
        with suppress(OSError):  # the store is gone, which ends them, too
            (self._work_dir / GO_FILE).rename(self._work_dir / STOP_FILE)


def _result_of(future: Future[JobResult]) -> JobResult:
    """Return a job's result; the job is lost where its worker is gone."""
    try:
        return future.result()
    except CancelledError:
        return JobResult("lost", "the scheduler has cancelled it")
    except Exception as error:  # a scheduler's own, of which each has others
        return JobResult("lost", f"{type(error).__name__}: {str(error).strip()}".splitlines()[-1])


def _becomes_visible(folder: Path) -> bool:
    """Wait until this machine sees that a run is finished, which may be late after another machine has written it."""
    until = time.monotonic() + VISIBLE_SECONDS
    while True:
        run = read_run(folder)
        if run is not None and run.finished:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(1)


@contextmanager
def _work_dir(store: Path) -> Iterator[Path]:
    """Create a folder of this comparison in the store, where all machines see it, and delete it in the end.

    Raises:
        UserError: it cannot be created.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        _delete_abandoned(store)
        work_dir = Path(tempfile.mkdtemp(dir=store, prefix=WORK_DIR))
        (work_dir / GO_FILE).touch()
        lock = FileLock(work_dir.absolute() / COMPARISON_LOCK).acquire()
    except OSError as error:
        raise UserError(
            f"{store}: cannot be written to ({error.strerror}): expected a folder for runs"
        ) from error
    try:
        with lock:
            yield work_dir
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _delete_abandoned(store: Path) -> None:
    """Delete the folders of comparisons which were killed; jobs of theirs which go on do not need them any more."""
    for path in store.glob(f"{WORK_DIR}*/{COMPARISON_LOCK}"):
        with suppress(OSError, Timeout), FileLock(path.absolute()).acquire(blocking=False):
            shutil.rmtree(path.parent, ignore_errors=True)


def _threads(options: CompareOptions) -> int:
    """Return the threads of each of several processes which share the cores; 0 where others have decided."""
    if options.executor != "local" or options.jobs == 1 or "OMP_NUM_THREADS" in os.environ:
        return 0
    return max(1, (os.cpu_count() or 1) // options.jobs)
