"""Every command reads runs which an earlier version stored, with other names of keys."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenv.cli.main import run_command
from tokenv.core.run_folders import DIGESTS

EARLIER = {"symbols": "bytes", "warmup_symbols": "warmup_bytes", "every_symbols": "every_bytes"}


def with_earlier_names(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with its earlier names."""
    sections = {"train", "validation", "checkpoint"} & values.keys()
    return values | {each: {EARLIER.get(k, k): v for k, v in values[each].items()} for each in sections}


def without_agent(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("agent.")]


@pytest.fixture
def earlier(trained: Path, tiny_words: list[str]) -> Path:
    run_command("train", ["with", *without_agent(tiny_words), "agent.name=uniform", "seed=1"])
    for folder in trained.parent.glob("[12]"):
        file = folder / "config.json"
        file.write_text(json.dumps(with_earlier_names(json.loads(file.read_text()))))
        for file in folder.glob("checkpoints/*/state.json"):
            state = json.loads(file.read_text())
            state["bytes"], state["config"] = state.pop("symbols"), with_earlier_names(state["config"])
            state["history"]["train/bytes_per_second"] = state["history"].pop("train/symbols_per_second")
            file.write_text(json.dumps(state))
            file.with_name(DIGESTS).unlink()  # there were none
    return trained


def test_every_command_reads_it(earlier: Path, tiny_words: list[str]) -> None:
    first = sorted(earlier.glob("checkpoints/step-*"))[0]
    whole = json.loads((earlier / "run.json").read_text())["result"]
    assert run_command("train", ["with", f"resume={first}"]) == whole
    assert run_command("evaluate", ["with", "run=runs/1", "sequences=2"])
    assert run_command("segment", ["with", "run=runs/1", "text=ab"])["characters"] == 2
    compared = ["with", "runs=['runs/1', 'runs/2']", "passages=0", "bpe_vocabulary=260"]
    assert [found["method"] for found in run_command("compare", compared)] == ["learned", "uniform"]
    assert run_command("train", ["with", *without_agent(tiny_words), "agent.pretrained=runs/1"])
