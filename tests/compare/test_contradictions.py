"""A run's folder is held against its checkpoint: a comparison takes no run for another."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import settings

from tokenv.compare.store import (
    describe_versions,
    find_contradiction,
    find_run,
    finished_run,
    plugin_sources,
    read_run,
)
from tokenv.config.files import resolve
from tokenv.config.schema import Config
from tokenv.core import trust
from tokenv.core.errors import UserError
from tokenv.core.run_folders import write_digests
from tokenv.training.trainer import train

SHORT = settings(train={"symbols": 512})
CONFIGS = [resolve([], SHORT | {"seed": seed}) for seed in (0, 1)]


def store_run(folder: Path, config: Config) -> None:
    """Train, and record what Sacred does."""
    train(config, folder / "checkpoints", lambda *_: None)
    sources = [[str(file), f"_sources/{name}"] for name, file in plugin_sources(config).items()]
    experiment = {"name": "tokenv-train", "sources": sources}
    record = {"experiment": experiment, "status": "COMPLETED"}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.json").write_text(json.dumps(config.as_dict()))


@pytest.fixture(scope="module")
def stored_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs of different seeds."""
    store = tmp_path_factory.mktemp("stored")
    for number, config in enumerate(CONFIGS):
        store_run(store / str(number), config)
    return store


@pytest.fixture
def store(stored_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored_once, tmp_path / "runs"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(store: Path, capsys: pytest.CaptureFixture[str], why: str) -> None:
    """Neither taken where its folder is named nor found as the run that it says it is; every message says why."""
    with pytest.raises(UserError, match=rf"runs: .*{why}"):
        finished_run(store / "0")
    stored = read_run(store / "0")
    assert stored is not None
    assert find_run(stored.config, store) is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tokenv: warning: {store / '0'}")


def test_runs_as_they_were_left_agree(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, config in enumerate(CONFIGS):
        run = finished_run(store / str(number))
        assert find_contradiction(run) == ""
        assert find_run(config, store) == run
    assert capsys.readouterr().err == ""


def test_swapped_checkpoints_are_noticed(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(store / "0" / "checkpoints")
    shutil.copytree(store / "1" / "checkpoints", store / "0" / "checkpoints")
    refused(store, capsys, r"config\.json has seed = 0, but .*step-\d+ has 1")


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("agent", {"name": "uniform"}, "agent.name = 'uniform', but .* has 'learned'"),
        ("rate", 0.3, "rate = 0.3, but"),
        ("estimator", {"name": "rloo"}, "estimator.name = 'rloo', but"),
        ("data", CONFIGS[0].as_dict()["data"] | {"seed": 7}, "data.seed = 7, but"),
        (
            "hardware",
            {"precision": "bfloat16"},
            "hardware.precision = 'bfloat16', but .* has 'float32'",
        ),
    ],
)
def test_a_changed_configuration_is_noticed(
    section: str, values: Any, message: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(store / "0" / "config.json", **{section: values})
    refused(store, capsys, rf"config\.json has {message}")


def test_a_run_that_is_not_at_its_end_is_not_finished(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (last,) = sorted((store / "0" / "checkpoints").glob("step-*"))[-1:]
    change(last / "state.json", symbols=256)
    write_digests(last)
    refused(store, capsys, "run.json says that the run is finished, but .* has seen 256 symbols")


def test_what_no_result_depends_on_may_differ(store: Path) -> None:
    change(store / "0" / "config.json", hardware=CONFIGS[0].as_dict()["hardware"] | {"threads": 3})
    assert finished_run(store / "0").config.hardware.threads == 3


def test_a_run_in_another_precision_is_another_run(store: Path) -> None:
    own = CONFIGS[0]
    assert own.hardware.precision == "float32"
    assert find_run(replace(own, hardware=replace(own.hardware, threads=3)), store) is not None
    assert find_run(replace(own, hardware=replace(own.hardware, precision="auto")), store) is None


def test_a_run_of_an_edited_plug_in_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "edited_trick.py"
    module.write_text(
        "from tokenv.estimators import reinforce\n\ndef trick():\n    return reinforce(0.9)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = resolve([], SHORT | {"estimator": {"name": "edited_trick:trick"}})
    store = tmp_path / "runs"
    with trust.allowing("edited_trick:trick"):
        before = plugin_sources(config)
        store_run(store / "0", config)
        assert find_run(config, store) is not None
        module.write_text(module.read_text().replace("0.9", "0.5"))
        assert find_run(config, store) is None
        assert f"{store / '0'} was trained with another {module}" in capsys.readouterr().err
        assert find_run(config, store, before) is not None
    monkeypatch.delitem(sys.modules, "edited_trick")


def test_runs_of_different_source_files_are_told_apart(store: Path) -> None:
    """A file of which one run knows nothing, such as a plug-in's, says nothing about the others."""
    first, second = (finished_run(store / name) for name in "01")
    every = {"training/trainer.py": "trainer_1.py", "lm/unet.py": "unet_1.py"}
    assert describe_versions([]) == ""
    alike = [replace(first, sources=every), replace(second, sources=every | {"a.py": "a_1.py"})]
    assert describe_versions(alike) == ""
    other = replace(second, sources=every | {"lm/unet.py": "unet_2.py"})
    sentence = describe_versions([*alike, other])
    assert "trained with different versions of lm/unet.py: a new store=" in sentence
