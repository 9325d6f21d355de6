"""GPUs are lent to one job at a time: no two jobs share one, whoever asks, on this machine."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tokenv.compare import locks
from tokenv.compare.locks import VISIBLE, acquire_gpus, visible_gpus


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with three GPUs, of which this process may use two."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0, GPU-aa\\n1, GPU-bb\\n2, GPU-cc\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv(VISIBLE, "2,0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(locks.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(locks.time, "sleep", lambda _: threading.Event().wait(0.01))


def test_gpus_are_called_what_they_are_called_on_the_whole_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert visible_gpus() == ["GPU-cc", "GPU-aa"]
    monkeypatch.setenv(VISIBLE, "GPU-aa,MIG-7")
    assert visible_gpus() == ["GPU-aa", "MIG-7"]
    monkeypatch.setenv(VISIBLE, "")
    assert visible_gpus() == []
    monkeypatch.delenv(VISIBLE)
    assert visible_gpus() == ["GPU-aa", "GPU-bb", "GPU-cc"]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus() == ["0", "1"]


@pytest.mark.parametrize("count", [1, 2])
def test_no_two_jobs_share_one(count: int) -> None:
    held: list[str] = []
    most = 0

    def job(_: int) -> None:
        nonlocal most
        with acquire_gpus("auto", count) as environment:
            mine = environment[VISIBLE].split(",")
            assert len(mine) == count
            assert not set(mine) & set(held)
            held.extend(mine)
            most = max(most, len(held))
            time.sleep(0.01)
            for one in mine:
                held.remove(one)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(job, range(20)))
    assert most == 2


def test_a_gpu_has_so_many_places() -> None:
    released = threading.Event()

    def wait_for_one() -> bool:
        with acquire_gpus("cuda:0", 1, 2):
            return released.is_set()

    with ThreadPoolExecutor(1) as pool:
        with acquire_gpus("cuda:0", 1, 2), acquire_gpus("cuda:0", 1, 2):
            with acquire_gpus("cuda:0", 1, 3) as third:
                assert third == {}  # its name stays right
            waiting = pool.submit(wait_for_one)
            time.sleep(0.1)
            assert not waiting.done()
            released.set()
        assert waiting.result()


def test_a_gpu_that_is_named_is_waited_for() -> None:
    released = threading.Event()

    def wait_for_it() -> bool:
        with acquire_gpus("cuda:0", 1) as environment:
            assert environment == {}
            return released.is_set()

    with ThreadPoolExecutor(1) as pool:
        with acquire_gpus("cuda:1", 1) as environment:
            assert environment == {}  # its name stays right
            with acquire_gpus("cuda", 1) as other:
                assert other == {VISIBLE: "GPU-cc"}
                waiting = pool.submit(wait_for_it)
                time.sleep(0.1)
                assert not waiting.done()
                released.set()
        assert waiting.result()


def test_a_run_without_gpus_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with acquire_gpus("cuda", 2), acquire_gpus("cpu", 1) as environment:
        assert environment == {}
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with acquire_gpus("auto", 1) as environment:
            assert environment == {}
