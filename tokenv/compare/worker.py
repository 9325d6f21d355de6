"""Run jobs in processes of their own, forked from one that has imported everything."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import yaml

from tokenv.compare.gpus import gpus_for
from tokenv.compare.job import JobResult, JobSpec
from tokenv.compare.locks import LockHolder, RunLock, acquire_run
from tokenv.compare.store import find_run
from tokenv.core.errors import REPORT
from tokenv.storage import processes, trust

PRELOADED = ["tokenv.cli.train", "tokenv.compare.evaluate_run"]
# Where processes cannot fork, each imports everything itself.
LOST = 255  # what multiprocessing says of a process whose exit status nobody can tell it
_LOCK = threading.Lock()  # starting one process asks after all others, and each tells its exit status only once
_SAFE_PATH = "PYTHONSAFEPATH"
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class WorkerProcess:
    """A function at work in a session of its own, told to end as by SIGTERM when this process is gone.

    Args:
        function: its name, such as ``package.module:function``.
        arguments: what it is called with.
        log: file that takes what it prints, errors included.
        threads: of torch; 0 for its own choice.
        environment: what is added to this process's own.
    """

    # What this process's user trusts, where it finds modules, and its environment go along.
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
        # As ``python -m`` would find modules: in the current folder first.
        paths = list(dict.fromkeys(str(Path(path).absolute()) for path in ("", *sys.path)))
        what = (
            function,
            tuple(arguments),
            str(log),
            threads,
            trust.granted(),
            paths,
            {**os.environ, **(environment or {})},
        )
        self._process = context.Process(target=_work, args=what)
        with _LOCK, _without_current_folder():
            self._process.start()
        self._told = processes.describe(self.pid)

    @property
    def pid(self) -> int:
        """Of the process."""
        return int(self._process.pid)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit status; None if it is still at work after so many seconds.

        ``LOST`` where the process that forks all others was killed: this one may have come to its end nevertheless.
        """
        until = math.inf if seconds is None else time.monotonic() + seconds
        wait([self._process.sentinel], seconds)
        with _LOCK:
            code: int | None = self._process.exitcode
        while code == LOST and self.pid in (processes.alive_pids(self._told) or ()):
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)
        return code

    def interrupt(self) -> None:
        """Tell it to end as by Ctrl-C."""
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


def _work(
    function: str,
    arguments: Sequence[Any],
    log: str,
    threads: int,
    trusted: bool | list[str],
    paths: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    os.setsid()
    written = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    sys.path[:] = paths
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True, name="end with parent").start()
    if threads:
        torch.set_num_threads(threads)
    trust.allow(trusted)
    module, _, name = function.partition(":")
    getattr(import_module(module), name)(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


INTERRUPTED = 130  # a command's exit status after Ctrl-C or SIGTERM


class _EndedError(Exception):
    """A job did not come to its end; ``args`` holds what has become of the order."""


def run_job(order: JobSpec, stopped: Callable[[], bool] | None = None) -> JobResult:
    """Have one run, unless somebody else is at it. The current folder is the order's.

    Args:
        order: which.
        stopped: whether to stop; the order's own word if None.
    """
    store = Path(order.store)
    stopped = stopped or order.stopped
    if order.missing_path or stopped():
        return JobResult(failed=order.missing_path, stopped=not order.missing_path)
    try:
        order.job_dir.mkdir(exist_ok=True)
        claimed = acquire_run(order.config, store)
    except OSError as error:
        return JobResult(failed=f"{store}: cannot be written to ({error.strerror})")
    if isinstance(claimed, LockHolder):
        return JobResult(elsewhere=claimed.who)
    try:
        return JobResult(run=_run_claimed_job(order, claimed, stopped))
    except _EndedError as describe_exit:
        outcome: JobResult = describe_exit.args[0]
        return outcome
    finally:
        claimed.release()


def _run_claimed_job(order: JobSpec, claimed: RunLock, stopped: Callable[[], bool]) -> str:
    """Train and measure what is not yet, under a claim; the name of the run's folder."""
    store = Path(order.store)
    run = find_run(order.config, store)
    if run is None or not run.finished:
        source = order.job_dir / "run.yaml" if run is None else f"resume={run.folder}"
        (order.job_dir / "run.yaml").write_text(yaml.safe_dump(order.config.as_dict()))
        words = ["train", "with", str(source), *trust.as_cli_args(), "-F", order.store]
        _run_process(*trainer(words, order.ranks), order.ranks, order, claimed, stopped)
        run = find_run(order.config, store)
        if run is None or not run.finished:
            raise _EndedError(JobResult(failed=f"it ended, but {store} holds no finished run of its configuration"))
    if order.evaluation_request is not None:
        _run_process(
            "tokenv.compare.evaluate_run:evaluate_run",
            [run.folder, order.evaluation_request],
            1,
            order,
            claimed,
            stopped,
        )
    return run.folder.name


def trainer(words: list[str], ranks: int) -> tuple[str, list[Any]]:
    """What trains: a function's name and its arguments; of several ranks, torchrun.

    Args:
        words: what follows ``tokenv``.
        ranks: processes of the run, all on this machine.
    """
    if ranks == 1:
        return "tokenv.cli.main:main", [words]
    return "torch.distributed.run:main", [["--standalone", f"--nproc-per-node={ranks}", "-m", "tokenv", *words]]


def _run_process(
    function: str, arguments: list[Any], gpus: int, order: JobSpec, claimed: RunLock, stopped: Callable[[], bool]
) -> None:
    """See a job through, on GPUs of its own where it takes any; look once a second.

    Raises:
        _EndedError: it failed or was killed, or it was told to stop and has.
    """
    log = order.job_dir / "log"
    with gpus_for(order.config.hardware.device, gpus, claimed.refresh, stopped) as seen:
        if seen is None:
            raise _EndedError(JobResult(stopped=True))
        job = WorkerProcess(function, arguments, log, order.threads, seen)
        with suppress(OSError):  # where the store is gone, the process will tell
            claimed.tell(job.pid)
        told = False
        while (code := job.wait(1)) is None:
            if stopped():
                told = True
                job.interrupt()
                job.wait()
            claimed.refresh()
    if told:
        raise _EndedError(JobResult(stopped=True))
    if code:
        raise _EndedError(describe_exit(log, code))


def describe_exit(log: Path, code: int) -> JobResult:
    """What has become of a process that did not come to its end.

    Args:
        log: what it has printed. A killed process says nothing, and torchrun says more after what its ranks have said.
        code: its exit status; a negative one, or a rank's, is a signal.
    """
    said = log.read_text(errors="replace")
    first = re.search(
        r"exitcode +: (-\d+)", said.partition("Root Cause")[2]
    )  # it ends the other ranks, by a signal, too
    killed = int(first[1]) if first else code
    if killed < 0:
        return JobResult(failed=f"killed by signal {-killed}", lost=True)
    if code == LOST:
        return JobResult(failed="the process that forks all others was killed", lost=True)
    if code == INTERRUPTED:
        return JobResult(failed="stopped, but not by this comparison", lost=True)
    lines = [line for line in said.splitlines() if line.strip() not in ("", REPORT)]
    own = [line for line in lines if line.startswith("tokenv: ")]
    return JobResult(failed=(own or lines or [f"exit status {code}"])[-1].strip().removeprefix("tokenv: "))
