"""``tokenv bench``: figures, and nothing stored."""

from pathlib import Path

import pytest

from tokenv.cli.main import run_command


def test_bench_measures(tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    figures = run_command("bench", ["with", *tiny_words, "repeats=1"])
    assert figures["stepping_over_one_pass"] > 1
    apart = figures["stepping_differences"]
    assert set(apart) == {"encoding", "boundary probability", "early log-likelihood", "log-likelihood"}
    assert all(0 <= mean <= most < 1e-4 for mean, most in apart.values())
    rounded = run_command("bench", ["with", *tiny_words, "repeats=1", "hardware.precision=bfloat16"])
    for stage, (mean, most) in rounded["stepping_differences"].items():
        assert 1e-5 < mean < most < 1, stage
    assert 0 < figures["draw_share"] < 1
    assert 0 < figures["model_flops_utilisation"] < 1
    assert not Path("runs").exists()


def test_its_keys_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("bench", ["print_config", "with", "repeats=7"])
    shown = capsys.readouterr().out
    assert "repeats = 7" in shown
    assert "warmup_symbols = " in shown
