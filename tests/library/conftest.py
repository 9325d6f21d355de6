"""A tiny model, trained once for all tests of the library."""

from pathlib import Path

import pytest

from tokenv.config.files import resolve
from tokenv.run.train import train


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = {
        "data": {"source": "words", "seq_len": 32, "validation": 0.1, "words_documents": 80, "words_lexicon": 20},
        "model": {"width": 16, "heads": 2, "down_layers": 1, "mid_layers": 1, "up_layers": 1, "window": 8},
        "agent": {"name": "learned", "window": 2},
        "train": {"symbols": 1280, "batch_size": 4, "warmup_symbols": 512},
        "hardware": {"device": "cpu", "precision": "float32", "compile": "off"},
    }
    run = tmp_path_factory.mktemp("runs") / "1"
    train(resolve([], tiny), run / "checkpoints", lambda *_: None)
    return run
