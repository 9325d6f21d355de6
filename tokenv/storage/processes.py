"""Describe processes so that others can check whether they still exist."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

TICKS = "start_ticks"


def describe(*pids: int) -> dict[str, Any]:
    """Return a JSON-serialisable description of this process and those with these ids, without ended ones."""
    processes = [{"pid": pid} | start for pid in (os.getpid(), *pids) if (start := _describe_start(pid))]
    return {"place": host_id(), "processes": processes}


def alive_pids(description: Any) -> list[int] | None:
    """Return the ids of described processes which still exist; None if they ran on another machine.

    Args:
        description: result of ``describe``, here or on another machine; anything else describes no process.
    """
    try:
        processes = {each["pid"]: each for each in description["processes"]}
        return (
            [pid for pid, each in processes.items() if _is_alive(each)] if description["place"] == host_id() else None
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):  # not ours, or damaged
        return []


def _is_alive(process: dict[str, Any]) -> bool:
    if TICKS in process:
        return _start_ticks(process["pid"]) == process[TICKS]
    started = _start_time(process["pid"])
    return started is not None and abs(started - process["started"]) < 2  # seconds: clocks may be adjusted


def _describe_start(pid: int) -> dict[str, Any]:
    """Return the start of a process, independent of the system clock where possible; empty if it has ended."""
    ticks = _start_ticks(pid)
    if ticks is not None:
        return {TICKS: ticks}
    started = None if Path("/proc/self/stat").exists() else _start_time(pid)
    return {} if started is None else {"started": started}


def _start_ticks(pid: int) -> int | None:
    """Return the clock ticks from the machine's start to the process's; None if it has ended or this is not Linux.

    Field 22 of ``/proc/PID/stat``, whose second field, a name in parentheses, may hold anything (proc(5)).
    """
    try:
        fields = Path(f"/proc/{int(pid)}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _start_time(pid: int) -> float | None:
    """Return a process's start in seconds since 1970, which distinguishes reused ids; None if it has ended."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def host_id() -> str:
    """Return an id of this machine's boot and the container of its process ids; several may be called localhost."""
    names = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        names += [os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return " ".join(names)
