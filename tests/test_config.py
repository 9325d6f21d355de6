"""Configurations: complete, checked before anything runs, and refused with the file, the key and the nearest name."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tokenv.config.files import config_path, load_yaml, named_configs, resolve
from tokenv.config.schema import Config
from tokenv.run.parts import build_parts

SIZES = {"fineweb-147m": 147e6, "codeparrot-90m": 90e6, "aspect-6": 40e6}


RUNS = [name for name, path in named_configs().items() if "methods" not in load_yaml(path)]


@pytest.mark.parametrize("name", RUNS)
def test_every_named_config_is_complete_and_can_be_built(name: str) -> None:
    config = resolve([name], {})
    parts = build_parts(config, torch.device("meta"))
    size = sum(p.numel() for p in parts.lm.parameters())
    assert size == pytest.approx(SIZES.get(name, size), rel=0.01)
    if name != "bench-d256":  # data play no part there
        given = set(yaml.safe_load(config_path(name).read_text()))
        assert given >= set(Config().as_dict()) - {"hardware", "codec"}, "a named configuration says all it depends on"


def test_expected_names_are_there() -> None:
    expected = {"quick", "fineweb-147m", "codeparrot-90m", "aspect-2", "aspect-4", "aspect-6", "bench-d256"}
    assert expected <= set(named_configs())


def test_names_and_paths_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve(["quick"], {}) == resolve(["configs/quick.yaml"], {}) == resolve([str(config_path("quick"))], {})


def test_command_line_overrides_files_and_later_files_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\nrate: 0.3\ntrain: {learning_rate: 1e-3, clip: .inf}\n")
    (tmp_path / "b.yaml").write_text("rate: 0.4\n")
    config = resolve([str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")], {"seed": 7, "train": {"batch_size": 3}})
    assert (config.seed, config.rate, config.train.batch_size) == (7, 0.4, 3)
    assert (config.train.learning_rate, config.train.clip) == (1e-3, float("inf"))


def test_a_new_name_drops_the_options_of_the_old_class() -> None:
    base = resolve([], {"agent": {"name": "learned", "window": 3}}).as_dict()
    assert resolve([], {"agent": {"name": "uniform"}}, base).agent == {"name": "uniform"}
    assert resolve([], {"agent": {"scale": 2.0}}, base).agent == {"name": "learned", "window": 3, "scale": 2.0}


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"modle": {}}, r"command line: unknown key modle: did you mean 'model'\?"),
        ({"train": {"learning_rat": 1}}, r"unknown key train.learning_rat: did you mean 'learning_rate'\?"),
        ({"model": 3}, r"model = 3: expected a section"),
        ({"agent": "uniform"}, r"agent = 'uniform': expected a section such as agent.name=uniform"),
        ({"rate": 1.5}, r"rate = 1.5: expected boundaries per symbol in \(0, 1\)"),
        ({"rate": "often"}, r"rate = 'often': expected a number"),
        ({"train": {"batch_size": 2.5}}, r"train.batch_size = 2.5: expected a whole number"),
        ({"train": {"batch_size": 0}}, r"train.batch_size = 0: expected"),
        ({"train": {"warmup_bytes": -1}}, r"train.warmup_bytes = -1: expected 0 or more"),
        ({"model": {"heads": 5}}, r"model.heads = 5 does not divide model.width"),
        ({"model": {"window": 0}}, r"model.window = 0: expected a positive number"),
        ({"hardware": {"device": "gpu"}}, r"hardware.device = 'gpu': expected auto, cpu, cuda"),
        ({"hardware": {"precision": "int8"}}, r"hardware.precision = 'int8'"),
        ({"loss": {"policy": -1}}, r"loss.policy = -1.0: expected a weight"),
        ({"data": {"cut": "slice"}}, r"data.cut"),
        ({"seed": -1}, r"seed = -1: expected"),
    ],
)
def test_bad_values_are_named(updates: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve([], updates)


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("train: {batch_sise: 3}\n")
    with pytest.raises(ValueError, match=r"mine.yaml: unknown key train.batch_sise: did you mean 'batch_size'\?"):
        resolve([str(path)], {})
    path.write_text("train: {a: [}\n")
    with pytest.raises(ValueError, match=r"mine.yaml: not valid YAML"):
        resolve([str(path)], {})
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match=r"mine.yaml: expected a mapping"):
        resolve([str(path)], {})
    with pytest.raises(ValueError, match=r"no configuration 'quik': .*did you mean 'quick'\?"):
        resolve(["quik"], {})


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"agent": {"name": "lerned"}}, r"agent.name = 'lerned' is unknown: did you mean 'learned'\?"),
        ({"agent": {"name": "learned", "windw": 1}}, r"agent.windw is no option of agent 'learned'.*'window'"),
        ({"agent": {"name": "learned", "window": -1}}, r"agent.window = -1"),
        ({"agent": {"name": "no.such:Agent"}}, r"agent.name = 'no.such:Agent' cannot be imported"),
        ({"estimator": {"name": "reinforce", "gamma": 2}}, r"gamma = 2: expected a factor"),
        ({"rate_target": {"name": "pressure"}}, r"rate_target.name = 'pressure' is unknown"),
    ],
)
def test_bad_names_and_options_are_named(updates: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_parts(resolve([], updates), torch.device("meta"))


def test_own_classes_are_named_by_module() -> None:
    parts = build_parts(resolve([], {"agent": {"name": "tokenv.agents.fixed:Random"}}), torch.device("meta"))
    assert type(parts.agent).__name__ == "Random"
    assert parts.estimator is None
