"""A tiny model with several checkpoints, trained once for all tests of the page."""

from pathlib import Path

import pytest
from tiny import settings

from tokenv.config.files import resolve
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "1"
    train(resolve([], settings()), run / "checkpoints", lambda *_: None)
    return run
