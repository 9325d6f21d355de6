"""The commands, as a user types them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tokenv.cli import main as cli
from tokenv.cli.experiment import run_command

ROOT = Path(__file__).parent.parent


def words(settings: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested settings as the words of a command line."""
    found: list[str] = []
    for key, value in settings.items():
        found += words(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}={value}"]
    return found


@pytest.fixture
def trained(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run_command("train", ["with", *words(tiny_settings)])
    return tmp_path / "runs" / "1"


def test_a_run_folder_holds_everything(trained: Path) -> None:
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
    assert json.loads((trained / "config.json").read_text())["agent"] == {"name": "learned", "window": 2}
    assert json.loads((trained / "run.json").read_text())["status"] == "COMPLETED"
    assert any("unet" in path for path, _ in json.loads((trained / "run.json").read_text())["experiment"]["sources"])
    with Image.open(trained / "curves.png") as picture:
        assert picture.size == (1440, 960)
    assert "<html" in (trained / "segments.html").read_text()
    assert "bits per byte" in (trained / "cout.txt").read_text()


def test_resuming_from_the_command_line(trained: Path) -> None:
    first = trained / "checkpoints" / "step-00000004"
    run_command("train", ["with", f"resume={first}"])
    again = json.loads((trained.parent / "2" / "metrics.json").read_text())
    whole = json.loads((trained / "metrics.json").read_text())
    for name in set(whole) - {"train/bytes_per_second"}:
        assert again[name]["values"] == whole[name]["values"], name
        assert again[name]["steps"] == whole[name]["steps"], name


def test_resume_refuses_another_run(trained: Path) -> None:
    with pytest.raises(ValueError, match="model cannot change when a run is resumed"):
        run_command("train", ["with", f"resume={trained}", "model.width=32"])
    with pytest.raises(ValueError, match="brings its own configuration: drop quick"):
        run_command("train", ["with", "quick", f"resume={trained}"])
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint in .*runs with checkpoints are .*1"):
        run_command("train", ["with", "resume=runs/9"])


def test_segment_writes_a_page(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "<b>für</b> \x1b[31m& Ende" * 3
    result = run_command("segment", ["with", f"run={trained}", f"text={text}", "seed=3"])
    shown = capsys.readouterr().out
    page = Path("segments.html").read_text()
    assert "\x1b[31m&" not in shown
    assert "<b>für" not in page
    assert 1 <= result["boundaries"] <= len(text)
    Path("text.bin").write_bytes(b"\xff\xfe plain")
    run_command("segment", ["with", f"run={trained}", "file=text.bin", "out=other.html", "threshold=True"])
    assert "\\xff" in Path("other.html").read_text()


def test_evaluate_and_generate(trained: Path) -> None:
    results = run_command("evaluate", ["with", f"run={trained}", "sequences=6", "batch_size=4"])
    assert results["sampled"]["bits_per_byte"] > 0
    assert results["thresholded"]["boundary_rate"] <= results["sampled"]["boundary_rate"]
    Path("other.txt").write_bytes(b"abc" * 100)
    elsewhere = ["with", f"run={trained}", "data.validation_source=other.txt", "sequences=6"]
    other = run_command("evaluate", elsewhere)["sampled"]
    assert other["bits_per_byte"] != results["sampled"]["bits_per_byte"]
    assert other["boundary_f1"] is None
    written = run_command("generate", ["with", f"run={trained}", "text=ab", "max_new=5", "temperature=0"])
    assert written.startswith("ab")
    assert len(written.encode()) >= 7


def test_bench_measures(tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = run_command("bench", ["with", *words(tiny_settings), "repeats=1"])
    assert figures["stepping_over_one_pass"] > 1
    assert 0 < figures["draw_share"] < 1
    assert 0 < figures["model_flops_utilisation"] < 1
    assert not Path("runs").exists()


def test_unobserved_runs_leave_nothing(
    tiny_settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("train", ["with", *words(tiny_settings), "-u"])["bits_per_byte"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "unknown command 'trian': did you mean 'train'?"),
        (["train", "with", "quik"], "no configuration 'quik'"),
        (["train", "with", "quick", "train.byts=3"], "command line: unknown key train.byts: did you mean 'bytes'?"),
        (["train", "with", "data.source=pyhton"], "python"),
        (["train", "with", "agent.name=lerned"], "agent.name = 'lerned' is unknown"),
        (["train", "with", "agent.nme=uniform"], "agent.nme is no option of agent 'learned': did you mean 'name'?"),
        (["segment", "with", "run=runs/1"], 'expected one of text="..." and file=PATH'),
        (["segment", "with", "text=a"], "run is missing"),
        (["segment", "with", "run=runs/1", "file=no.txt"], "there is no such file"),
        (["evaluate", "with", "run=runs/1", "checkpoint=last"], "expected best or latest"),
        (["evaluate", "with", "run=nowhere/1"], "no complete checkpoint"),
        (["bench", "with", "repeats=0"], "repeats = 0"),
    ],
)
def test_mistakes_end_with_one_message_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tokenv", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenv: ")]
    assert len(said) == 1
    assert message in said[0]


def test_help_and_config_list(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tokenv"])
    cli.main()
    assert "tokenv train" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tokenv", "configs"])
    cli.main()
    assert "quick" in capsys.readouterr().out


def test_ctrl_c_saves_and_says_how_to_go_on(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    tiny_settings["train"] |= {"bytes": 10**8}
    command = [sys.executable, "-m", "tokenv.cli", "train", "with", *words(tiny_settings)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("runs/1/checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: tokenv train with resume=runs/1" in errors
    assert json.loads((tmp_path / "runs/1/run.json").read_text())["status"] == "INTERRUPTED"
