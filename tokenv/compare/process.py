"""Work in processes of their own, forked from one that has imported everything, which takes seconds, once."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tokenv.storage import processes, trust

PRELOADED = ["tokenv.cli.train", "tokenv.compare.assess"]
# Where processes cannot fork, each imports everything itself.
LOST = 255  # what multiprocessing says of a process whose exit status nobody can tell it
_LOCK = threading.Lock()  # starting one process asks after all others, and each tells its exit status only once
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class Job:
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
        with _LOCK:
            self._process.start()
        self._told = processes.described(self.pid)

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
        while code == LOST and self.pid in (processes.living(self._told) or ()):
            if time.monotonic() >= until:
                return None
            time.sleep(0.1)
        return code

    def interrupt(self) -> None:
        """Tell it to end as by Ctrl-C."""
        os.kill(self.pid, signal.SIGINT)


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
