"""Defer signals which ask to stop until the end of a step, and ignore repeated ones while the run ends."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any, NoReturn

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
IGNORE_SECONDS = 10.0  # Sacred waits 2 s for its heartbeat before it stores that a run was interrupted


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

    def __enter__(self) -> "GracefulStop":
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
