"""``tokenv bench`` prints its figures and stores nothing."""

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenv.cli.main import run_command
from tokenv.config.files import merge, resolve
from tokenv.core.errors import UserError
from tokenv.lab import costs
from tokenv.lab.config import BenchOptions
from tokenv.lab.costs import measure_updates
from tokenv.lab.speed import UpdateWork
from tokenv.training.process_group import Ranks


def test_bench_compares_stepping_with_one_pass(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    figures = run_command("bench", ["with", *tiny_words, "repeats=1"])
    assert figures["stepping_over_one_pass"] > 1
    apart = figures["stepping_differences"]
    assert set(apart) == {
        "encoding",
        "boundary probability",
        "early log-likelihood",
        "log-likelihood",
    }
    assert all(0 <= mean <= most < 1e-4 for mean, most in apart.values())
    rounded = run_command(
        "bench", ["with", *tiny_words, "repeats=1", "hardware.precision=bfloat16"]
    )
    for stage, (mean, most) in rounded["stepping_differences"].items():
        assert 1e-5 < mean < most < 1, stage
    assert 0 < figures["draw_share"] < 1
    assert 0 < figures["model_flops_utilisation"] < 1
    assert not Path("runs").exists()


def test_reading_and_generating_are_timed_by_rate(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["repeats=1", "stepping=False", "rates=[0.1, 0.5]"]
    rates = run_command("bench", ["with", *tiny_words, *options])["rates"]
    assert list(rates) == ["0.1", "0.5"]
    assert rates["0.1"]["flops"] < rates["0.5"]["flops"]
    assert all(of["reading"] > of["writing"] > 0 < of["writing_together"] for of in rates.values())
    assert "bytes per second by rate" in capsys.readouterr().out
    with pytest.raises(
        UserError, match=r"rates = 1: expected boundaries per symbol, at least 1 / data\.seq_len"
    ):
        run_command("bench", ["with", *tiny_words, "rates=[1.0]"])


def test_forecasts_are_timed_by_samples(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    of_series = [
        "data.kind=series",
        "data.source=bursts",
        "data.options.context=8",
        "codec.name=series",
    ]
    settings = [
        *tiny_words,
        *of_series,
        "data.seq_len=24",
        "repeats=1",
        "samples=[256, 512]",
        "horizon=4",
    ]
    speed = run_command("bench", ["with", *settings, "codec.horizon=4"])["forecasts_per_second"]
    assert list(speed) == ["256", "512", "direct"]
    assert speed["direct"] > speed["256"] > 0
    assert "forecasts per second, 4 steps after 20" in " ".join(capsys.readouterr().out.split())
    alone = run_command(
        "bench",
        ["with", *settings, "codec.horizon=4", "codec.direct=True", "data.options.context=20"],
    )
    assert list(alone["forecasts_per_second"]) == ["direct"]
    for more, message in (
        (["samples=[1]"], "expected whole numbers of at least 2"),
        (["horizon=20"], "horizon = 20: expected 1 to 15"),
        (["rates=[0.5]"], "expected neither scaling nor rates beside it"),
    ):
        with pytest.raises(UserError, match=message):
            run_command("bench", ["with", *settings, *more])
    with pytest.raises(UserError, match=r"with data\.kind = 'text': expected series"):
        run_command("bench", ["with", *tiny_words, "repeats=1", "samples=[256, 512]", "horizon=4"])


def test_its_keys_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_command("bench", ["print_config", "with", "repeats=7"])
    shown = capsys.readouterr().out
    assert "repeats = 7" in shown
    assert "warmup_symbols = " in shown


def test_scaling_measures_every_size(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["repeats=1", "plain=True", "scaling={'data.seq_len': [32]}", "out=grown"]
    rows = run_command("bench", ["with", *tiny_words, *options])["scaling"]
    assert [(row["key"], row["value"]) for row in rows] == [("data.seq_len", 32)]
    assert all(row["plain_over_learned"] > 0 and row["peak_memory_gib"] > 0 for row in rows)
    header, *lines = Path("grown.csv").read_text().splitlines()
    assert header.startswith("key,value,step_seconds")
    assert len(lines) == 1
    assert Path("grown.png").stat().st_size > 10_000


def test_an_update_of_one_process_is_timed(tiny_settings: dict[str, object]) -> None:
    config = resolve(
        [],
        tiny_settings
        | {"train": {"symbols": 1000, "batch_size": 2, "gradient_accumulation_steps": 3}},
    )
    figures = measure_updates(BenchOptions(config, repeats=2), Ranks())
    assert figures["step_seconds_min"] <= figures["step_seconds"] <= figures["step_seconds_max"]
    symbols = 2 * 3 * config.data.seq_len
    assert figures["symbols_per_second"] * figures["step_seconds"] == pytest.approx(symbols)
    assert figures["peak_memory_gib"] > 0


@pytest.mark.slow
def test_scaling_measures_every_number_of_processes(
    tiny_words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [
        "repeats=1",
        "train.gradient_accumulation_steps=2",
        "scaling={'ranks': [1, 2], 'data.seq_len': [32, 64]}",
    ]
    one, two, size, _ = run_command("bench", ["with", *tiny_words, *options])["scaling"]
    assert two["peak_memory_gib"] > 1.5 * one["peak_memory_gib"]  # of both processes
    assert "model_flops_utilisation" in size
    assert len(Path("scaling.csv").read_text().splitlines()) == 5
    assert Path("scaling.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["scaling={'ranks': [0]}"], r"scaling.ranks = 0: expected numbers of processes"),
        (["scaling={'ranks': [1.5]}"], r"scaling.ranks = 1.5: expected numbers of processes"),
        (
            ["scaling={'ranks': [7]}"],
            r"7 processes cannot share the \d+ sequences of an update evenly",
        ),
        (["scaling={'data.seq_len': 32}"], r"scaling.data.seq_len = 32: expected a list of sizes"),
        (
            ["scaling={'data.seq_len': []}"],
            r"scaling.data.seq_len = \[\]: expected a list of sizes",
        ),
        (["scaling={'data.sequence': [32]}"], r"data.sequence"),
        (["scaling={'model.width': [7]}"], r"model.heads = 2 does not divide model.width = 7"),
    ],
)
def test_invalid_scaling_is_rejected(tiny_words: list[str], words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run_command("bench", ["with", *tiny_words, *words])


def test_memory_and_time_are_planned(
    tiny_words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = run_command("bench", ["with", *tiny_words, "plan=True", "train.batch_size=64"])
    assert plan["ranks"][-1]["world"] == 64
    shown = " ".join(capsys.readouterr().out.split())
    assert "GiB per rank" in shown
    assert "989 TFLOP/s each, 40% used" in shown
    with pytest.raises(UserError, match=r"utilisation = 2\.0: expected a number in \(0, 1\]"):
        run_command("bench", ["with", *tiny_words, "plan=True", "utilisation=2.0"])
    with pytest.raises(UserError, match="plan = True: expected neither samples"):
        run_command("bench", ["with", *tiny_words, "plan=True", "rates=[0.2]"])


HIGH_PEAK = {"train": {"learning_rate": 10.0, "symbols": 10**9, "warmup_symbols": 10**8}}


def test_an_update_repeats_the_first_one_of_a_run(tiny_settings: dict[str, Any]) -> None:
    """At the peak learning rate, the policy would leave its rate, and a GPU would compile other shapes."""
    work = UpdateWork(resolve([], merge(tiny_settings, HIGH_PEAK)))
    counts = []
    for _ in range(4):
        work.update()
        counts.append(int(work.action_BT.sum()))
    mean = statistics.mean(counts)
    assert all(abs(count - mean) < 0.3 * mean for count in counts), counts


def test_updates_of_several_processes_repeat_the_first_one_too(
    tiny_settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = []
    step = costs.optimizer_step

    def recorded(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        rates.extend(group["lr"] for group in optimizer.param_groups)
        step(optimizer, *arguments)

    monkeypatch.setattr(costs, "optimizer_step", recorded)
    config = resolve([], merge(tiny_settings, HIGH_PEAK))
    measure_updates(BenchOptions(config, repeats=1), Ranks())
    assert rates
    assert max(rates) < 1e-3
