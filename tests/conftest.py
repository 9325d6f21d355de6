# ruff: noqa: E402
"""Shared fixtures: tiny models in float64, where exactness can be asked for."""

import gc
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

gc.disable()  # A third of the time of imports went into looking for garbage among what they make.

import hypothesis
import pytest
import tiny
import torch
from blank_pictures import blank_png

from tokenv.config.hardware import set_threads
from tokenv.core import trust
from tokenv.core.processes import collect_garbage_from_now_on
from tokenv.data.kinds import DATA
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.plotting import figures

# Tiny tensors gain nothing from threads, and two test processes would fight for the cores.
set_threads(1)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy in the processes which tests start

# A busy machine may take several times as long for an example.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


# see test_accelerator.py
collect_ignore = [] if "TOKENV_PRETENDED_ACCELERATOR" in os.environ else ["accelerator"]

# Whole commands, comparisons and pages of documentation, of which the default run has others of the same kind.
SLOW = frozenset(Path(__file__).with_name("slow.txt").read_text().splitlines())

# Folders, files and tests for which pictures are drawn.
DRAWN = {
    "plotting",
    "test_readme_lines.py",
    "test_nothing_is_cut_at_a_pictures_edge",
    "test_the_command_prints_and_stores_scores_and_forecasts",
}

if "series" not in DATA.names():
    pytest.exit(
        "the installed tokenv lacks entry points of pyproject.toml: pip install --no-deps -e .", 2
    )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in SLOW:
            item.add_marker(pytest.mark.slow)
        # a folder of that name is a keyword, too
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    collect_garbage_from_now_on()


@pytest.fixture(autouse=True)
def _seed() -> None:
    # torch.manual_seed would format the stack for each of three devices which are not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def _only_the_caller_is_inspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give Sacred the frame it looks for alone: it asks for the source of all, of which pytest has fifty."""
    monkeypatch.setattr(inspect, "stack", lambda: [(sys._getframe(1),), (sys._getframe(2),)])


@pytest.fixture(autouse=True)
def _pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave pictures blank but for tests which look at them: drawing takes longer than a tiny run."""
    if not DRAWN & {*request.path.parts, request.node.originalname}:
        monkeypatch.setattr(figures, "png", blank_png)


@pytest.fixture
def tiny_lm() -> UNet:
    return UNet(
        UNetConfig(width=16, heads=2, down_layers=2, mid_layers=2, up_layers=2, window=8)
    ).double()


@pytest.fixture
def tiny_settings() -> dict[str, object]:
    """Return the updates to the default configuration for a training run of a second."""
    return tiny.settings()


@pytest.fixture
def series_settings() -> dict[str, object]:
    """Return the same on synthetic series."""
    return tiny.series_settings()


@pytest.fixture(autouse=True)
def another_process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Begin every test with what a new process trusts, and return a function which does so again."""

    def begin() -> None:
        monkeypatch.setattr(trust, "_allowed", set())
        monkeypatch.setattr(trust, "_untrusted", {})

    begin()
    return begin
