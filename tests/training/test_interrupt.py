"""Signals which ask a process to stop."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = """
import signal, sys, time
from tokenv.core.processes import GracefulStop
# As from a terminal, wherever the tests themselves run: what they ignore, this process would ignore, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_IGN if "nohup" in sys.argv else signal.SIG_DFL)
try:
    with GracefulStop(at_once=True):
        try:
            print("before", flush=True)
            if "early" in sys.argv:
                time.sleep(60)
            with GracefulStop() as interrupt:
                print("loop", flush=True)
                while not interrupt.requested:
                    time.sleep(0.05)
                print("requested", flush=True)
                if "slow" in sys.argv:
                    time.sleep(60)
                interrupt.raise_interrupt()
        finally:  # as Sacred does: it waits, then writes
            print("stopping", flush=True)
            time.sleep(0.5)
            print("written", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
INT = signal.SIGINT
TERM = signal.SIGTERM
HUP = signal.SIGHUP


@pytest.mark.parametrize(
    ("words", "signals"),
    [
        ([], [("loop", INT), ("stopping", INT), ("stopping", INT)]),
        ([], [("loop", TERM), ("requested", TERM), ("stopping", TERM)]),
        ([], [("loop", HUP), ("loop", HUP), ("stopping", INT)]),
        (["slow"], [("loop", INT), ("requested", INT), ("stopping", INT), ("stopping", TERM)]),
        (["early"], [("before", TERM), ("stopping", INT)]),
        (["nohup"], [("loop", HUP), ("loop", INT)]),
    ],
)
def test_every_stop_signal_is_one_interrupt_which_is_recorded(
    words: list[str], signals: list[tuple[str, signal.Signals]]
) -> None:
    """Send each signal when the process has printed a word."""
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, *words],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed: list[str] = []
        for word, number in signals:
            while word not in printed:
                line = process.stdout.readline().strip()
                assert line, printed
                printed.append(line)
            process.send_signal(number)
        printed += process.stdout.read().split()
    assert process.returncode == 0
    assert printed[-3:] == ["stopping", "written", "interrupted"]
