"""What a device can do. Code which computes asks here, and names no device itself."""

import torch
from torch import Tensor

# devices on which the values of an operation, if any, exist as soon as it returns
HOST = ("cpu", "meta")


def is_accelerator(device: torch.device) -> bool:
    """Return whether a device computes in parallel behind a queue: the host waits only where it reads a value."""
    return device.type not in HOST


def has_own_memory(device: torch.device) -> bool:
    """Return whether tensors must be copied between a device and the host, which pinned memory makes asynchronous."""
    return device.type not in (*HOST, "mps")


def shares_memory_with_numpy(device: torch.device) -> bool:
    """Return whether numpy can compute on a device's tensors in place."""
    return device.type == "cpu"


def to_device_async(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on ``device``; a copy to a GPU is from pinned memory and does not wait for the GPU's queue."""
    if has_own_memory(device) and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def compiles(device: torch.device) -> bool:
    """Return whether models are compiled for a device by default, and ``flex_attention`` has fast kernels there."""
    return device.type == "cuda"
