"""Fixtures for tests of commands: settings of a tiny run as words of a command line, and a run trained from them."""

from pathlib import Path
from typing import Any

import pytest

from tokenv.cli.main import run_command


@pytest.fixture
def tiny_words(tiny_settings: dict[str, Any]) -> list[str]:
    return [f"{section}.{key}={value}" for section, of in tiny_settings.items() for key, value in of.items()]


@pytest.fixture
def trained(tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_command("train", ["with", *tiny_words])
    return tmp_path / "runs" / "1"
