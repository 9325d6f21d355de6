"""What a job is told, and what it answers: small, picklable and without torch, for machines pass them around."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenv.compare.evaluation_request import EvaluationRequest
from tokenv.config.schema import Config

GOING, STOP = "going", "stop"


@dataclass(frozen=True)
class JobSpec:
    """One run that is to be had.

    Attributes:
        config: of the run.
        evaluation_request: what is to be measured of it; None for nothing.
        store: folder of Sacred runs, as seen from ``here``.
        here: the folder that the comparison was started in, which every machine must see.
        work_dir: the comparison's folder in the store, with its word to stop.
        name: of this job's own folder on the desk.
        threads: of each process; 0 for torch's own choice.
        ranks: processes, and GPUs, of one run.
        trusted: what stored runs may name: see ``tokenv.storage.trust.granted``.
        paths: where the comparison finds modules.
    """

    config: Config
    evaluation_request: EvaluationRequest | None
    store: str
    here: str
    work_dir: str
    name: str
    threads: int = 0
    ranks: int = 1
    trusted: bool | list[str] = False
    paths: Sequence[str] = ()

    @property
    def job_dir(self) -> Path:
        """This job's own folder: there as soon as it has begun."""
        return Path(self.here) / self.work_dir / self.name

    @property
    def missing_path(self) -> str:
        """What is wrong where this machine does not see what it must; empty where it does."""
        missing = next((path for path in (Path(self.here), self.job_dir.parent) if not path.is_dir()), None)
        if missing is None:
            return ""
        return (
            f"{socket.gethostname()} does not see {missing}: expected the current folder and the store on a file "
            "system that all machines share, under the same path"
        )

    def stopped(self) -> bool:
        """Whether the comparison has told all its jobs to stop."""
        try:
            return (self.job_dir.parent / STOP).exists()
        except OSError:  # the file system is away; the run itself will tell
            return False


@dataclass(frozen=True)
class JobResult:
    """What has become of an order.

    Attributes:
        run: name of the run's folder in the store; empty if there is none.
        elsewhere: who else is at it.
        failed: what went wrong.
        lost: whether it was killed from outside, so that another try may go on from its last checkpoint.
        stopped: whether it was told to stop, and has saved.
    """

    run: str = ""
    elsewhere: str = ""
    failed: str = ""
    lost: bool = False
    stopped: bool = False
