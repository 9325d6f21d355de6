"""What an update says of itself, on its way from the device that makes it."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Figures:
    """An update's metrics. A GPU is not waited for until they are read; on a CPU they are there at once.

    Args:
        values: by name, one number each, on one device.
        watched: names of those that are to be finite.
    """

    def __init__(self, values: Mapping[str, Tensor], watched: Sequence[str]) -> None:
        self._names, self._watched = list(values), watched
        self._there = torch.stack([value.double() for value in values.values()])
        self._here = self._there.to("cpu", non_blocking=True)  # into pinned memory
        self._sent = None
        if self._there.is_cuda:
            self._sent = torch.cuda.Event()
            self._sent.record()

    @property
    def odd(self) -> Tensor:
        """Where the values were made, 1.0 if one of those watched is infinite or NaN, else 0.0."""
        chosen = [self._names.index(name) for name in self._watched]
        return 1 - torch.stack([self._there[number] for number in chosen]).sum().isfinite().float()

    def read(self) -> dict[str, float]:
        """All of them by name."""
        if self._sent is not None:
            self._sent.synchronize()
        return dict(zip(self._names, self._here.tolist(), strict=True))

    def are_finite(self) -> bool:
        """Whether those watched are."""
        values = self.read()
        return math.isfinite(sum(values[name] for name in self._watched))
