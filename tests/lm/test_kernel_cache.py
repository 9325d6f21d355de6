"""Compiled functions which are stored: nothing on the disk stops a program, or runs in it."""

import errno
import gc
import importlib.util
import os
import pickle
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from tokenv.lm import kernel_cache
from tokenv.lm.kernel_cache import compiled, unsafe_folder

SOURCE = '''"""A function to compile."""


def doubled(x):
    return x + x
'''


@pytest.fixture
def function(tmp_path, monkeypatch):
    """Return a function of a file in its own folder, and let each test warn anew."""
    monkeypatch.setattr(kernel_cache, "_warned", False)
    monkeypatch.setattr("numba.config.CACHE_DIR", "")
    tmp_path.chmod(0o700)
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("kernels", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernels", module)  # from which stored code takes its globals
    spec.loader.exec_module(module)
    return module.doubled


def call(function):
    """Call it as a new process would, and return how often its code came from the disk."""
    fresh = compiled(function)
    assert fresh(np.float32(21)) == 42
    return sum(fresh.stats.cache_hits.values())


def stored(function):
    folder = Path(function.__code__.co_filename).parent / "__pycache__"
    return sorted(folder.glob("*.nb?"))


def test_code_is_stored_and_read_again(function):
    assert call(function) == 0
    assert len(stored(function)) == 2
    gc.collect()  # else the code's environment may live on, and is not read
    assert call(function) == 1


def damages(content):
    yield b""
    yield content[: len(content) // 2]
    yield np.random.default_rng(0).bytes(len(content))


@pytest.mark.parametrize("which", [".nbi", ".nbc"])
def test_damaged_files_are_compiled_anew_with_one_warning_and_replaced(
    function, which, monkeypatch
):
    call(function)
    (path,) = (path for path in stored(function) if path.suffix == which)
    content = path.read_bytes()
    for damaged in damages(content):
        monkeypatch.setattr(kernel_cache, "_warned", False)
        path.write_bytes(damaged)
        with pytest.warns(UserWarning, match="cannot be used.*compiled anew") as warned:
            assert call(function) == 0
        assert len(warned) == 1
        assert call(function) == 1


def test_a_second_error_does_not_warn_again(function):
    call(function)
    for path in stored(function):
        path.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="cannot be used"):
        call(function)
    for path in stored(function):
        path.write_bytes(b"damaged")
    assert call(function) == 0


def test_a_missing_data_file_is_compiled_anew(function):
    call(function)
    (path,) = (path for path in stored(function) if path.suffix == ".nbc")
    path.unlink()
    assert call(function) == 0
    assert call(function) == 1


def test_a_full_disk_costs_nothing_but_the_compilation(function, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("numba.core.caching.os.replace", full)
    with pytest.warns(UserWarning, match="No space left on device") as warned:
        assert [call(function), call(function)] == [0, 0]
    assert len(warned) == 1
    assert stored(function) == []


class Planted:
    """A pickle which leaves a file when it is read."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
@pytest.mark.parametrize("place", ["folder", "parent"])
def test_a_planted_index_is_not_executed(function, tmp_path, monkeypatch, place):
    call(function)
    mark = tmp_path / "mark"
    (index,) = (path for path in stored(function) if path.suffix == ".nbi")
    index.write_bytes(pickle.dumps(Planted(mark)))
    {"folder": index.parent, "parent": tmp_path}[place].chmod(0o777)
    with pytest.warns(UserWarning, match="can be written by others"):
        assert call(function) == 0
    assert not mark.exists()


def test_a_folder_of_ones_own_is_safe(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o755)
    with warnings.catch_warnings(action="error"):
        assert unsafe_folder(folder) is None


@pytest.mark.skipif(os.name == "nt", reason="modes of POSIX")
def test_a_link_does_not_hide_a_folder_of_others(tmp_path):
    shared = tmp_path / "shared"
    (shared / "cache").mkdir(parents=True)
    shared.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(shared / "cache")
    assert unsafe_folder(link) == shared
    sticky = tmp_path / "sticky"
    (sticky / "cache").mkdir(parents=True)
    sticky.chmod(0o1777)
    assert unsafe_folder(sticky / "cache") is None
    assert unsafe_folder(sticky) == sticky


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives folders away"
)
def test_a_folder_of_somebody_else_is_not_safe(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    assert unsafe_folder(folder) == folder
