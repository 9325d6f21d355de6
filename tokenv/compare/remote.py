"""Run a job on another machine: the function which a scheduler sends there, and the program which it starts.

The worker itself loads nothing heavy and changes neither its folder nor its environment. The process ends with it: it
reads its standard input, and what that ends with means that the worker has gone, or wants it to stop.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from tokenv.compare.job import JobResult, JobSpec

PATIENCE = 60.0  # seconds for a run that was told to stop to save


class RemoteJob:
    """Has a run in a process of its own: a function that a scheduler can send to a worker."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, order: JobSpec) -> JobResult:
        """See to it here that a run is had."""
        if order.missing_path or order.stopped():
            return JobResult(failed=order.missing_path, stopped=not order.missing_path)
        order.job_dir.mkdir(exist_ok=True)
        errors = order.job_dir / "errors"
        with errors.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                cwd=order.here,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # what tells a whole group to end, tells the worker
            )
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(order))
                process.stdin.flush()
            told = process.stdout.read()  # its input stays open until then
        if process.returncode == 0 and told:
            return JobResult(**json.loads(told))
        lines = errors.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), f"exit status {process.returncode}")
        return JobResult(failed=last, lost=process.returncode < 0)

    def checkpoint(self, order: JobSpec) -> Any:
        """For submitit, before a job is preempted or out of time: the run saves, and another job goes on with it."""
        from submitit.helpers import DelayedSubmission

        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            until = PATIENCE
            while process.poll() is None and until > 0:  # not wait(): this interrupts one
                threading.Event().wait(0.2)
                until -= 0.2
        return DelayedSubmission(self, order)

    __submitit_checkpoint__ = checkpoint


def main() -> None:
    """Have the run that standard input tells of; tell standard output what has become of it."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    if hasattr(signal, "SIGUSR2"):  # Slurm tells every process of a job of its end; the worker heeds it
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    answer = os.dup(1)
    os.dup2(2, 1)  # what anybody prints is no answer
    order: JobSpec = pickle.load(sys.stdin.buffer)

    def heed() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=heed, daemon=True, name="heed the worker").start()
    sys.path += [path for path in order.paths if path not in sys.path]

    from tokenv.compare.worker import run_job  # torch, which takes seconds
    from tokenv.storage import trust

    trust.allow(order.trusted)
    outcome = run_job(order, lambda: stop.is_set() or order.stopped())
    if outcome.stopped and not order.stopped():
        outcome = JobResult(failed="its worker was told to end", lost=True)
    with suppress(BrokenPipeError), os.fdopen(answer, "wb") as out:
        out.write(json.dumps(asdict(outcome)).encode())
    os._exit(0)  # the thread that reads would hold up an orderly end


if __name__ == "__main__":
    main()
