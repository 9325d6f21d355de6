"""Data that a stored run names: read from the current folder, or where the user has named them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shrunk
import yaml
from tiny import overrides

import tokenv
from tokenv.cli.main import run_command
from tokenv.compare.command import resolve_comparison
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.run_evaluation import evaluate_run
from tokenv.compare.scheduler import run_all
from tokenv.config.files import merge
from tokenv.core import checkpoints, trust
from tokenv.core.errors import UserError
from tokenv.core.run_folders import write_digests
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.library.environments import TrainedModelBytesEnv

TEXT = "a line of text, and number {} of many\n"


@pytest.fixture
def words(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Of a run on a file of the user's."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    for name in ("books", "../private", "others"):
        Path(name).mkdir()
        for number in range(12):
            lines = (TEXT.format(f"{line} of text {number} of {name}") for line in range(30))
            Path(name, f"{number}.txt").write_text("".join(lines))
    return overrides(merge(tiny_settings, {"data": {"source": "books"}, "train": {"symbols": 512}}))


def plant(source: str, key: str = "source") -> None:
    """Return what an attacker may make a run name."""
    for path in checkpoints.list_complete(Path("runs/1/checkpoints")):
        state = json.loads((path / "state.json").read_text())
        state["config"]["data"][key] = source
        (path / "state.json").write_text(json.dumps(state))
        write_digests(path)
    config = json.loads(Path("runs/1/config.json").read_text())
    config["data"][key] = source
    Path("runs/1/config.json").write_text(json.dumps(config))


READERS = {
    "evaluate": ["run=runs/1", "sequences=4"],
    "train": ["resume=runs/1", "-u"],
    "variance": ["run=runs/1", "-u"],
    "compare": ["runs=['runs/1']", "bpe_vocabulary=260", "-u"],
}


def test_ones_own_runs_go_on_and_are_measured_without_a_word(
    words: list[str], another_process: Callable[[], None]
) -> None:
    run_command("train", ["with", *words])
    another_process()
    run_command("evaluate", ["with", *READERS["evaluate"]])
    another_process()
    run_command("train", ["with", "resume=runs/1"])
    another_process()
    run_command("train", ["with", "runs/1/config.json", "-u"])
    another_process()
    evaluate_run(Path("runs/1"), EvaluationRequest(1, 260))


@pytest.mark.parametrize("key", ["source", "validation_source"])
def test_no_command_reads_what_only_a_stored_run_names(
    key: str,
    words: list[str],
    another_process: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_command("train", ["with", *words])
    private = Path("../private").resolve()
    plant("../private", key)
    lines = [(command, ["with", *given]) for command, given in READERS.items()]
    for command, line in [*lines, ("train", ["with", "runs/1/config.json", "-u"])]:
        another_process()
        with pytest.raises(
            UserError, match=rf"runs/1.* names {private}, .* add trust_code={private}"
        ):
            run_command(command, line)
    another_process()
    with pytest.raises(UserError, match="which would be read"):
        TrainedModelBytesEnv(run="runs/1").reset(seed=0)
    another_process()
    run_command("segment", ["with", "run=runs/1", "text=abc", "out=null"])  # reads nothing of it
    for word in (
        f"trust_code={private}",
        "trust_code=True",
        "trust_code=['a:b','~/x','" + str(private) + "']",
        f"trust_code={private.parent}",
    ):
        another_process()
        run_command("evaluate", ["with", *READERS["evaluate"], word])
    another_process()
    with pytest.raises(UserError, match="names"):  # the word held for that command
        run_command("evaluate", ["with", *READERS["evaluate"]])
    run_command("evaluate", ["with", *READERS["evaluate"], f"data.{key}=others"])
    assert TrainedModelBytesEnv(run="runs/1", trust_code=str(private)).reset(seed=0)


def test_a_link_in_a_named_folder_is_not_followed_out_of_it(
    words: list[str], another_process: Callable[[], None]
) -> None:
    run_command("train", ["with", *words])
    Path("runs/1/books").symlink_to(Path("../private").resolve())
    plant("runs/1/books")
    another_process()
    with pytest.raises(UserError, match="which would be read"):
        run_command("evaluate", ["with", *READERS["evaluate"], f"trust_code={Path.cwd()}/runs"])


@pytest.mark.parametrize("place", ["link", "home", "above home"])
def test_the_current_folder_is_no_way_to_private_files(
    place: str,
    words: list[str],
    another_process: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_command("train", ["with", *words])
    run_command("evaluate", ["with", *READERS["evaluate"]])
    if place == "link":
        Path("runs/1/books").symlink_to(Path("../private").resolve())
        plant("runs/1/books")
    else:
        home = Path.cwd()
        if place == "above home":
            home = home / "user"
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("USERPROFILE", str(home))
    another_process()
    with pytest.raises(UserError, match="which would be read"):
        run_command("evaluate", ["with", *READERS["evaluate"]])


def test_what_is_named_in_python_is_the_users(
    words: list[str], another_process: Callable[[], None]
) -> None:
    load_corpus(DataConfig(source="../private", seq_len=32, validation=0.2))
    tokenv.train(store="runs", texts=[TEXT.format(n) * 30 for n in range(12)], **_settings(words))
    another_process()
    run_command("evaluate", ["with", *READERS["evaluate"]])


def _settings(words: list[str]) -> dict[str, Any]:
    from tokenv.config.literals import read_words

    return read_words([word for word in words if not word.startswith("data.source")])[0]


def test_comparisons_read_what_their_user_names(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their jobs too."""
    monkeypatch.setattr("tokenv.compare.job.Job.__call__", shrunk.in_this_process)
    Path("tiny.yaml").write_text(yaml.safe_dump(_settings(words) | {"seed": 0}))
    values = {"base": "tiny.yaml", "seeds": [0], "bpe_vocabulary": 260, "passages": 1}
    common = {"data": {"source": "../private"}}
    options = resolve_comparison([], values | {"common": common, "methods": {"one": {}}})
    tasks = list(options.make_tasks())
    assert trust.granted() == [str(Path("../private").resolve())]
    _, failed = run_all(tasks, options, progress=False)
    assert failed == {}


@pytest.mark.parametrize("file", ["../../private/1.txt", "ABSOLUTE", "zip://a::ABSOLUTE"])
def test_a_folder_of_the_hub_names_no_files_outside(file: str, words: list[str]) -> None:
    """Its README is data, too."""
    file = file.replace("ABSOLUTE", str(Path("../private/1.txt").resolve()))
    Path("set").mkdir()
    Path("set/a.txt").write_text("".join(TEXT.format(n) for n in range(200)))
    config = DataConfig(source="hub:set", seq_len=16, validation=0.2)
    load_corpus(config)
    Path("set/README.md").write_text(
        f"---\nconfigs:\n- config_name: default\n  data_files: {file}\n---\n"
    )
    with pytest.raises(
        UserError,
        match=r"hub data set 'set' (names .*private/1\.txt.* add trust_code=|cannot be opened)",
    ):
        load_corpus(config)
    if "zip" not in file:
        trust.allow([str(Path("../private/1.txt").resolve())])
        load_corpus(config)
