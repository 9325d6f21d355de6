"""Shared fixtures: tiny models in float64, where exactness can be asked for."""

import pytest
import torch

from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.storage import trust

# Tiny tensors gain nothing from threads, and two test processes would fight for the cores.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def tiny_lm() -> UNet:
    return UNet(UNetConfig(width=16, heads=2, down_layers=2, mid_layers=2, up_layers=2, window=8)).double()


@pytest.fixture
def tiny_settings() -> dict[str, object]:
    """A whole training run that takes a second: updates to the default configuration."""
    return {
        "data": {"source": "words", "seq_len": 32, "validation": 0.1, "words_documents": 80, "words_lexicon": 20},
        "model": {"width": 16, "heads": 2, "down_layers": 1, "mid_layers": 1, "up_layers": 1, "window": 8},
        "agent": {"name": "learned", "window": 2},
        "train": {"symbols": 2560, "batch_size": 4, "accumulate": 2, "warmup_symbols": 512},
        "validation": {"every_symbols": 1024, "sequences": 8, "batch_size": 4},
        "checkpoint": {"every_symbols": 1024, "keep": 10},
        "hardware": {"device": "cpu", "precision": "float32", "compile": "off", "threads": 1},
    }


@pytest.fixture
def series_settings(tiny_settings: dict[str, object]) -> dict[str, object]:
    """The same on synthetic series."""
    series = {"context": 4, "count": 6, "length": 300, "dwell": 8}
    data = {"kind": "series", "source": "regimes", "seq_len": 32, "validation": 0.2, "series": series}
    return tiny_settings | {"data": data, "codec": {"name": "series"}}


@pytest.fixture(autouse=True)
def _trust(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins with what a new process trusts."""
    monkeypatch.setattr(trust, "_allowed", set())
