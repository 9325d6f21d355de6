"""Commands as Sacred experiments: observers of every kind finish their runs, and a program may bring its own."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

import tokenv
from tokenv.cli.experiment import experiment
from tokenv.cli.main import run_command
from tokenv.core.errors import UserError
from tokenv.data.documents import write_documents

with warnings.catch_warnings():  # Sacred's own, of pkg_resources
    warnings.simplefilter("ignore")
    from sacred.observers import RunObserver

ROOT = Path(__file__).parents[2]
TEXTS = [f"document number {i}, whose bytes are many enough\n" * 4 for i in range(60)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Mine(RunObserver):
    """Record the events which it receives."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.sources: dict[str, str] = {}
        self.dependencies: list[str] = []
        self.artifacts: dict[str, bytes] = {}
        self.metrics: set[str] = set()

    def started_event(self, ex_info: Any, *_: Any, **__: Any) -> str:
        self.told.append("started")
        self.sources = dict(ex_info["sources"])
        self.dependencies = ex_info["dependencies"]
        return "mine"

    def artifact_event(self, name: str, filename: str, *_: Any, **__: Any) -> None:
        self.artifacts[name] = Path(filename).read_bytes()

    def log_metrics(self, metrics_by_name: dict[str, Any], info: Any) -> None:
        self.metrics |= set(metrics_by_name)

    def completed_event(self, stop_time: Any, result: Any) -> None:
        self.told.append("completed")
        self.result = result


def test_an_observer_of_ones_own_hears_of_everything(tiny_words: list[str]) -> None:
    mine = Mine()
    ex = experiment("train", *tiny_words)
    ex.observers.append(mine)
    ex.run()
    assert mine.told == ["started", "completed"]
    assert set(mine.artifacts) == {"curves.png", "segments.html"}
    assert {"train/bits_per_byte", "validation/bits_per_byte"} <= mine.metrics
    assert mine.result["bits_per_byte"] > 0
    # It keeps no files: they are in a folder of the run's own.
    assert tokenv.load("runs/mine").tokens("abc")
    assert Path("runs/mine/curves.png").read_bytes() == mine.artifacts["curves.png"]


@pytest.mark.parametrize("command", ["evaluate", "segment", "generate"])
def test_every_command_is_an_experiment(command: str, tiny_words: list[str]) -> None:
    experiment("train", *tiny_words, store="runs").run()
    words = {
        "evaluate": ["sequences=4"],
        "segment": ["text=abc", "out=null"],
        "generate": ["text=abc", "max_new_tokens=2"],
    }
    mine = Mine()
    ex = experiment(command, "run=runs/1", *words[command])
    ex.observers.append(mine)
    ex.run()
    assert mine.told == ["started", "completed"]


def test_another_word_is_one_message() -> None:
    with pytest.raises(UserError, match="command = 'trian' is unknown: did you mean 'train'"):
        experiment("trian")
    with pytest.raises(UserError, match="no configuration 'quik'"):
        experiment("train", "quik")


def test_sources_and_versions_of_plug_ins_are_recorded(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "their_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "tricks.py").write_text("from their_package.more import rloo as trick\n")
    (package / "more.py").write_text("from tokenv.estimators.recipes import rloo\n")
    about = tmp_path / "site" / "theirs-3.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 3.1\n")
    (about / "RECORD").write_text("their_package/__init__.py,,\n")
    (tmp_path / "loose_agent.py").write_text("from tokenv.agents.learned import Learned as Loose\n")
    for folder in (tmp_path, tmp_path / "site"):
        monkeypatch.syspath_prepend(str(folder))
    words = [word for word in tiny_words if not word.startswith("agent.name")]
    mine = Mine()
    ex = experiment(
        "train", *words, "agent.name=loose_agent:Loose", "estimator.name=their_package.tricks:trick"
    )
    ex.observers.append(mine)
    ex.run()
    names = {Path(source).name for source in mine.sources}
    assert {"tricks.py", "more.py", "loose_agent.py", "train.py"} <= names
    assert "theirs==3.1" in mine.dependencies
    for name in ("loose_agent", "their_package", "their_package.tricks", "their_package.more"):
        sys.modules.pop(name, None)


# --- observers behind Sacred's flags ---


def train_in_a_process(*words: str) -> None:
    """For Sacred's observers warn, and warnings are errors here."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-m", "tokenv", "train", "with", *words], env=environment, check=True
    )


def test_a_tiny_db_holds_the_run_and_its_files(tiny_words: list[str]) -> None:
    """It reads its files again when a run is completed, and leaves hundreds of them open."""
    pytest.importorskip("tinydb")
    pytest.importorskip("hashfs")
    pytest.importorskip("tinydb_serialization")
    train_in_a_process(*tiny_words, "-t", "db")
    (path,) = Path("db").glob("*.json")
    (stored,) = json.loads(path.read_text())["runs"].values()
    assert stored["status"] == "COMPLETED"
    assert [artifact[0] for artifact in stored["artifacts"]] == ["segments.html", "curves.png"]
    assert tokenv.load(f"runs/{stored['_id']}").tokens("abc")


def test_an_sql_database_holds_the_result(tiny_words: list[str]) -> None:
    """The column of its result holds a number."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    train_in_a_process(*tiny_words, "-s", "sqlite:///runs.db")
    engine = sqlalchemy.create_engine("sqlite:///runs.db")
    with engine.connect() as connection:
        (stored,) = connection.execute(sqlalchemy.text("select status, result from run")).fetchall()
    engine.dispose()
    assert stored[0] == "COMPLETED"
    assert 0 < stored[1] < 9


def test_a_queued_run_is_stored_whole_and_started_later(
    tiny_words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("train", ["with", *tiny_words, "--queue"])
    assert (
        "queued: runs/1; start it with: tokenv train with runs/1/config.json"
        in capsys.readouterr().out
    )
    record = json.loads(Path("runs/1/run.json").read_text())
    assert record["status"] == "QUEUED"
    assert all(Path("runs", kept).is_file() for _, kept in record["experiment"]["sources"])
    assert len(record["experiment"]["sources"]) > 100
    run_command("train", ["with", "runs/1/config.json"])
    assert json.loads(Path("runs/2/run.json").read_text())["status"] == "COMPLETED"


# --- tokenv.train ---


def _settings(tiny_settings: dict[str, Any]) -> dict[str, Any]:
    return tiny_settings | {"data": {"seq_len": 32, "validation": 0.2}}


@pytest.mark.parametrize(
    "texts",
    [
        TEXTS,
        [text.encode() for text in TEXTS],
        Dataset.from_dict({"words": TEXTS}),
        (text for text in TEXTS),
    ],
    ids=["str", "bytes", "datasets", "generator"],
)
def test_texts_in_memory_are_trained_on(tiny_settings: dict[str, Any], texts: Any) -> None:
    model = tokenv.train(_settings(tiny_settings), texts=texts, column="words", seed=3)
    assert model.config.seed == 3
    assert model.tokens("document number 7")
    record = json.loads(Path("runs/1/run.json").read_text())
    assert record["status"] == "COMPLETED"
    (kept,) = Path("runs/_texts").iterdir()
    assert model.config.data.source == str(kept.resolve())
    assert kept.name == write_documents(TEXTS, Path("elsewhere")).name  # whichever way they come
    # the texts are still there
    run_command("train", ["with", "resume=runs/1/checkpoints/step-00000004"])
    results = [json.loads(Path(f"runs/{run}/run.json").read_text())["result"] for run in (1, 2)]
    assert results[0] == results[1]


def test_a_configuration_by_name_a_store_and_an_observer(
    tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    mine = Mine()
    small = {name: of for name, of in tiny_settings.items() if name not in ("data", "agent")}
    model = tokenv.train(
        "words",
        store=tmp_path / "there",
        observers=[mine],
        data={"seq_len": 32, "words_documents": 80, "lexicon_size": 20, "validation": 0.1},
        **small,
    )
    assert model.config.data.source == "words"
    assert mine.told == ["started", "completed"]
    assert (tmp_path / "there" / "1" / "metrics.json").is_file()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "expected several documents"),
        ([], "texts is empty"),
        ([1, 2], r"column 'text' of texts\[0\] holds int"),
        (["too short"], "holds 1 non-empty documents"),
        ([{"body": "x"}], r"texts\[0\] has no column 'text' but body"),
    ],
)
def test_texts_that_are_none_are_one_message(
    tiny_settings: dict[str, Any], texts: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        tokenv.train(_settings(tiny_settings), texts=texts)
    assert [path for path in Path("runs/_texts").glob("*") if path.name.startswith(".")] == []


def test_a_wrong_key_is_one_message() -> None:
    with pytest.raises(UserError, match=r"unknown key train.symbls: did you mean 'symbols'"):
        tokenv.train({}, train={"symbls": 1})
