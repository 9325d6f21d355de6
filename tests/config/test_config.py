"""Configurations are complete and checked before work; messages name the file, the key and the nearest name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tokenv.config.build import can_imitate, is_trainable
from tokenv.config.components import build_components, check_components
from tokenv.config.files import config_path, load_yaml, named_configs, nest_key, resolve
from tokenv.config.schema import MAY_CHANGE_ON_RESUME, Config, ImitationConfig
from tokenv.core.errors import UserError

SIZES = {"paper-147m": 147e6, "released-147m": 147e6, "codeparrot-90m": 90e6, "aspect-6": 40e6}


RUNS = [name for name, path in named_configs().items() if "methods" not in load_yaml(path)]


@pytest.mark.parametrize("name", RUNS)
def test_every_named_config_is_complete_and_can_be_built(name: str) -> None:
    config = resolve([name], {})
    parts = build_components(config, torch.device("meta"))
    size = sum(p.numel() for p in parts.lm.parameters())
    assert size == pytest.approx(SIZES.get(name, size), rel=0.01)
    if name != "bench-d256":  # data play no part there
        given = set(yaml.safe_load(config_path(name).read_text()))
        assert given >= set(Config().as_dict()) - {"hardware", "codec", "callbacks"}, (
            "a named configuration says all it depends on"
        )


# Millions of parameters of the released sizes; their names are those of the authors, who call two of them otherwise.
RELEASED = {
    "18M": 18,
    "20M": 18,
    "32M": 32,
    "40M": 40,
    "73M": 73,
    "90M": 90,
    "130M": 130,
    "147M": 147,
    "346M": 365,
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_sizes_have_the_parameters_of_their_names(name: str) -> None:
    sizes = load_yaml(config_path("released-sizes"))
    assert set(sizes["methods"]) == set(RELEASED)
    config = resolve([sizes["base"]], sizes["methods"][name])
    lm = build_components(config, torch.device("meta")).lm
    parameters = sum(parameter.numel() for parameter in lm.parameters())
    assert parameters / 1e6 == pytest.approx(RELEASED[name], abs=1)
    assert (
        config.data.seq_len * config.train.batch_size * config.train.gradient_accumulation_steps
        >= 32 * 4096
    )
    assert config.train.warmup == config.train.warmup_symbols


def test_expected_names_exist() -> None:
    expected = {
        "quick",
        "paper-147m",
        "codeparrot-90m",
        "aspect-2",
        "aspect-4",
        "aspect-6",
        "bench-d256",
    }
    assert expected <= set(named_configs())


def test_names_and_paths_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        resolve(["quick"], {})
        == resolve(["configs/quick.yaml"], {})
        == resolve([str(config_path("quick"))], {})
    )


def test_command_line_overrides_files_and_later_files_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "seed: 1\nrate: 0.3\ntrain: {learning_rate: 1e-3, max_grad_norm: .inf}\n"
    )
    (tmp_path / "b.yaml").write_text("rate: 0.4\n")
    config = resolve(
        [str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")],
        {"seed": 7, "train": {"batch_size": 3}},
    )
    assert (config.seed, config.rate, config.train.batch_size) == (7, 0.4, 3)
    assert (config.train.learning_rate, config.train.max_grad_norm) == (1e-3, float("inf"))


def test_a_new_name_drops_the_options_of_the_old_class() -> None:
    base = resolve([], {"agent": {"name": "learned", "window": 3}}).as_dict()
    assert resolve([], {"agent": {"name": "uniform"}}, base).agent == {"name": "uniform"}
    assert resolve([], {"agent": {"scale": 2.0}}, base).agent == {
        "name": "learned",
        "window": 3,
        "scale": 2.0,
    }


def test_an_empty_teacher_ends_an_imitation() -> None:
    assert resolve(["rates"], {}).imitation.teacher["name"] == "whitespace"
    config = resolve(["rates"], {"imitation": {"teacher": {}, "fraction": 0.2}})
    assert config.imitation == ImitationConfig(fraction=0.2)
    assert config.agent == resolve(["rates"], {"agent": {}}).agent


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"modle": {}}, r"command line: unknown key modle: did you mean 'model'\?"),
        (
            {"train": {"learning_rat": 1}},
            r"unknown key train.learning_rat: did you mean 'learning_rate'\?",
        ),
        ({"model": 3}, r"model = 3: expected a section"),
        ({"agent": "uniform"}, r"agent = 'uniform': expected a section such as agent.name=uniform"),
        ({"rate": 1.5}, r"rate = 1.5: expected boundaries per symbol in \(0, 1\)"),
        ({"rate": "often"}, r"rate = 'often': expected boundaries per symbol"),
        ({"train": {"batch_size": 2.5}}, r"train.batch_size = 2.5: expected a whole number"),
        ({"train": {"batch_size": 0}}, r"train.batch_size = 0: expected"),
        ({"train": {"warmup_symbols": -1}}, r"train.warmup_symbols = -1: expected 0 or more"),
        ({"model": {"heads": 5}}, r"model.heads = 5 does not divide model.width"),
        ({"model": {"window": 0}}, r"model.window = 0: expected a whole number of at least 1"),
        ({"hardware": {"device": "gpu"}}, r"hardware.device = 'gpu': expected auto, cpu, cuda"),
        ({"hardware": {"precision": "int8"}}, r"hardware.precision = 'int8'"),
        ({"loss": {"policy": -1}}, r"loss.policy = -1.0: expected 0 or more"),
        ({"data": {"cut": "slice"}}, r"data.cut"),
        ({"seed": -1}, r"seed = -1: expected"),
        ({"train": {"symbols": float("inf")}}, r"train.symbols = inf: expected a whole number"),
        ({"train": {"symbols": float("nan")}}, r"train.symbols = nan: expected a whole number"),
        (
            {"train": {"learning_rate": float("inf")}},
            r"train.learning_rate = inf: expected a finite number",
        ),
        (
            {"train": {"max_grad_norm": float("nan")}},
            r"train.max_grad_norm = nan: expected a positive norm",
        ),
        ({"rate": True}, r"rate = True: expected boundaries per symbol"),
        ({"rate": 1j}, r"rate = 1j: expected boundaries per symbol"),
        (
            {"hardware": {"compile": "maybe"}},
            r"hardware.compile = 'maybe': expected auto, on or off",
        ),
        (
            {"hardware": {"device": "cuda:one"}},
            r"hardware.device = 'cuda:one': expected auto, cpu, cuda or cuda:N",
        ),
        ({"data": {"source": b"x"}}, r"data.source = b'x': expected a text"),
        (
            {"agent": {"name": 3}},
            r"agent.name = 3: expected the name of one, or package.module:Class",
        ),
        ({"agent": {"scale": 1j}}, r"agent.scale = 1j: expected a number, text"),
        ({"agent": {"deep": {"er": b"x"}}}, r"agent.deep.er = b'x': expected a number, text"),
        ({"agent": {1: 2}}, r"agent = .*: expected a section whose keys are texts"),
        ({1: 2}, r"unknown key 1"),
    ],
)
def test_messages_for_wrong_values(updates: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve([], updates)


def test_messages_for_wrong_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("train: {batch_sise: 3}\n")
    with pytest.raises(
        ValueError, match=r"mine.yaml: unknown key train.batch_sise: did you mean 'batch_size'\?"
    ):
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
        (
            {"agent": {"name": "lerned"}},
            r"agent.name = 'lerned' is unknown: did you mean 'learned'\?",
        ),
        (
            {"agent": {"name": "learned", "windw": 1}},
            r"agent.windw is no option of agent 'learned'.*'window'",
        ),
        ({"agent": {"name": "learned", "window": -1}}, r"agent.window = -1"),
        ({"agent": {"name": "no.such:Agent"}}, r"agent.name = 'no.such:Agent' cannot be imported"),
        ({"estimator": {"name": "reinforce", "gamma": 2}}, r"gamma = 2.0: expected 0 to 1"),
        ({"estimator": {"gamma": True}}, r"estimator.gamma = True: expected a number"),
        (
            {"estimator": {"gamma": float("nan")}},
            r"estimator.gamma = nan: expected a finite number",
        ),
        (
            {"estimator": {"name": "rloo", "reward_only": "maybe"}},
            r"estimator.reward_only = 'maybe': expected true or",
        ),
        (
            {"estimator": {"name": "rloo", "num_samples": 2.5}},
            r"estimator.num_samples = 2.5: expected a whole number",
        ),
        (
            {"estimator": {"name": "off_policy", "horizon": "a"}},
            r"estimator.horizon = 'a': expected a whole .* or null",
        ),
        (
            {"agent": {"name": "bpe", "tokenizer": 5}},
            r"agent.tokenizer = 5: expected text, a path or null",
        ),
        (
            {"agent": {"name": "hnet"}, "model": {"pooling": "mean"}},
            r"expected model.pooling=smooth",
        ),
        ({"rate_target": {"name": "pressure"}}, r"rate_target.name = 'pressure' is unknown"),
        (
            {"agent": {"name": "exact_count"}, "imitation": {"teacher": {"name": "whitespace"}}},
            r"imitation.teacher with agent.name = 'exact_count', and to an agent ExactCount any other number .*"
            r" impossible",
        ),
        (
            {
                "agent": {"name": "hnet"},
                "model": {"pooling": "smooth"},
                "imitation": {"teacher": {"name": "entropy"}},
            },
            r"imitation.teacher with agent.name = 'hnet', and an agent HNet draws from no distribution",
        ),
        (
            {"agent": {"name": "exact_count"}, "estimator": {"name": "off_policy"}},
            r"draws boundaries in the agent's place, and to an agent ExactCount",
        ),
    ],
)
def test_messages_for_wrong_names_and_options(updates: dict[str, Any], message: str) -> None:
    config = resolve([], updates)
    with pytest.raises(UserError, match=message):
        build_components(config, torch.device("meta"))
    with pytest.raises(UserError, match=message):
        check_components(config)


def test_own_classes_are_named_by_module() -> None:
    parts = build_components(
        resolve([], {"agent": {"name": "tokenv.agents.fixed:Random"}}), torch.device("meta")
    )
    assert type(parts.agent).__name__ == "Random"
    assert parts.estimator is None


def read(tmp_path: Path, text: str) -> Config:
    (tmp_path / "mine.yaml").write_text(text)
    return resolve([str(tmp_path / "mine.yaml")], {})


@pytest.mark.parametrize("word", ["on", "true", "'on'"])
def test_a_switch_may_be_true(tmp_path: Path, word: str) -> None:
    assert read(tmp_path, f"hardware: {{compile: {word}}}").hardware.compile == "on"


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "seed: 010\nrate: 1e-1\ntrain: {symbols: 8_000_000, learning_rate: 3.e-3, max_grad_norm: .inf}",
    )
    assert (config.seed, config.rate, config.train.symbols) == (10, 0.1, 8_000_000)
    assert (config.train.learning_rate, config.train.max_grad_norm) == (3e-3, float("inf"))
    assert read(tmp_path, "seed: 0x10\nestimator: {gamma: 1e-1}").estimator["gamma"] == 0.1
    merged = load_yaml_text(
        tmp_path, "a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\ne: 2016-07-01\nf: ~\ng: yes"
    )
    assert merged == {
        "a": {"b": 1, "c": 2},
        "d": {"b": 3, "c": 2},
        "e": "2016-07-01",
        "f": None,
        "g": "yes",
    }
    with pytest.raises(UserError, match=r"train.symbols = '1:30': expected a whole number"):
        read(tmp_path, "train: {symbols: 1:30}")


def load_yaml_text(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "text.yaml").write_text(text)
    return load_yaml(tmp_path / "text.yaml")


def test_duplicate_keys_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r'mine.yaml, line 3: found duplicate key "rate" .*: drop one'
    ):
        read(tmp_path, "rate: 0.1\nseed: 1\nrate: 0.2")
    with pytest.raises(UserError, match=r'mine.yaml, line 1: found duplicate key "symbols"'):
        read(tmp_path, "train: {symbols: 3, symbols: 4}")


def test_options_are_converted_for_their_constructor(tmp_path: Path) -> None:
    config = read(
        tmp_path, "estimator: {name: rloo, gamma: '9e-1', num_samples: 4.0, reward_only: true}"
    )
    assert build_components(config, torch.device("meta")).estimator.sampling.num_samples == 4


def test_a_stored_configuration_is_read_again() -> None:
    for name in RUNS:
        config = resolve([name], {})
        assert resolve([], {}, json.loads(json.dumps(config.as_dict()))) == config
    with pytest.raises(UserError, match=r"unknown key train.of_tomorrow"):
        resolve([], {}, {**Config().as_dict(), "train": {"of_tomorrow": 1}})


def test_every_section_has_a_role_in_resuming_and_comparing() -> None:
    every = set(Config().as_dict())
    assert set(MAY_CHANGE_ON_RESUME) == {"validation", "checkpoint", "hardware"}
    assert every - set(Config().identity()) == {"checkpoint"}
    assert Config().identity()["hardware"] == {"precision": "auto"}
    assert every - set(Config().method_settings()) == {"checkpoint", "seed"}


@pytest.mark.parametrize(
    ("key", "value", "same"),
    [
        ("hardware.precision", "float32", False),
        ("hardware.device", "cpu", True),
        ("hardware.threads", 3, True),
        ("hardware.compile", "off", True),
        ("checkpoint.keep", 7, True),
        ("validation.sequences", 7, False),
        ("seed", 7, False),
    ],
)
def test_what_makes_two_runs_the_same(key: str, value: Any, same: bool) -> None:
    other = resolve([], nest_key(key, value))
    assert (other.identity() == Config().identity()) is same


@pytest.mark.parametrize(
    "name",
    ["learned", "exact_count", "nawrot", "hnet", "uniform", "random", "entropy", "whitespace"],
)
def test_whether_an_agent_learns_is_known_without_building_it(name: str) -> None:
    pooling = {"nawrot": "mean", "hnet": "smooth"}.get(name, "select")
    config = resolve([], {"agent": {"name": name}, "model": {"pooling": pooling}})
    agent = build_components(config, torch.device("meta")).agent
    assert is_trainable(config.agent) is agent.trainable
    assert can_imitate(config.agent) is (agent.stochastic and not agent.fixed_count)
    trained = {
        "rate": 0.2,
        "codec_options": {},
        "codec": {"name": "bytes"},
        "model": {},
        "agent": {"name": name},
    }
    loaded = {"name": "loaded", "pretrained": "runs/1", "frozen": False, "trained": trained}
    assert is_trainable(loaded) is is_trainable(config.agent)
    assert not is_trainable(loaded | {"frozen": True})


@pytest.mark.parametrize(
    "program",
    [
        "import tokenv.config.files as f, tokenv.config.registry; f.resolve(['quick'], {})",
        "import sys; sys.argv = ['tokenv', 'list', 'configs']; from tokenv.cli.main import main; main()",
    ],
)
def test_reading_a_configuration_does_not_import_torch(program: str) -> None:
    program += "\nimport sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
