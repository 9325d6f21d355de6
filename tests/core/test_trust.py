"""A stored run names code: nothing of it is imported or called unless the user has named it himself."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import overrides

from tokenv.cli.lab import Variance
from tokenv.cli.main import run_command
from tokenv.compare.command import resolve_comparison
from tokenv.compare.scheduler import run_all
from tokenv.compare.store import finished_run, stored_runs
from tokenv.config import registry
from tokenv.config.commands import stored_config
from tokenv.config.files import resolve
from tokenv.config.literals import read_words
from tokenv.config.schema import Config
from tokenv.core import checkpoints, trust
from tokenv.core.checkpoints import write_json
from tokenv.core.errors import UserError
from tokenv.core.run_folders import write_digests
from tokenv.evaluation.loaded_run import load_run
from tokenv.evaluation.run_state import RunState
from tokenv.training.trainer import train

CODE = """
from pathlib import Path
Path("imported").touch()
from tokenv.agents.fixed import Random
from tokenv.estimators.recipes import rloo
from tokenv.lm.codecs.base import ByteCodec

def agent(command="", **context):
    Path("called").touch()
    return Random(0.2, 32)

def text(**options):
    return "text"

def number(**options) -> int:
    Path("called").touch()
    return 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module into the working folder which leaves files when it is imported and when it is called."""
    monkeypatch.chdir(tmp_path)
    name = f"code_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.fixture
def run(tiny_settings: dict[str, Any], tmp_path: Path) -> Path:
    train(resolve([], tiny_settings), tmp_path / "runs" / "1" / "checkpoints", lambda *_: None)
    return tmp_path / "runs" / "1"


def plant(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the configuration in all checkpoints of a run, as somebody would who passes it on."""
    for path in checkpoints.list_complete(run / "checkpoints"):
        state = json.loads((path / "state.json").read_text())
        change(state["config"])
        (path / "state.json").write_text(json.dumps(state))
        write_digests(path)
    config = resolve([], {}).as_dict()
    change(config)
    record = {
        "experiment": {"name": "tokenv-train"},
        "status": "COMPLETED",
        "start_time": "2026-01-01T00:00:00",
    }
    (run / "config.json").write_text(json.dumps(config))
    (run / "run.json").write_text(json.dumps(record))


def trained(name: str) -> dict[str, Any]:
    old = {
        "rate": 0.2,
        "codec_options": {},
        "model": {},
        "codec": {"name": name},
        "agent": {"name": "learned"},
    }
    return {"name": "loaded", "pretrained": "x", "frozen": True, "trained": old}


PLANTS: dict[str, Callable[[dict[str, Any], str], object]] = {
    "codec": lambda config, name: config.update(codec={"name": name, "command": "touch called"}),
    "agent": lambda config, name: config.update(agent={"name": name}),
    "estimator": lambda config, name: config.update(estimator={"name": name}),
    "rate_target": lambda config, name: config.update(rate_target={"name": name}),
    "data": lambda config, name: config["data"].update(kind=name),
    "density": lambda config, name: config.update(
        data=config["data"] | {"kind": "series", "source": "regimes", "options": {"context": 8}},
        codec={"name": "series", "density": name},
    ),
    "trained codec": lambda config, name: config.update(agent=trained(name)),
    "callback": lambda config, name: config.update(callbacks=[{"name": name}]),
    "plain callback": lambda config, name: config.update(callbacks=[name]),
}
READERS = {
    "segment": ["run=runs/1", "text=abc"],
    "serve": ["run=runs/1", "port=0"],
    "evaluate": ["run=runs/1"],
    "generate": ["run=runs/1", "text=abc"],
    "forecast": ["run=runs/1"],
    "train": ["resume=runs/1"],
    "variance": ["run=runs/1"],
    "compare": ["runs=['runs/1']", "-u"],
}


def test_no_command_runs_what_a_stored_run_names(run: Path, code: str, tmp_path: Path) -> None:
    name = f"{code}:agent"
    plant(run, lambda config: PLANTS["codec"](config, name))
    for command, words in READERS.items():
        with pytest.raises(
            UserError, match=rf"runs/1.* names code, '{name}', .* add trust_code={name}"
        ):
            run_command(command, ["with", *words])
    assert not (tmp_path / "imported").exists()
    assert not (tmp_path / "called").exists()
    assert code not in sys.modules
    assert sorted(path.name for path in run.parent.iterdir()) == ["1"]


@pytest.mark.parametrize("where", PLANTS)
def test_no_section_is_believed(where: str, run: Path, code: str, tmp_path: Path) -> None:
    plant(run, lambda config: PLANTS[where](config, f"{code}:agent"))
    readers = [
        lambda: load_run(str(run)),
        lambda: resolve([], {"agent": {"pretrained": str(run)}}),
        lambda: finished_run(run),
        lambda: RunState.read(checkpoints.find(run)),
        lambda: stored_config("resume", str(run), []),
    ]
    for read in readers:
        with pytest.raises(UserError, match="names code"):
            read()
    assert not (tmp_path / "imported").exists()


def test_a_store_is_searched_without_importing_what_its_runs_name(
    run: Path, code: str, tmp_path: Path
) -> None:
    assert len(list(stored_runs(run.parent))) == 0  # Sacred has not recorded it
    plant(run, lambda config: None)
    assert len(list(stored_runs(run.parent))) == 1
    plant(run, lambda config: PLANTS["data"](config, f"{code}:agent"))
    assert len(list(stored_runs(run.parent))) == 0
    assert not (tmp_path / "imported").exists()


def test_nor_does_variance_run_what_a_stored_comparison_names(code: str, tmp_path: Path) -> None:
    for key, value in (("estimators", [f"{code}:agent(x=1)"]), ("reference", f" {code}:agent")):
        options = {
            "config": resolve(["quick"], {}).as_dict(),
            "estimators": ["rloo"],
            "reference": "rloo",
        }
        write_json(Path("options.json"), options | {key: value}, "options.json")
        with pytest.raises(UserError, match=rf"options.json names code, '{code}:agent'"):
            Variance.resolve([], {"resume": "."})
    for damaged in ("", "[]", "{}", '{"config": {}, "estimators": 3, "reference": ""}'):
        Path("options.json").write_text(damaged)
        with pytest.raises(UserError, match=r"options\.json is damaged"):
            Variance.resolve([], {"resume": "."})
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("word", [True, "True", "NAME", ["NAME"], "other:thing, NAME"])
def test_the_users_word_lets_it(
    word: bool | str | list[str], run: Path, code: str, tmp_path: Path
) -> None:
    name = f"{code}:agent"
    plant(run, lambda config: config.update(agent={"name": name}))
    # the agent that is planted has no tensors
    for path in checkpoints.list_complete(run / "checkpoints"):
        saved = checkpoints.load_file(path / checkpoints.MODEL)
        of_lm = {owned: tensor for owned, tensor in saved.items() if owned.startswith("lm.")}
        checkpoints.save_file(of_lm, path / checkpoints.MODEL)
        write_digests(path)
    trust.allow(
        [name] if isinstance(word, list) else word if word is True else word.replace("NAME", name)
    )
    assert load_run(str(run)).components.agent.pooling is None
    assert (tmp_path / "called").exists()


@pytest.mark.parametrize("text", ["[NAME]", "[{name: NAME}]", "[{'name': 'NAME'}]"])
def test_a_callback_of_the_user_is_allowed_however_it_is_written(text: str, code: str) -> None:
    name = f"{code}:agent"
    values, _ = read_words([f"callbacks={text.replace('NAME', name)}"], Config)
    assert resolve([], values).callbacks == [{"name": name}]
    assert trust.granted() == [name]


@pytest.mark.parametrize("word", ["yes", 3, ["a"], {"a": 1}, None, "a:b,c", "[a:b,c:d]", "*"])
def test_other_values_than_names_are_refused(word: Any) -> None:
    with pytest.raises(
        UserError, match=r"trust_code = .*: expected the name that is to be trusted"
    ):
        trust.allow(word)


def test_what_the_user_trains_with_is_his_own(
    code: str, tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = overrides(tiny_settings)
    run_command("train", ["with", *words, f"estimator.name={code}:rloo"])
    assert trust.granted() == [f"{code}:rloo"]
    monkeypatch.setattr(trust, "_allowed", set())  # another process
    with pytest.raises(UserError, match=f"add trust_code={code}:rloo"):
        run_command("train", ["with", "resume=runs/1"])
    assert run_command("train", ["with", "resume=runs/1", f"trust_code={code}:rloo"])


def test_comparisons_hand_the_users_word_on(
    code: str, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    """To the processes that go on with his runs and measure them; those of others still need his word."""
    estimator = {"name": f"{code}:rloo"}
    mine = {
        "base": "tiny.yaml",
        "methods": {"mine": {"estimator": estimator}},
        "bpe_vocabulary": 260,
        "passages": 1,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_settings))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine | {"seeds": [0]}))
    options = resolve_comparison(["mine.yaml"], {})
    (folder,), failed = run_all(list(options.make_tasks()), options, progress=False)
    assert failed == {}
    assert folder is not None
    assert finished_run(folder).config.estimator == estimator


@pytest.mark.parametrize(
    ("kind", "table", "name", "message"),
    [
        (
            "codec",
            registry.CODECS,
            "os:system",
            r"codec\.name = 'os:system' is of Python's own library",
        ),
        ("agent", registry.AGENTS, "importlib.util:find_spec", "is of Python's own library"),
        ("agent", registry.AGENTS, "tokenv.lm.unet:UNet", "an? agent being an? Agent"),
        (
            "estimator",
            registry.ESTIMATORS,
            "tokenv.agents.fixed:Random",
            "an? estimator being an? Chain",
        ),
        ("rate_target", registry.RATE_TARGETS, "torch._C:_get_tracing_state", "is <built-in"),
        ("codec", registry.CODECS, "CODE:number", "is <function number"),
        (
            "codec",
            registry.CODECS,
            "CODE:text",
            "has built 'text': expected a class or a function that builds one",
        ),
    ],
)
def test_what_a_user_names_must_build_what_is_asked_for(
    kind: str, table: registry.Registry, name: str, message: str, code: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        registry.build(kind, {"name": name.replace("CODE", code), "command": "touch called"}, table)
    assert not (tmp_path / "called").exists()


def test_deep_nesting_is_looked_through() -> None:
    config: dict[str, Any] = {"name": "a:b"}
    for _ in range(100_000):
        config = {"agent": [config]}
    with pytest.raises(UserError, match="x names code, 'a:b'"):
        trust.check(config, "x")
