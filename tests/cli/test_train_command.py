"""``tokenv train``: files of a run, resuming and stopping."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fresh_process import CONTEXT, run
from PIL import Image

from tokenv.cli import train
from tokenv.cli.main import run_command
from tokenv.compare.store import read_run
from tokenv.core.sequences import SequenceBatch


def test_a_run_folder_is_complete(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert names >= {
        "config.json",
        "run.json",
        "cout.txt",
        "metrics.json",
        "checkpoints",
        "curves.png",
        "segments.html",
    }
    metrics = json.loads((trained / "metrics.json").read_text())
    assert metrics["train/bits_per_byte"]["steps"][-1] == 2560
    assert len(metrics["validation/bits_per_byte"]["values"]) == 3
    assert json.loads((trained / "config.json").read_text())["agent"] == {
        "name": "learned",
        "window": 2,
    }
    assert json.loads((trained / "run.json").read_text())["status"] == "COMPLETED"
    sources = [
        path for path, _ in json.loads((trained / "run.json").read_text())["experiment"]["sources"]
    ]
    for part in ("tokenv/lm/unet.py", "agents/learned.py", "estimators/recipes.py"):
        assert [path for path in sources if path.endswith(part)], part
    with Image.open(trained / "curves.png") as picture:
        assert picture.size == (1440, 1920)
    page = (trained / "segments.html").read_text()
    assert "<html" in page
    assert "Boundaries by class of byte" in page
    assert "after so many bytes of training" in page
    assert "Most frequent tokens" in page
    assert "bits per byte" in (trained / "cout.txt").read_text()


def test_resuming_from_the_command_line(trained: Path) -> None:
    first = trained / "checkpoints" / "step-00000004"
    run_command("train", ["with", f"resume={first}"])
    again = json.loads((trained.parent / "2" / "metrics.json").read_text())
    whole = json.loads((trained / "metrics.json").read_text())
    for name in set(whole) - {"train/symbols_per_second"}:
        assert again[name]["values"] == whole[name]["values"], name
        assert again[name]["steps"] == whole[name]["steps"], name


def test_resuming_a_finished_run_prints_its_results_again(trained: Path) -> None:
    """It writes into its own folder and creates no other."""
    before = json.loads((trained / "run.json").read_text())
    curves = (trained / "curves.png").read_bytes()
    for name in ("curves.png", "segments.html"):
        (trained / name).unlink()
    assert run_command("train", ["with", f"resume={trained}"]) == before["result"]
    assert (trained / "curves.png").read_bytes() == curves
    assert "<html" in (trained / "segments.html").read_text()
    assert json.loads((trained / "run.json").read_text()) == before
    assert [path.name for path in trained.parent.glob("[0-9]*")] == ["1"]


@pytest.mark.parametrize("status", ["RUNNING", "FAILED"])
def test_a_run_killed_during_its_report_is_completed(status: str, trained: Path) -> None:
    before, metrics = (
        json.loads((trained / name).read_text()) for name in ("run.json", "metrics.json")
    )
    del metrics["validation/bits_per_byte"]  # Sacred writes metrics every ten seconds
    (trained / "metrics.json").write_text(json.dumps(metrics))
    (trained / "curves.png").unlink()
    killed = before | {"status": status, "result": None, "fail_trace": ["..."]}
    (trained / "run.json").write_text(json.dumps(killed))
    run = read_run(trained)
    assert run is not None
    assert run.is_resumable

    assert run_command("train", ["with", f"resume={trained}"]) == before["result"]
    after = json.loads((trained / "run.json").read_text())
    assert (after["status"], after["result"]) == ("COMPLETED", before["result"])
    assert "fail_trace" not in after
    assert (trained / "curves.png").is_file()
    again = json.loads((trained / "metrics.json").read_text())["validation/bits_per_byte"]
    assert again["values"][-1] == before["result"]["bits_per_byte"]
    assert len(again["steps"]) == len(again["timestamps"]) == 3
    assert [path.name for path in trained.parent.glob("[0-9]*")] == ["1"]


def test_resume_rejects_other_settings(trained: Path) -> None:
    with pytest.raises(ValueError, match=r"model.width = 32 cannot change when a run is resumed"):
        run_command("train", ["with", f"resume={trained}", "model.width=32"])
    with pytest.raises(ValueError, match="brings its own configuration: drop quick"):
        run_command("train", ["with", "quick", f"resume={trained}"])
    with pytest.raises(
        FileNotFoundError, match=r"no complete checkpoint in .*runs with checkpoints are .*1"
    ):
        run_command("train", ["with", "resume=runs/9"])


def test_unobserved_runs_leave_nothing(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("train", ["with", *tiny_words, "-u"])["bits_per_byte"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT, signal.SIGINT]]
)
def test_stopping_saves_and_prints_how_to_resume(
    signals: list[signal.Signals], tiny_words: list[str], tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("stdout", "stderr")]
    words = ["train", "with", *tiny_words, "train.symbols=100000000"]
    process = CONTEXT.Process(target=run, args=(words, tmp_path, (), files), daemon=True)
    process.start()
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("runs/1/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.2)
    for number in signals:
        os.kill(process.pid, number)
        time.sleep(0.02)  # the last ones come while Sacred stores what has become of the run
    process.join(60)
    errors = files[1].read_text()
    assert process.exitcode == 130
    assert "resume it with: tokenv train with resume=runs/1" in errors
    assert "Traceback" not in errors
    assert json.loads((tmp_path / "runs/1/run.json").read_text())["status"] == "INTERRUPTED"


@pytest.mark.parametrize(("most", "sequences"), [(96, 8), (2**17, 2)])
def test_statistics_use_few_long_sequences(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    sequences: int,
) -> None:
    """Otherwise the statistics of sequences of 16,384 bytes take many times as long as the training."""
    sizes = []
    habits_in = train.boundary_stats_of_run

    def counted(trained: Any, batch: SequenceBatch) -> Any:
        sizes.append(batch.symbol_BN.numel())
        return habits_in(trained, batch)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "boundary_stats_of_run", counted)
    monkeypatch.setattr(train, "STATS_BYTES", most)
    run_command("train", ["with", *tiny_words, f"validation.sequences={sequences}"])
    assert 0 < sizes[0] <= 96
    assert sizes[0] <= 32 * sequences
