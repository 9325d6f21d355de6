"""GPUs of this machine, each lent to one job at a time: of all threads and all processes that ask here."""

from __future__ import annotations

import getpass
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import torch

from tokenv.core.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def gpus_for(
    device: str, count: int, meanwhile: Callable[[], None], stopped: Callable[[], bool]
) -> Iterator[dict[str, str] | None]:
    """Wait for GPUs that nobody else has, and keep them.

    Args:
        device: as ``hardware.device`` says; ``cuda:1`` is that one, ``auto`` and ``cuda`` any.
        count: how many.
        meanwhile: done once a second while waiting.
        stopped: whether to wait no longer.

    Yields:
        What to add to a process's environment so that it sees these alone; None if it was stopped while waiting.
    """
    named = device.partition(":")[2]
    ids = visible() if device.startswith("cuda") or (device == "auto" and torch.cuda.is_available()) else []
    wanted = ids[int(named) :][:1] if named else ids
    count = min(count, len(wanted))  # a run that asks for more than there are says so itself
    with ExitStack() as kept:
        while (got := _taken(wanted, count, kept)) is None:
            if stopped():
                yield None
                return
            meanwhile()
            time.sleep(1)
        yield {VISIBLE: ",".join(got)} if got and not named else {}


def visible() -> list[str]:
    """GPUs that this process may use, by names that hold on the whole machine, as far as that can be found out."""
    told = os.environ.get(VISIBLE)
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        names = dict(line.replace(" ", "").split(",", 1) for line in listed.splitlines() if "," in line)
    except (OSError, subprocess.SubprocessError, ValueError):
        names = {}
    if told is not None:
        return [names.get(one.strip(), one.strip()) for one in told.split(",") if one.strip()]
    return list(names.values()) or [str(number) for number in range(torch.cuda.device_count())]


def _taken(wanted: Sequence[str], count: int, kept: ExitStack) -> list[str] | None:
    """So many of these, locked; None, and none of them, if so many are not free."""
    with ExitStack() as found:
        got: list[str] = []
        for gpu in wanted:
            file = _locked(gpu) if len(got) < count else None
            if file is not None:
                found.enter_context(file)
                got.append(gpu)
        if len(got) < count:
            return None
        kept.push(found.pop_all())
        return got


def _locked(gpu: str) -> IO[bytes] | None:
    """The lock of a GPU, which ends with whoever holds it; None if somebody else does."""
    try:
        import fcntl
    except ImportError:  # not Unix
        return Path(os.devnull).open("rb")
    path = Path(tempfile.gettempdir()) / f"tokenv-{getpass.getuser()}-gpu-{gpu}.lock"
    try:  # other users may write to the folder: what is there is neither followed, where it is a link, nor cut short
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), "r+b", 0)
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror}): delete it, or ask whoever owns it to") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
