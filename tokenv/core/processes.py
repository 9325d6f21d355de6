"""A process's progress, which others can read, its deferred signals, and its garbage while it imports."""

import gc
import json
import math
import signal
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

from tokenv.core.atomic import write_atomically
from tokenv.core.trust import read_json

PROGRESS_FILE = "progress.json"
PROGRESS_INTERVAL = 1.0  # seconds between two writes
SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]
# Sacred waits 2 s for its heartbeat before it stores that a run was interrupted
IGNORE_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        symbols: training symbols so far.
        total: training symbols of the whole run.
        seconds: time since the run started or resumed.
    """

    symbols: int
    total: int
    seconds: float


class ProgressFile:
    """Writer of a run's progress, at most once a second and at the end of the run.

    Args:
        folder: folder of the run's checkpoints; created if it is missing.
        total: training symbols of the whole run.
    """

    def __init__(self, folder: Path, total: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._total = folder / PROGRESS_FILE, total
        self._started, self._last_write = time.monotonic(), -PROGRESS_INTERVAL

    def update(self, symbols: int) -> None:
        """Write that so many training symbols have been seen in all."""
        seconds = time.monotonic() - self._started
        if seconds - self._last_write >= PROGRESS_INTERVAL or symbols >= self._total:
            # the disk may be full for a while; saving a checkpoint reports that
            with suppress(OSError):
                write_atomically(
                    self._path, json.dumps(asdict(Progress(symbols, self._total, seconds)))
                )
            self._last_write = seconds


def read_progress(folder: Path) -> Progress | None:
    """Return the progress written last to a folder of checkpoints; None if there is none that can be read."""
    try:
        return Progress(**read_json(folder / PROGRESS_FILE))
    except (OSError, ValueError, TypeError):  # missing, or written by another version
        return None


class GracefulStop:
    """While entered, Ctrl-C, SIGTERM and SIGHUP all ask for a ``KeyboardInterrupt`` at a safe moment.

    The first signal only sets ``requested``; a second Ctrl-C stops at once, as usual. Schedulers and closed terminals
    may send their signals twice and mean one. After a ``KeyboardInterrupt`` all signals are ignored for some seconds,
    so that the end of the run can be recorded.

    SIGTERM and SIGHUP stay with a program which handles or ignores them already (a host program, nohup). Outside the
    main thread nothing changes. Instances may be nested.

    Args:
        at_once: whether the first signal stops at once, too, where nothing can be saved.
    """

    _last_stop = -math.inf

    def __init__(self, *, at_once: bool = False) -> None:
        self.requested = False
        self._at_once = at_once
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                ours = isinstance(getattr(handler, "__self__", None), GracefulStop)
                if number == signal.SIGINT or handler == signal.SIG_DFL or ours:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @staticmethod
    def ignore_signals() -> None:
        """Ignore all signals for some seconds, because the run is ending already."""
        GracefulStop._last_stop = time.monotonic()

    def raise_interrupt(self) -> NoReturn:
        """Raise ``KeyboardInterrupt``, and ignore further signals for some seconds."""
        self.ignore_signals()
        raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        ignored = time.monotonic() - GracefulStop._last_stop < IGNORE_SECONDS
        if not ignored and (self._at_once or (again and number == signal.SIGINT)):
            self.raise_interrupt()


def collect_garbage_from_now_on() -> None:
    """Look for garbage again where ``tokenv.cli.main`` has stopped it, but never among what exists by now.

    Imports drop little of what they make, and looking for garbage took a third of a command's start.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
