"""From the host, where noise is drawn, to where it is used."""

import torch
from torch import Tensor


def sent(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on ``device``; a GPU is not waited for: what it has yet to do goes on, while pinned memory is copied."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
