"""A tiny model, trained once for all tests of the library."""

from pathlib import Path

import pytest
from tiny import settings

from tokenv.config.files import resolve
from tokenv.training.trainer import train


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "1"
    train(
        resolve([], settings(train={"symbols": 1280, "gradient_accumulation_steps": 1})),
        run / "checkpoints",
        lambda *_: None,
    )
    return run
