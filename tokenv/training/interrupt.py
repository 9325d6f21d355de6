"""Signals to stop: heeded between two steps instead of in the middle of one, and never in the middle of stopping."""

import math
import signal
import threading
import time
from types import FrameType
from typing import Any, NoReturn

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
DEAF_SECONDS = 10.0  # Sacred waits 2 s for its heartbeat before it stores that a run was interrupted


class GracefulStop:
    """While entered, Ctrl-C, SIGTERM and SIGHUP all mean ``KeyboardInterrupt``, at a moment that suits.

    The first one only sets ``requested``; a second Ctrl-C stops at once, as usual. Schedulers and closed terminals may
    send their signals twice, and mean one. After a ``KeyboardInterrupt`` all of them are ignored for some seconds, so
    that whoever keeps the books can write down what has become of the run.

    SIGTERM and SIGHUP stay with whoever handles or ignores them already (a host program, nohup). Elsewhere than in the
    main thread nothing changes. One may be entered inside another.

    Args:
        at_once: the first one stops at once, too: for what cannot be gone on with.
    """

    _last_stop = -math.inf

    def __init__(self, *, at_once: bool = False) -> None:
        self.requested = False
        self._at_once = at_once
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "GracefulStop":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler = signal.getsignal(number)
                ours = isinstance(getattr(handler, "__self__", None), GracefulStop)
                if number == signal.SIGINT or handler == signal.SIG_DFL or ours:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def ignore_signals() -> None:
        """Ignore all of them for some seconds: what is going on is ending already."""
        GracefulStop._last_stop = time.monotonic()

    def stop(self) -> NoReturn:
        """Raise ``KeyboardInterrupt``."""
        self.ignore_signals()
        raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again, self.requested = self.requested, True
        deaf = time.monotonic() - GracefulStop._last_stop < DEAF_SECONDS
        if not deaf and (self._at_once or (again and number == signal.SIGINT)):
            self.stop()
