"""Run a job on this machine: in processes of its own, forked from one which has imported everything."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from tokenv.compare.job import JobResult, JobSpec
from tokenv.compare.locks import LockHolder, RunLock, acquire_gpus, acquire_run
from tokenv.compare.store import find_run
from tokenv.config.hardware import set_threads
from tokenv.core import processes, trust
from tokenv.core.errors import REPORT

PRELOADED = ["tokenv.__main__", "tokenv.compare.run_evaluation"]
UNKNOWN_EXIT = 255  # exit status in multiprocessing after the fork server, which alone knew it, was killed
INTERRUPTED = 130  # exit status of a command after Ctrl-C or SIGTERM
_LOCK = threading.Lock()  # starting a process collects the exit statuses of all others, each of which is reported once
_SAFE_PATH = "PYTHONSAFEPATH"
# Where processes cannot fork, each imports everything itself.
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class WorkerProcess:
    """A process which calls a function in a session of its own, and gets SIGTERM when this process is gone.

    It inherits what this process's user trusts, its module search path and its environment.

    Args:
        function: name of the function, such as ``package.module:function``.
        arguments: arguments of the call.
        log: file for its output and errors.
        threads: threads of torch; 0 for torch's own choice.
        environment: variables to add to this process's environment.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Any],
        log: Path,
        threads: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        context: Any = multiprocessing.get_context(_METHOD)
        if _METHOD == "forkserver":
            context.set_forkserver_preload(PRELOADED)
        # As ``python -m`` would search modules: in the current folder first.
        paths = list(dict.fromkeys(str(Path(path).absolute()) for path in ("", *sys.path)))
        with _LOCK:  # another thread's start changes the environment for a moment
            variables = {**os.environ, **(environment or {})}
            call = (function, tuple(arguments), str(log), threads, trust.granted(), paths, variables)
            self._process = context.Process(target=_call_function, args=call)
            with _without_current_folder():
                self._process.start()
        self._description = processes.describe(self.pid)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return int(self._process.pid)

    def wait(self, seconds: float | None = None) -> int | None:
        """Return the exit status, or None if the process is still running after so many seconds.

        The status is ``UNKNOWN_EXIT`` where the fork server was killed: the process may have succeeded nevertheless.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        wait([self._process.sentinel], seconds)
        with _LOCK:
            status: int | None = self._process.exitcode
        while status == UNKNOWN_EXIT and self.pid in (processes.alive_pids(self._description) or ()):
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)
        return status

    def interrupt(self) -> None:
        """Send Ctrl-C's signal to the process."""
        os.kill(self.pid, signal.SIGINT)


@contextmanager
def _without_current_folder() -> Iterator[None]:
    """Start Python so that it does not look for modules in the current folder.

    The first process starts the fork server, which imports ``PRELOADED`` once for all others: a folder ``tokenv`` in
    the current folder must not stand in for the package there.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


def _call_function(
    function: str,
    arguments: Sequence[Any],
    log: str,
    threads: int,
    trusted: bool | list[str],
    paths: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:] = paths
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True, name="end with parent").start()
    if threads:
        set_threads(threads)
    trust.allow(trusted)
    resolve_name(function)(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def train_ranks(arguments: Sequence[str], ranks: int, log_dir: str) -> None:
    """Run ``tokenv`` in several processes under torchrun, and end as the rank which failed first has ended.

    The errors which that rank printed are printed last, and its exit status or signal becomes that of this process.

    Args:
        arguments: arguments of ``tokenv``.
        ranks: number of processes, all on this machine.
        log_dir: folder for the errors of every rank.

    Raises:
        SystemExit: a rank failed.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    options = ["--standalone", f"--nproc-per-node={ranks}", "--redirects=2", f"--log-dir={log_dir}"]
    try:
        run.main([*options, "-m", "tokenv", *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        (log,) = Path(log_dir).glob(f"*/attempt_0/{rank}/stderr.log")
        print(log.read_text(errors="replace"), flush=True)
        if failure.exitcode < 0:
            with suppress(OSError):  # SIGKILL has no handler
                signal.signal(-failure.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -failure.exitcode)
        raise SystemExit(failure.exitcode) from None


def run_job(spec: JobSpec, stop_requested: Callable[[], bool] | None = None) -> JobResult:
    """Train and evaluate a run in processes of this machine, unless another process works on it.

    The current folder must be the specification's.

    Args:
        spec: specification of the job.
        stop_requested: whether to stop; the specification's own word if None.
    """
    stop_requested = stop_requested or spec.stop_requested
    store = Path(spec.store)
    try:
        if (ended := spec.begin()) is not None:
            return ended
        lock = acquire_run(spec.config, store)
    except OSError as error:
        return JobResult("failed", f"{store}: cannot be written to ({error.strerror})")
    if isinstance(lock, LockHolder):
        return JobResult("locked", lock.description)
    try:
        return _run_locked_job(spec, lock, stop_requested)
    finally:
        lock.release()


def _run_locked_job(spec: JobSpec, lock: RunLock, stop_requested: Callable[[], bool]) -> JobResult:
    """Train and evaluate as far as that is not done yet, while the run is locked."""
    store = Path(spec.store)
    run = find_run(spec.config, store)
    if run is None or not run.finished:
        config = spec.job_dir / "run.yaml"
        config.write_text(yaml.safe_dump(spec.config.as_dict()))
        source = str(config) if run is None else f"resume={run.folder}"
        arguments = ["train", "with", source, *trust.as_cli_args(), "-F", spec.store]
        call = training_call(arguments, spec.ranks, spec.job_dir)
        ended = _run_process(call, spec.ranks, spec, lock, stop_requested)
        if ended is not None:
            return ended
        run = find_run(spec.config, store)
        if run is None or not run.finished:
            return JobResult("failed", f"it ended, but {store} holds no finished run of its configuration")
    if spec.evaluation_request is not None:
        call = "tokenv.compare.run_evaluation:evaluate_run", [run.folder, spec.evaluation_request]
        ended = _run_process(call, 1, spec, lock, stop_requested)
        if ended is not None:
            return ended
    return JobResult("finished", run.folder.name)


def training_call(arguments: list[str], ranks: int, log_dir: Path) -> tuple[str, list[Any]]:
    """Return the name of the function which trains, and its arguments.

    Args:
        arguments: arguments of ``tokenv``.
        ranks: processes of the run, all on this machine; several are started by torchrun.
        log_dir: folder for the errors of several ranks.
    """
    if ranks == 1:
        return "tokenv.__main__:main", [arguments]
    return "tokenv.compare.worker:train_ranks", [arguments, ranks, str(log_dir)]


def _run_process(
    call: tuple[str, list[Any]], gpus: int, spec: JobSpec, lock: RunLock, stop_requested: Callable[[], bool]
) -> JobResult | None:
    """Call a function in a process, on GPUs of its own if it uses any; None if it succeeded, or how it ended."""
    log = spec.job_dir / "log"
    with acquire_gpus(spec.config.hardware.device, gpus, lock.refresh, stop_requested) as environment:
        if environment is None:
            return JobResult("stopped")
        process = WorkerProcess(*call, log, spec.threads, environment)
        with suppress(OSError):  # the store is gone, which the process itself reports
            lock.write_owners(process.pid)
        while (status := process.wait(1)) is None:
            if stop_requested():
                process.interrupt()
                process.wait()
                return JobResult("stopped")
            lock.refresh()
    return describe_exit(log, status)


def describe_exit(log: Path, status: int) -> JobResult | None:
    """Return how a process failed; None if it succeeded.

    Args:
        log: file with its output, the last line of which says what went wrong, unless it was killed.
        status: exit status; a negative one is a signal.
    """
    if status == 0:
        return None
    if status < 0:
        return JobResult("lost", f"killed by signal {-status}")
    if status == UNKNOWN_EXIT:
        return JobResult("lost", "the process that forks all others was killed")
    if status == INTERRUPTED:
        return JobResult("lost", "stopped, but not by this comparison")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    lines = [line for line in lines if line not in ("", REPORT)]
    messages = [line for line in lines if line.startswith("tokenv: ")]
    return JobResult("failed", (messages or lines or [f"exit status {status}"])[-1].removeprefix("tokenv: "))


def run_received_job() -> None:
    """Run the job which standard input holds, and write its result to standard output: see ``RunRemotely``."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if hasattr(signal, "SIGUSR2"):  # Slurm warns every process of a job before its end; the worker handles that
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    output = os.dup(1)
    os.dup2(2, 1)  # only the result goes to standard output
    spec: JobSpec = pickle.load(sys.stdin.buffer)

    def wait_for_end_of_input() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=wait_for_end_of_input, daemon=True, name="wait for end of input").start()
    sys.path += [path for path in spec.paths if path not in sys.path]
    trust.allow(spec.trusted)
    result = run_job(spec, lambda: stop.is_set() or spec.stop_requested())
    if result.status == "stopped" and not spec.stop_requested():
        result = JobResult("lost", "its worker was stopped")
    with suppress(BrokenPipeError), os.fdopen(output, "w") as file:
        file.write(json.dumps(asdict(result)))
    os._exit(0)  # the reading thread would block an orderly exit
