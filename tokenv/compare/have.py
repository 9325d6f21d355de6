"""Having one run, wherever that is: claimed, trained and measured, each in a process of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tokenv.compare.claims import Claim, Elsewhere, claim
from tokenv.compare.gpus import gpus_for
from tokenv.compare.order import Order, Outcome
from tokenv.compare.process import LOST, Job
from tokenv.compare.store import find_run
from tokenv.errors import REPORT
from tokenv.storage import trust

INTERRUPTED = 130  # a command's exit status after Ctrl-C or SIGTERM


class _EndedError(Exception):
    """A job did not come to its end; ``args`` holds what has become of the order."""


def have(order: Order, stopped: Callable[[], bool] | None = None) -> Outcome:
    """Have one run, unless somebody else is at it. The current folder is the order's.

    Args:
        order: which.
        stopped: whether to stop; the order's own word if None.
    """
    store = Path(order.store)
    stopped = stopped or order.stopped
    if order.unseen or stopped():
        return Outcome(failed=order.unseen, stopped=not order.unseen)
    try:
        order.papers.mkdir(exist_ok=True)
        claimed = claim(order.config, store)
    except OSError as error:
        return Outcome(failed=f"{store}: cannot be written to ({error.strerror})")
    if isinstance(claimed, Elsewhere):
        return Outcome(elsewhere=claimed.who)
    try:
        return Outcome(run=_have(order, claimed, stopped))
    except _EndedError as ended:
        outcome: Outcome = ended.args[0]
        return outcome
    finally:
        claimed.release()


def _have(order: Order, claimed: Claim, stopped: Callable[[], bool]) -> str:
    """Train and measure what is not yet, under a claim; the name of the run's folder."""
    store = Path(order.store)
    run = find_run(order.config, store)
    if run is None or not run.finished:
        source = order.papers / "run.yaml" if run is None else f"resume={run.folder}"
        (order.papers / "run.yaml").write_text(yaml.safe_dump(order.config.as_dict()))
        words = ["train", "with", str(source), *trust.words(), "-F", order.store]
        _do(*trainer(words, order.ranks), order.ranks, order, claimed, stopped)
        run = find_run(order.config, store)
        if run is None or not run.finished:
            raise _EndedError(Outcome(failed=f"it ended, but {store} holds no finished run of its configuration"))
    if order.wishes is not None:
        _do("tokenv.compare.assess:assess", [run.folder, order.wishes], 1, order, claimed, stopped)
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


def _do(
    function: str, arguments: list[Any], gpus: int, order: Order, claimed: Claim, stopped: Callable[[], bool]
) -> None:
    """See a job through, on GPUs of its own where it takes any; look once a second.

    Raises:
        _EndedError: it failed or was killed, or it was told to stop and has.
    """
    log = order.papers / "log"
    with gpus_for(order.config.hardware.device, gpus, claimed.refresh, stopped) as seen:
        if seen is None:
            raise _EndedError(Outcome(stopped=True))
        job = Job(function, arguments, log, order.threads, seen)
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
        raise _EndedError(Outcome(stopped=True))
    if code:
        raise _EndedError(ended(log, code))


def ended(log: Path, code: int) -> Outcome:
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
        return Outcome(failed=f"killed by signal {-killed}", lost=True)
    if code == LOST:
        return Outcome(failed="the process that forks all others was killed", lost=True)
    if code == INTERRUPTED:
        return Outcome(failed="stopped, but not by this comparison", lost=True)
    lines = [line for line in said.splitlines() if line.strip() not in ("", REPORT)]
    own = [line for line in lines if line.startswith("tokenv: ")]
    return Outcome(failed=(own or lines or [f"exit status {code}"])[-1].strip().removeprefix("tokenv: "))
