"""Warnings about the machine at the start of a run."""

import psutil
import pytest
import torch
from threadpoolctl import threadpool_info

from tokenv.config import hardware
from tokenv.config.hardware import prepare, set_threads
from tokenv.config.schema import HardwareConfig


@pytest.mark.parametrize(
    ("load", "threads", "requested", "busy"),
    [(0.2, 4, 0, False), (3.0, 4, 0, True), (3.0, 4, 4, False), (9.0, 1, 0, False)],
)
def test_a_busy_machine_causes_a_warning(monkeypatch, load, threads, requested, busy):
    monkeypatch.setattr(psutil, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    warning = hardware.busy_warning(HardwareConfig(device="cpu", threads=requested))
    assert ("hardware.threads=1" in warning) == bool(warning) == busy


def test_the_number_of_threads_holds_for_torch_and_for_numpy():
    def threads():
        return {
            library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
        }

    before = torch.get_num_threads()
    try:
        for count in (2, 1):
            prepare(HardwareConfig(threads=count))
            assert torch.get_num_threads() == count
            assert threads() == {count}
        prepare(HardwareConfig(threads=0))
        assert threads() == {1}
    finally:
        set_threads(before)
