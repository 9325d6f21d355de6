"""Which processes are at something, written down so that others can see whether these still exist."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

TICKS = "start_ticks"


def describe(*pids: int) -> dict[str, Any]:
    """This process and those of these ids, as JSON can hold them; of these, who has ended is left out."""
    processes = [{"pid": pid} | began for pid in (os.getpid(), *pids) if (began := _began(pid))]
    return {"place": host_id(), "processes": processes}


def alive_pids(told: Any) -> list[int] | None:
    """Ids of the processes that ``describe`` told of and that still exist; None where that cannot be seen from here.

    Args:
        told: what ``describe`` gave, here or on another machine; what is no such thing tells of nobody.
    """
    try:
        known = {each["pid"]: each for each in told["processes"]}
        return [pid for pid, each in known.items() if _is(each)] if told["place"] == host_id() else None
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):  # not ours, or damaged
        return []


def _is(process: dict[str, Any]) -> bool:
    if TICKS in process:
        return _ticks(process["pid"]) == process[TICKS]
    started = _started(process["pid"])
    return started is not None and abs(started - process["started"]) < 2  # seconds: clocks are set now and then


def _began(pid: int) -> dict[str, Any]:
    """When a process began, by what no clock that is set can change where there is such a thing; empty if it ended."""
    ticks = _ticks(pid)
    if ticks is not None:
        return {TICKS: ticks}
    started = None if Path("/proc/self/stat").exists() else _started(pid)
    return {} if started is None else {"started": started}


def _ticks(pid: int) -> int | None:
    """Clock ticks from the machine's start to the process's; None if it has ended, and on other systems than Linux.

    Field 22 of ``/proc/PID/stat``, whose second field, a name in parentheses, may hold anything (proc(5)).
    """
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _started(pid: int) -> float | None:
    """When a process started, in seconds since 1970; None if it has ended: another may have its id by now."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def host_id() -> str:
    """This machine since it was started, for several may be called localhost, and the container that counts ids."""
    known = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        known += [os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return " ".join(known)
