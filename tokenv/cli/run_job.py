"""The process of a job: ``tokenv job FILE`` trains a run of a comparison and evaluates it, and holds the run's lock.

Only ``tokenv compare`` starts it. How it ended is written down beside FILE: see ``tokenv.compare.job``. Where torchrun
starts several processes, the first one holds the lock, decides what is to be trained, and evaluates it.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import Timeout
from ruamel.yaml import YAML

from tokenv.compare.job import JobResult, JobSpec
from tokenv.compare.locks import LOCK_SECONDS, acquire_gpus, run_lock
from tokenv.compare.run_evaluation import evaluate_run
from tokenv.compare.store import StoredRun, find_run, plugin_sources
from tokenv.config.hardware import set_threads
from tokenv.core import trust
from tokenv.core.atomic import write_atomically
from tokenv.core.distributed import LostRankError
from tokenv.core.processes import GracefulStop
from tokenv.data.corpus import reading_once

PLAN_FILE = "plan.json"  # in a job's folder: what the first of several processes has decided
PLAN_SECONDS = 0.1  # between two looks for it
RunCommand = Callable[[str, list[str]], Any]
DescribeError = Callable[[BaseException], str | None]


def run_job(path: Path, run_command: RunCommand, describe: DescribeError) -> None:
    """Do the job of this process.

    Args:
        path: file of the job's specification.
        run_command: function which runs a command of ``tokenv``.
        describe: function from an error to its message; None for a defect.
    """
    # Slurm warns every process of a job before its end; the first one handles that
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    spec = JobSpec.read(path)
    sys.path.insert(0, spec.cwd)
    sys.path += [folder for folder in spec.paths if folder not in sys.path]
    trust.allow(spec.trusted)
    if spec.threads:
        set_threads(spec.threads)
    with GracefulStop(at_once=True):
        do_job(spec, int(os.environ.get("RANK", "0")), run_command, describe)


def do_job(spec: JobSpec, rank: int, run_command: RunCommand, describe: DescribeError) -> None:
    """Train and evaluate a run, or train with others if this is not the first process, and write down how it ended."""
    try:
        if rank > 0:
            _follow(spec, run_command)
            return
        result = _train_and_evaluate(spec, run_command)
    except KeyboardInterrupt:
        result = JobResult("stopped")
    except LostRankError as error:
        result = JobResult("lost", str(error))
    except Exception as error:
        traceback.print_exc()
        result = JobResult("failed", describe(error) or f"{type(error).__name__}: {error}")
    with suppress(OSError):  # the store is gone, or the comparison has ended
        write_atomically(spec.result_file(rank), json.dumps(asdict(result)))


@reading_once()
def _train_and_evaluate(spec: JobSpec, run_command: RunCommand) -> JobResult:
    """Train and evaluate as far as that is not done yet, while this process holds the run's lock.

    Raises:
        KeyboardInterrupt: it was stopped; the run has saved.
    """
    store = Path(spec.store)
    try:
        lock = run_lock(spec.config, store).acquire(timeout=LOCK_SECONDS)
    except Timeout:
        return JobResult("locked")
    with (
        lock,
        acquire_gpus(spec.config.hardware.device, spec.ranks, spec.runs_per_gpu) as environment,
    ):
        os.environ.update(environment)
        if spec.stop_requested():
            return JobResult("stopped")
        sources = plugin_sources(spec.config)  # files may change while a run trains
        run = find_run(spec.config, store, sources)
        if run is None or not run.finished:
            arguments = _training_arguments(spec, run)
            plan = {"arguments": arguments, "environment": environment}
            write_atomically(spec.job_dir / PLAN_FILE, json.dumps(plan))
            run_command("train", arguments)
            run = find_run(spec.config, store, sources)
        if run is None or not run.finished:
            return JobResult(
                "failed", f"it ended, but {store} holds no finished run of its configuration"
            )
        if spec.evaluation_request is not None:
            evaluate_run(run.folder, spec.evaluation_request)
        return JobResult("finished", run.folder.name)


def _training_arguments(spec: JobSpec, run: StoredRun | None) -> list[str]:
    """Return the arguments of ``tokenv train``, which goes on with a run, or begins it for None."""
    if run is not None:
        return ["with", f"resume={run.folder}", "-F", spec.store]
    config = spec.job_dir / "run.yaml"
    YAML(typ="safe", pure=True).dump(spec.config.as_dict(), config)
    return ["with", str(config), "-F", spec.store]


def _follow(spec: JobSpec, run_command: RunCommand) -> None:
    """Train as the first process has decided; do nothing if it has ended without."""
    path = spec.job_dir / PLAN_FILE
    while not path.exists():
        if spec.result_file(0).exists():
            return
        time.sleep(PLAN_SECONDS)
    plan = trust.read_json(path)
    os.environ.update(plan["environment"])
    run_command("train", plan["arguments"])
