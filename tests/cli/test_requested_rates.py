"""Commands at requested rates and budgets."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tokenv
from tokenv.cli.main import run_command
from tokenv.core.errors import UserError

FEW = ["sequences=6", "batch_size=6"]


@pytest.fixture
def ranged(
    train_once: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(train_once("rate.min=0.1", "rate.max=0.6"), tmp_path / "runs")
    return tmp_path / "runs" / "1"


def test_a_run_with_a_range(ranged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["with", f"run={ranged}", *FEW, "rates=[0.15, 0.3, 0.5]"]
    report = run_command("evaluate", [*words, "calibrate=True", "json=evaluation.json"])
    shown = capsys.readouterr().out
    assert "bits per byte ±" in shown
    assert "rates: rates.csv, rates.png" in shown
    points = report["points"]
    assert [(p["way"], p["target_rate"]) for p in points] == [
        (way, rate) for rate in (0.15, 0.3, 0.5) for way in ("conditioned", "calibrated")
    ]
    conditioned = [p for p in points if p["way"] == "conditioned"]
    assert (
        conditioned[0]["boundary_rate"]
        < conditioned[1]["boundary_rate"]
        < conditioned[2]["boundary_rate"]
    )
    assert conditioned[0]["flops"] < conditioned[1]["flops"] < conditioned[2]["flops"]
    assert json.loads(Path("evaluation.json").read_text()) == report
    with Path("rates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [p["loss"] for p in points]
    assert Path("rates.png").read_bytes().startswith(b"\x89PNG")
    plain = run_command("evaluate", [*words, "out=null"])["points"]
    assert [p["way"] for p in plain] == ["conditioned"] * 3

    budget = f"flops={conditioned[1]['flops']}"
    (met,) = run_command("evaluate", ["with", f"run={ranged}", *FEW, budget, "out=null"])["points"]
    assert met["target_rate"] == pytest.approx(conditioned[1]["boundary_rate"])
    assert run_command(
        "generate", ["with", f"run={ranged}", "text=ab", "max_new_tokens=20", budget]
    ).startswith("ab")
    run_command("segment", ["with", f"run={ranged}", "text=some text", "out=null", "rate=0.55"])
    assert capsys.readouterr().err == ""
    check_budgets(ranged)
    assert "warning: rate = 0.057971 is outside the range" in capsys.readouterr().err
    run_command("generate", ["with", f"run={ranged}", "text=ab", "max_new_tokens=2", "rate=0.05"])
    assert (
        "warning: rate = 0.05 is outside the range that this run was trained for"
        in capsys.readouterr().err
    )
    assert run_command("evaluate", ["with", f"run={ranged}", *FEW, "calibrate=True"]).keys() == {
        *("sampled", "thresholded", "calibrated")
    }


def test_several_runs_on_one_text(ranged: Path, tiny_words: list[str]) -> None:
    run_command("train", ["with", *tiny_words])
    words = [f"run={ranged}", "rates=[0.2, 0.4]", *FEW]
    points = run_command("evaluate", ["with", *words, "other_runs=['runs/2']"])["points"]
    assert [(p["run"], p["way"], p["target_rate"]) for p in points] == [
        (str(ranged), "conditioned", 0.2),
        (str(ranged), "conditioned", 0.4),
        ("runs/2", "calibrated", 0.2),
        ("runs/2", "calibrated", 0.4),
    ]
    alone = run_command("evaluate", ["with", *words, "out=null"])["points"]
    assert alone == points[:2]
    run_command("train", ["with", *tiny_words, "data.seq_len=16"])
    with pytest.raises(
        UserError,
        match=r"other_runs: runs/3 has data\.seq_len = 16, and .* has 32: expected the same",
    ):
        run_command("evaluate", ["with", *words, "other_runs=['runs/3']"])
    with pytest.raises(
        UserError, match=r"other_runs = \['runs/2'\]: expected rates or flops beside it"
    ):
        run_command("evaluate", ["with", f"run={ranged}", "other_runs=['runs/2']"])


def test_a_run_of_one_rate(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_command(
        "evaluate", ["with", f"run={trained}", *FEW, "rates=[0.1, 0.4]", "out=null"]
    )
    assert [p["way"] for p in report["points"]] == ["calibrated", "calibrated"]
    with pytest.raises(UserError, match=r"rate = 0\.3: this run was trained for one rate, 0\.2"):
        run_command("generate", ["with", f"run={trained}", "text=ab", "rate=0.3"])
    text = "a text that is cut as often as it is asked for"
    cut = run_command("segment", ["with", f"run={trained}", f"text={text}", "out=null", "rate=0.5"])
    assert cut["boundaries"] == pytest.approx(len(text) / 2, abs=1)
    assert cut["boundaries"] == sum(tokenv.load(trained).spans(text, rate=0.5).boundaries)
    check_budgets(trained)
    capsys.readouterr()
    run_command("segment", ["with", f"run={trained}", f"text={'ab ' * 30}", "out=null", "tokens=1"])
    assert (
        "tokens = 1: no logit bias draws it in this text; the nearest is 4"
        in capsys.readouterr().err
    )


def check_budgets(run: Path) -> None:
    """Check that a text is segmented into the requested number of tokens."""
    text = "a text that is cut into just as many tokens as it may have, in pieces"
    for tokens in (4, 10, 40):
        words = [f"run={run}", f"text={text}", "out=null", "json=cut.json"]
        run_command("segment", ["with", *words, f"tokens={tokens}"])
        (cut,) = json.loads(Path("cut.json").read_text()).values()
        assert len(cut["tokens"]) == tokens
        assert "".join(token["text"] for token in cut["tokens"]) == text


def test_an_entropy_weight_is_compared_with_a_constant_bias(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["with", f"run={trained}", *FEW, "rates=[0.3]"]
    points = run_command("evaluate", [*words, "entropy_weight=[1]"])["points"]
    assert [(p["way"], p["entropy_weight"]) for p in points] == [
        ("calibrated", 0),
        ("entropy-weighted", 1),
    ]
    assert points[1]["difference"] == pytest.approx(points[1]["loss"] - points[0]["loss"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "entropy-weighted" in shown
    assert f"{points[1]['difference']:+.4f}" in shown
    assert Path("rates.png").read_bytes().startswith(b"\x89PNG")
    assert run_command("evaluate", [*words, "out=null"])["points"] == points[:1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rates=[0.1, 2]"], r"rates = 2\.0: expected boundaries per symbol in \(0, 1\)"),
        (["rates=0.1"], "rates = 0.1: expected numbers, in a list"),
        (["rates=[0.1]", "flops=1e6"], r"flops = 1e\+06 and rates = .*: expected one of them"),
        (["entropy_weight=[1]"], r"entropy_weight = \[1\.0\]: expected rates or flops beside it"),
        (
            ["rates=[0.1]", "entropy_weight=[9]"],
            r"entropy_weight = \[9\.0\]: expected logits per nat, from -4 to 4",
        ),
        (["flops=-1"], r"flops = -1\.0: expected floating-point operations per symbol"),
        (["rates=[0.1]", "tasks=piqa"], "tasks are scored at a run's own rate"),
    ],
)
def test_invalid_requests_are_rejected(trained: Path, words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_command("evaluate", ["with", f"run={trained}", *words])
    with pytest.raises(UserError, match=r"flops = .* and rate = .*: expected one of them"):
        run_command("generate", ["with", f"run={trained}", "text=a", "rate=0.1", "flops=1e5"])
    for more, expected in (
        ("tokens=0", "tokens = 0: expected a whole number of at least 1"),
        ("tokens=9", "expected 1 to 1, the bytes"),
    ):
        with pytest.raises(UserError, match=expected):
            run_command("segment", ["with", f"run={trained}", "text=a", more])
    with pytest.raises(UserError, match=r"tokens = .* and rate = .*: expected one of them"):
        run_command("segment", ["with", f"run={trained}", "text=a", "rate=0.1", "tokens=1"])
