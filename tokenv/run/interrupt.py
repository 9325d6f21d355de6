"""Ctrl-C between two steps instead of in the middle of one."""

import signal
import threading
from types import FrameType


class Interruptible:
    """While entered, the first Ctrl-C only sets ``requested``; the second one stops at once, as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._active = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "Interruptible":
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
