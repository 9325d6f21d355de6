"""A job of a comparison: its specification, its result, and the function which an executor calls anywhere.

A job is one run to train and evaluate. ``Job`` starts the processes ``python -m tokenv job FILE`` and waits for them;
``tokenv.cli.run_job`` is what they do.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenv.compare.config import EvaluationRequest
from tokenv.config.schema import Config
from tokenv.core.atomic import write_atomically
from tokenv.core.conversion import from_dict
from tokenv.core.trust import read_json

STOP_FILE = "stop"  # in a comparison's folder: all its jobs are to stop
JOB_FILE = "job.json"  # in a job's folder
POLL_SECONDS = 0.5  # between two looks at a process
SAVE_SECONDS = 60.0  # for a preempted run to save
# Lets torch count GPUs without a driver that would remember them, before a job chooses its own.
COUNT_BY_NVML = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


@dataclass(frozen=True)
class JobResult:
    """How a job ended.

    Attributes:
        status: ``finished``; ``locked`` by another process which trains the run; ``failed``; ``lost``, killed from
            outside, so that another try can go on from its last checkpoint; or ``stopped`` on request, and saved.
        detail: name of the finished run's folder in the store, or what went wrong.
    """

    status: Literal["finished", "locked", "failed", "lost", "stopped"]
    detail: str = ""


@dataclass(frozen=True)
class JobSpec:
    """One run to train and evaluate.

    Attributes:
        config: configuration of the run.
        evaluation_request: what to measure of the finished run; None for nothing.
        store: folder of Sacred's runs, as seen from ``cwd``.
        cwd: folder that the comparison was started in, which every machine must see.
        folder: the job's own folder, in that of the comparison.
        threads: threads of each process; 0 for torch's own choice.
        ranks: processes of the run, and GPUs if it uses any.
        runs_per_gpu: runs which may use a GPU at the same time.
        trusted: what stored runs may name: see ``tokenv.core.trust.granted``.
        paths: folders where the comparison finds modules.
    """

    config: Config
    evaluation_request: EvaluationRequest | None
    store: str
    cwd: str
    folder: str
    threads: int = 0
    ranks: int = 1
    runs_per_gpu: int = 1
    trusted: bool | list[str] = False
    paths: list[str] = field(default_factory=list)

    @property
    def job_dir(self) -> Path:
        """The job's own folder, which exists as soon as the job has begun."""
        return Path(self.cwd) / self.folder

    def stop_requested(self) -> bool:
        """Return whether the comparison has asked all its jobs to stop."""
        try:
            return (self.job_dir.parent / STOP_FILE).exists()
        except OSError:  # the file system is not there, which the run itself reports
            return False

    def write(self) -> Path:
        """Create the job's folder, write the specification there, and return the path of the file."""
        self.job_dir.mkdir(exist_ok=True)
        path = self.job_dir / JOB_FILE
        write_atomically(path, json.dumps(asdict(self) | {"config": self.config.as_dict()}))
        return path

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        """Read what ``write`` has written."""
        return from_dict(cls, read_json(path))

    def result_file(self, rank: int) -> Path:
        """Return the path of the result of one of the run's processes."""
        return self.job_dir / f"result-{rank}.json"


class Job:
    """A job, which an executor calls without arguments.

    Args:
        spec: specification of the job.
    """

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> JobResult:
        """Train and evaluate the run in processes of its own on this machine, and wait until they have ended."""
        spec = self.spec
        for path in (Path(spec.cwd), spec.job_dir.parent):
            if not path.is_dir():
                unseen = (
                    f"{socket.gethostname()} does not see {path}: expected the current folder and the store on a file "
                    "system that all machines share, under the same path"
                )
                return JobResult("failed", unseen)
        if spec.stop_requested():
            return JobResult("stopped")
        try:
            self._process = _start(spec)
        except OSError as error:
            return JobResult("failed", f"{spec.store}: cannot be written to ({error.strerror})")
        interrupted = False
        while self._process.poll() is None:
            if not interrupted and spec.stop_requested():
                self._process.send_signal(signal.SIGINT)
                interrupted = True
            time.sleep(POLL_SECONDS)
        return read_result(spec, self._process.returncode)

    def checkpoint(self) -> Any:
        """Let the run save, and ask submitit to queue the job again; called before preemption and at the time limit."""
        from submitit.helpers import DelayedSubmission

        process = self._process
        self._process = None
        if process is not None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(SAVE_SECONDS)
        return DelayedSubmission(self)

    __submitit_checkpoint__ = checkpoint


def _start(spec: JobSpec) -> subprocess.Popen[bytes]:
    """Start the process of a job, or torchrun, which starts several.

    Python does not look for modules in the current folder first: a folder ``tokenv`` there must not stand in for the
    package. It finds what this process finds.
    """
    command = [sys.executable, "-P", "-m", "tokenv", "job", str(spec.write())]
    if spec.ranks > 1:
        torchrun = [
            sys.executable,
            "-P",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--no-python",
        ]
        command = [*torchrun, f"--nproc-per-node={spec.ranks}", *command]
    paths = [str(Path(path).absolute()) for path in sys.path]
    environment = os.environ | COUNT_BY_NVML | {"PYTHONPATH": os.pathsep.join(paths)}
    with (spec.job_dir / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=spec.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # a signal to this process's group, such as Ctrl-C's, is not meant for the run
            start_new_session=True,
        )


def read_result(spec: JobSpec, status: int) -> JobResult:
    """Return how a job ended: what its processes have written down, or that they were killed before they could.

    Args:
        spec: specification of the job.
        status: exit status of the process; a negative one is a signal.
    """
    results = []
    for rank in range(spec.ranks):  # one that is not the first writes failures only
        with suppress(OSError, ValueError):
            results.append(from_dict(JobResult, read_json(spec.result_file(rank))))
    if spec.stop_requested() and not any(
        result.status in ("finished", "failed") for result in results
    ):
        return JobResult("stopped")
    for result in results:
        if result.status == "failed":  # the others have lost the process which failed
            return result
    if not spec.result_file(0).exists():
        detail = f"a process was killed; exit status {status}"
        if status < 0:
            detail = f"killed by signal {-status}"
        return JobResult("lost", detail)
    if results[0].status == "stopped":
        return JobResult("lost", "stopped, but not by this comparison")
    return results[0]
