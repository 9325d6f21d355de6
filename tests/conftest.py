"""Shared fixtures: tiny models in float64, where exactness can be asked for."""

import pytest
import torch

from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet


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
