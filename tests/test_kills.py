"""Killed at random moments and gone on with, everything ends as if it had never been killed: bit for bit.

``TOKENV_KILLS`` says how often each of training, comparing and the laboratory is killed. Processes are forked from one
that has imported everything, so that kills hit work and not imports.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import shrunk
import yaml
from fresh_process import CONTEXT, run
from tiny import overrides

from tokenv.compare.job import Job
from tokenv.core import checkpoints

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TOKENV_KILLS", "12"))
IN_A_ROW = 3  # then a run is left alone until its end
Line = tuple[str, list[str]]


def work(folder: Path, name: str, words: list[str]) -> None:
    """Run one command in a process of its own; its output goes to a file."""
    os.environ["XDG_CACHE_HOME"] = str(folder.parent / "cache")
    Job.__call__ = shrunk.in_this_process  # type: ignore[method-assign]
    run([name, "with", *words], folder, (), [folder / "output.txt"] * 2)


def until_done(
    folder: Path, line: Callable[[Path], Line], moments: Callable[[], float | None]
) -> tuple[int, int]:
    """Run, kill, go on, until done: how often it was killed, and how often there was something to go on from.

    Args:
        folder: an empty one.
        line: what is to be run, given what lies in the folder.
        moments: seconds after which the next process is killed; None to let it be.
    """
    killed = resumed = 0
    while True:
        name, words = line(folder)
        resumed += any(word.startswith("resume=") for word in words) or (
            name == "compare" and bool(killed)
        )
        process = CONTEXT.Process(target=work, args=(folder, name, words))
        process.start()
        process.join(moments())
        if process.exitcode is None:
            process.kill()
            process.join()
        if process.exitcode == 0:
            return killed, resumed
        assert process.exitcode == -signal.SIGKILL, (folder / "output.txt").read_text()
        killed += 1
        for path in folder.glob("runs/*/*.json"):
            json.loads(path.read_text())  # whole, at any moment


def killed_at_random(
    tmp_path: Path,
    line: Callable[[Path], Line],
    outcome: Callable[[Path], Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Check as often as ``KILLS`` says that the outcome equals that of a process which was never killed."""
    whole = tmp_path / "whole"
    whole.mkdir()
    until_done(whole, line, lambda: None)
    (whole / "output.txt").unlink()
    for path in whole.glob("runs"):
        path.rename(whole / "warm")
    started = time.monotonic()
    until_done(whole, line, lambda: None)
    seconds = time.monotonic() - started
    expected = outcome(whole)
    generator = random.Random()
    killed = resumed = trials = 0
    while killed < KILLS:
        trials += 1
        folder = tmp_path / f"trial-{trials}"
        folder.mkdir()
        moments = iter(
            [generator.uniform(0, seconds) for _ in range(min(IN_A_ROW, KILLS - killed))]
        )
        counted = until_done(folder, line, lambda moments=moments: next(moments, None))
        killed = killed + counted[0]
        resumed = resumed + counted[1]
        assert outcome(folder) == expected, f"{folder}, after {counted[0]} kills"
    with capsys.disabled():
        print(f"\n{killed} kills, {resumed} times gone on, {trials} of {trials} outcomes identical")


def weights_and_metrics(folder: Path) -> Any:
    """Return the bytes of parameters and optimizer state, and all metrics which do not depend on clocks."""
    path = checkpoints.list_complete(folder)[-1]
    state = json.loads((path / "state.json").read_text())
    metrics = {
        name: values
        for name, values in state["history"].items()
        if name != "train/symbols_per_second"
    }
    files = [(path / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors")]
    return metrics, state["validation"], state["step"], state["data"], files


def settings(tiny: dict[str, Any]) -> dict[str, Any]:
    train = tiny["train"] | {"symbols": 12_800}
    return tiny | {"train": train, "checkpoint": {"every_symbols": 512, "keep": 2}}


def test_killed_training_ends_as_if_never_killed(
    tiny_settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also while it saves, validates and draws: it saves at every second step."""
    words = overrides(settings(tiny_settings))

    def newest(folder: Path) -> Path | None:
        runs = sorted(folder.glob("runs/[0-9]*"), key=lambda path: int(path.name), reverse=True)
        return next((run for run in runs if checkpoints.list_complete(run / "checkpoints")), None)

    def line(folder: Path) -> Line:
        run = newest(folder)
        return "train", words if run is None else [f"resume={run.relative_to(folder)}"]

    def outcome(folder: Path) -> Any:
        run = newest(folder)
        assert run is not None
        record = json.loads((run / "run.json").read_text())
        assert record["status"] == "COMPLETED"
        assert (run / "curves.png").is_file()
        return record["result"], weights_and_metrics(run / "checkpoints")

    killed_at_random(tmp_path, line, outcome, capsys)


def both(tiny: dict[str, Any], folder: Path) -> None:
    (folder / "tiny.yaml").write_text(yaml.safe_dump(tiny))
    methods = {"uniform": {"agent": {"name": "uniform"}}, "learned": {}}
    values = {
        "base": "tiny.yaml",
        "seeds": [0],
        "methods": methods,
        "bpe_vocabulary": 260,
        "passages": 1,
    }
    (folder / "both.yaml").write_text(yaml.safe_dump(values))


def finished(folder: Path) -> dict[str, Path]:
    """Agents to the folders of their finished runs; each agent has one."""
    folders = {}
    for path in folder.glob("runs/*/run.json"):
        record = json.loads(path.read_text())
        if record["experiment"]["name"] == "tokenv-train" and record["status"] == "COMPLETED":
            agent = json.loads((path.parent / "config.json").read_text())["agent"]["name"]
            assert agent not in folders
            folders[agent] = path.parent
    return folders


def test_killed_comparing_ends_as_if_never_killed(
    tiny_settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def line(folder: Path) -> Line:
        both(settings(tiny_settings), folder)
        return "compare", ["both.yaml"]

    def outcome(folder: Path) -> Any:
        assert [path.name for path in folder.glob("runs/.*")] == [".locks"]
        runs = finished(folder)
        results = {
            agent: json.loads((run / "run.json").read_text())["result"]
            for agent, run in runs.items()
        }
        assert list(folder.glob("runs/*/report.html"))
        return results, {
            agent: weights_and_metrics(run / "checkpoints") for agent, run in sorted(runs.items())
        }

    killed_at_random(tmp_path, line, outcome, capsys)


def test_a_killed_laboratory_ends_as_if_never_killed(
    tiny_settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = "estimators=['reinforce', 'rloo', 'rebar']"
    few = [
        "checkpoints=2",
        "draws=8",
        "reference_draws=8",
        "batch_size=4",
        "timings=1",
        "warmup=1",
        "credit_draws=2",
    ]

    def line(folder: Path) -> Line:
        begun = sorted(folder.glob("runs/*/variance/options.json"))
        if begun:
            return "variance", [f"resume={begun[0].parent.relative_to(folder)}"]
        return "variance", [*overrides(tiny_settings), chosen, *few]

    def outcome(folder: Path) -> Any:
        (lab,) = folder.glob("runs/*/variance")
        assert (lab / "progress.png").is_file()
        return json.loads((lab / "variance.json").read_text())["moments"], weights_and_metrics(
            lab / "checkpoints"
        )

    killed_at_random(tmp_path, line, outcome, capsys)


def compare_command(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a comparison with real processes, and its environment."""
    environment = os.environ | {
        "PYTHONPATH": str(shrunk.ROOT),
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
    }
    return [sys.executable, "-m", "tokenv", "compare", "with", "both.yaml", "jobs=2"], environment


def test_any_process_is_killed(tiny_settings: dict[str, Any], tmp_path: Path) -> None:
    """The comparison, a job, or both: the same command ends with the same bits, and trains nothing twice.

    A job whose comparison was killed goes on, and the same command waits for it.
    """

    def outcome(folder: Path) -> Any:
        runs = finished(folder)
        return {
            agent: weights_and_metrics(run / "checkpoints") for agent, run in sorted(runs.items())
        }

    def run(folder: Path, moments: list[float]) -> None:
        folder.mkdir()
        longer = settings(tiny_settings)
        longer["train"] |= {"symbols": 100_000}
        both(longer, folder)
        command, environment = compare_command(folder)
        while True:
            with subprocess.Popen(command, cwd=folder, env=environment) as process:
                comparison = psutil.Process(process.pid)
                while moments and process.poll() is None:
                    time.sleep(moments.pop())
                    with suppress(psutil.NoSuchProcess):
                        generator.choice([comparison, *comparison.children()]).kill()
            if process.returncode == 0:
                return
            assert process.returncode == -signal.SIGKILL

    generator = random.Random()
    run(tmp_path / "whole", [])
    for trial in range(max(KILLS // 4, 1)):
        folder = tmp_path / f"trial-{trial}"
        run(folder, [generator.uniform(0, 20) for _ in range(4)])
        assert outcome(folder) == outcome(tmp_path / "whole")
        assert [path.name for path in folder.glob("runs/.*")] == [".locks"]


def test_a_killed_comparisons_runs_go_on_and_are_waited_for(
    tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    long = settings(tiny_settings)
    long["train"] |= {"symbols": 200_000}
    both(long, tmp_path)
    command, environment = compare_command(tmp_path)

    def statuses() -> list[str]:
        records = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/run.json")]
        return sorted(
            each["status"] for each in records if each["experiment"]["name"] == "tokenv-train"
        )

    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        until = time.monotonic() + 120
        while len({path.parts[-3] for path in tmp_path.glob("runs/*/checkpoints/step-*")}) < 2:
            assert time.monotonic() < until
            time.sleep(0.2)
        process.kill()
    assert statuses() == ["RUNNING", "RUNNING"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert statuses() == ["COMPLETED", "COMPLETED"]
    assert [path.name for path in tmp_path.glob("runs/.*")] == [".locks"]


def test_sigterm_saves_and_says_how_to_continue(
    tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    endless = settings(tiny_settings)
    endless["train"] |= {"symbols": 10**8}
    both(endless, tmp_path)
    command, environment = compare_command(tmp_path)
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while len({path.parts[-3] for path in tmp_path.glob("runs/*/checkpoints/step-*")}) < 2:
            assert time.monotonic() < until
            time.sleep(0.2)
        process.terminate()
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; the same command goes on" in printed
    records = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/run.json")]
    statuses = {each["status"] for each in records if each["experiment"]["name"] == "tokenv-train"}
    assert statuses == {"INTERRUPTED"}
