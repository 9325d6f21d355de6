"""A job of a comparison: its specification, its result, and the function which a scheduler sends to another machine.

Everything here is small, picklable and loads no torch, for machines send it to one another.
"""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenv.compare.config import EvaluationRequest
from tokenv.config.schema import Config

RUNNING_FILE, STOP_FILE = "going", "stop"  # in a comparison's folder; the former is renamed to stop all jobs
SAVE_SECONDS = 60.0  # for a preempted run to save
PROGRAM = "from tokenv.compare.worker import run_received_job; run_received_job()"


@dataclass(frozen=True)
class JobSpec:
    """One run to train and evaluate.

    Attributes:
        config: configuration of the run.
        evaluation_request: what to measure of the finished run; None for nothing.
        store: folder of Sacred's runs, as seen from ``cwd``.
        cwd: folder that the comparison was started in, which every machine must see.
        work_dir: folder of the comparison in the store.
        name: name of this job's own folder in ``work_dir``.
        threads: threads of each process; 0 for torch's own choice.
        ranks: processes of the run, and GPUs if it uses any.
        trusted: what stored runs may name: see ``tokenv.core.trust.granted``.
        paths: folders where the comparison finds modules.
    """

    config: Config
    evaluation_request: EvaluationRequest | None
    store: str
    cwd: str
    work_dir: str
    name: str
    threads: int = 0
    ranks: int = 1
    trusted: bool | list[str] = False
    paths: Sequence[str] = ()

    @property
    def job_dir(self) -> Path:
        """This job's own folder, which exists as soon as the job has begun."""
        return Path(self.cwd) / self.work_dir / self.name

    def stop_requested(self) -> bool:
        """Return whether the comparison has asked all its jobs to stop."""
        try:
            return (self.job_dir.parent / STOP_FILE).exists()
        except OSError:  # the file system is not there, which the run itself reports
            return False

    def begin(self) -> JobResult | None:
        """Create the job's folder, or return why the job cannot begin on this machine.

        Raises:
            OSError: the folder cannot be created.
        """
        missing = next((path for path in (Path(self.cwd), self.job_dir.parent) if not path.is_dir()), None)
        if missing is not None:
            return JobResult(
                "failed",
                f"{socket.gethostname()} does not see {missing}: expected the current folder and the store on a file "
                "system that all machines share, under the same path",
            )
        if self.stop_requested():
            return JobResult("stopped")
        self.job_dir.mkdir(exist_ok=True)
        return None


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: ``finished``; ``locked`` by another process which works on the run; ``failed``; ``lost``, killed from
            outside, so that another try can go on from its last checkpoint; or ``stopped`` on request, and saved.
        detail: name of the finished run's folder in the store, who holds the lock, or what went wrong.
    """

    status: Literal["finished", "locked", "failed", "lost", "stopped"]
    detail: str = ""


class RunRemotely:
    """Run a job in a process of its own: a function which a scheduler can send to a worker.

    It changes neither the worker's folder nor its environment. The process ends with the worker: when its standard
    input ends, the worker has gone or wants the job to stop.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, spec: JobSpec) -> JobResult:
        """Start the process, and return its result."""
        if (ended := spec.begin()) is not None:
            return ended
        error_path = spec.job_dir / "errors"
        with error_path.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                cwd=spec.cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a signal to the worker's group reaches the worker only
            )
        with self._process as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.write(pickle.dumps(spec))
                process.stdin.flush()
            result = process.stdout.read()  # its input stays open until then
        if process.returncode == 0 and result:
            return JobResult(**json.loads(result))
        lines = [line for line in error_path.read_text(errors="replace").split("\n") if line.strip()]
        status: Literal["lost", "failed"] = "lost" if process.returncode < 0 else "failed"
        return JobResult(status, lines[-1] if lines else f"exit status {process.returncode}")

    def checkpoint(self, spec: JobSpec) -> Any:
        """Let the run save, and ask submitit to queue the job again; called before preemption and at the time limit."""
        from submitit.helpers import DelayedSubmission

        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
            until = time.monotonic() + SAVE_SECONDS
            while process.poll() is None and time.monotonic() < until:  # a signal interrupted wait(), so poll
                time.sleep(0.2)
        return DelayedSubmission(self, spec)

    __submitit_checkpoint__ = checkpoint
