"""Fixtures for tests of commands: settings of a tiny run as words of a command line, and a run trained from them."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import overrides, settings

from tokenv.cli.main import run_command


@pytest.fixture
def tiny_words(tiny_settings: dict[str, Any]) -> list[str]:
    return overrides(tiny_settings)


@pytest.fixture(scope="session")
def train_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function which trains the tiny run with some keys changed, once a session, and returns its store."""

    @functools.cache
    def train(*changes: str) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        words = overrides(settings())
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run_command("train", ["with", *words, *changes])
        return folder / "runs"

    return train


@pytest.fixture
def trained(
    train_once: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(train_once(), tmp_path / "runs")
    return tmp_path / "runs" / "1"
