"""Warnings about the machine at the start of a run."""

import psutil
import pytest
import torch

from tokenv.config import hardware
from tokenv.config.schema import HardwareConfig


@pytest.mark.parametrize(
    ("load", "threads", "asked", "busy"),
    [(0.2, 4, 0, False), (3.0, 4, 0, True), (3.0, 4, 4, False), (9.0, 1, 0, False)],
)
def test_a_busy_machine_causes_a_warning(monkeypatch, load, threads, asked, busy):
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    said = hardware.busy_warning(HardwareConfig(device="cpu", threads=asked))
    assert ("hardware.threads=1" in said) == bool(said) == busy
