"""Tiny models, trained once for all tests of a file."""

from pathlib import Path

import pytest
from tiny import settings

import tokenv
from tokenv import Model
from tokenv.config.files import resolve
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "1"
    config = resolve([], settings(train={"symbols": 1280}))
    train(config, run / "checkpoints", lambda *_: None)
    return run


@pytest.fixture(scope="module")
def model(tiny_run: Path) -> Model:
    return tokenv.load(tiny_run)


@pytest.fixture(scope="module")
def served_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with several checkpoints."""
    run = tmp_path_factory.mktemp("runs") / "1"
    train(resolve([], settings()), run / "checkpoints", lambda *_: None)
    return run
