"""Devices, precisions, and two settings that make a CPU twice as fast."""

import ctypes
import os
import sys

import psutil
import torch

from tokenv.config.schema import HardwareConfig
from tokenv.errors import UserError

ROOM = 1.25  # threads and processes a core from which on training is warned of


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        UserError: a device is asked for that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"hardware.device = {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices: "
            "choose auto or cpu, or install a CUDA build of torch"
        )
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the hardware multiplies it fast, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def prepare(config: HardwareConfig) -> None:
    """Process-wide settings: threads, and memory that is kept instead of returned after every step.

    glibc maps and unmaps large blocks at every allocation, and touching fresh pages then costs more than the
    arithmetic on them. Elsewhere than on glibc nothing is changed.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high")
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            trim_threshold, mmap_max = -1, -4  # names of malloc.h
            mallopt(mmap_max, 0)
            mallopt(trim_threshold, 2**31 - 1)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_warning(config: HardwareConfig) -> str:
    """Say that fewer threads are faster, where torch's own number of them meets a busy machine; else empty.

    Threads wait for one another several times an operation, so that one that gets no core delays all. The number is
    not lowered here: a run that is resumed bit for bit needs the same one.
    """
    threads = torch.get_num_threads()
    load = psutil.getloadavg()[0]
    on_cpu = resolve_device(config.device).type == "cpu"
    if not on_cpu or config.threads or threads < 2 or threads + load <= ROOM * cores():
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores()} cores), and this run's {threads} threads, which wait for "
        "one another, may be several times as slow as one: hardware.threads=1 avoids that"
    )


def peak_resident_memory() -> float:
    """Largest resident memory of this process so far, in GiB."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
