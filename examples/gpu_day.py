"""Test and measure tokenv on a GPU in at most 40 minutes: tests, speed, and the estimators at 31M parameters.

    python examples/gpu_day.py --minutes 40 --books books.train.jsonl.xz books.valid.jsonl.xz

The tasks run in order of value, each in its own process with a share of the time, and docs/gpu.md is rewritten after
every task, so that an interruption leaves a result. If only torch is installed, --wheels FOLDER names a folder with
wheels of the other packages (`pip download`) and of tokenv itself (`pip wheel --no-deps .`), whose entry points the
tests need; they are installed beside the machine's Python, not into it. --small tries the script itself on any machine.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
SPEED = {
    "step_seconds": "seconds a step",
    "symbols_per_second": "bytes per second",
    "peak_memory_gib": "peak memory, GiB",
    "matrix_peak_tflops_per_second": "a matrix product's TFLOP/s, measured",
    "model_flops_utilisation": "of that",
    "plain_over_learned": "a plain transformer's seconds over ours",
    "time_over_given": "seconds over given boundaries'",
    "draw_share": "drawing the boundaries, of a step",
    "flops_policy_share": "FLOPs of the policy, of the model's",
}
TRIAL = "model.width=32 model.heads=2 data.seq_len=128 train.batch_size=2 repeats=1 hardware.compile=off"
TRIED = (
    "common.data.seq_len=128 pretrain.data.seq_len=128 common.train.symbols=4096 pretrain.train.symbols=4096 "
    "common.validation.sequences=8 pretrain.validation.sequences=8 common.hardware.compile=off base=small seeds=[0] "
    "pretrain.hardware.compile=off only=['reinforce','uniform']"
)


@dataclass
class Task:
    """One command of the script.

    Attributes:
        title: heading in the report.
        minutes: limit of its time.
        words: words of the command after ``python -m``.
        store: Sacred's folder with its figures; None if the end of its output is the result.
        report: lines of the report.
    """

    title: str
    minutes: float
    words: list[str]
    store: Path | None = None
    report: list[str] = field(default_factory=list)


def list_tasks(scratch: Path, books: list[str], small: bool) -> list[Task]:
    """Return all tasks, the most valuable first."""

    def bench(config: str, *words: str) -> Task:
        store = scratch / "-".join(["bench", config, *(word.partition("=")[0] for word in words)])
        more = TRIAL.split() if small else list(words)
        command = [
            "tokenv",
            "bench",
            "with",
            config,
            "stepping=False",
            "plain=True",
            *more,
            "-F",
            str(store),
        ]
        return Task(f"`tokenv {' '.join(command[1:-2])}`", 6, command, store)

    own = [f"{where}.data.source={books[0]}" for where in ("common", "pretrain")] if books else []
    if len(books) > 1:
        own += [f"{where}.data.validation_source={books[1]}" for where in ("common", "pretrain")]
    compare = ["tokenv", "compare", "with", "compare-31m", *own, *(TRIED.split() if small else [])]
    files = [str(ROOT / "tests" / name) for name in ("test_gpu.py", "data/test_prefetch.py")]
    tests = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    return [
        Task("`pytest -m gpu`", 8, tests),
        bench("paper-147m", "train.batch_size=32"),
        bench("aspect-4"),
        bench("aspect-4", "hardware.small_flex_blocks=True"),
        Task(f"`tokenv {' '.join(compare[1:])}`", 30, [*compare, f"store={scratch / 'compare'}"]),
    ]


def run(task: Task, seconds: float, folder: Path, environment: dict[str, str]) -> None:
    """Run one task and add its result to its report."""
    started = time.monotonic()
    command = [sys.executable, "-m", *task.words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        ended = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.terminate()  # a comparison then saves what it has
        printed, _ = process.communicate()
        ended = "cut off, its time was up"
    task.report.append(f"{ended} after {time.monotonic() - started:.0f} s")
    found = sorted(task.store.glob("*/run.json")) if task.store else []
    if found and process.returncode == 0:
        figures = json.loads(found[-1].read_text())["result"]
        lines = [
            f"| {words} | {figures[name]:.4g} |" for name, words in SPEED.items() if name in figures
        ]
        task.report += ["", "| | |", "|---|---|", *lines]
    else:
        task.report += ["", "```", *printed.strip().splitlines()[-40:], "```"]


def write(out: Path, done: list[Task], small: bool) -> None:
    """Write the report of the tasks which have run so far."""
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or "a CPU"
    )
    lines = ["# On a GPU", "", f"`python examples/gpu_day.py` on {device}, torch {torch.__version__}, Python "
             f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}."]  # fmt: skip
    if small:
        lines += ["", "**A trial of the script (--small): no figure here means anything.**"]
    for task in done:
        lines += ["", f"## {task.title}", *task.report]
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run all tasks which fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40, help="for all tasks together")
    parser.add_argument(
        "--books",
        nargs="*",
        default=[],
        metavar="FILE",
        help="text to train on, and to validate on",
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels of what is not installed")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave runs and reports there")
    parser.add_argument("--small", action="store_true", help="try the script, on any machine")
    options = parser.parse_args()
    books, end = (
        [str(Path(book).resolve()) for book in options.books],
        time.monotonic() + 60 * options.minutes,
    )
    with tempfile.TemporaryDirectory() as folder:
        scratch = (options.keep or Path(folder)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        path = [str(ROOT)]
        if options.wheels:
            beside = Path(folder) / "packages"
            wheels = sorted(map(str, options.wheels.glob("*.whl")))
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-index",
                "--no-deps",
                "--target",
                str(beside),
            ]
            subprocess.run([*pip, *wheels], check=True)
            path.append(str(beside))
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])
        }
        done: list[Task] = []
        for task in list_tasks(scratch, books, options.small):
            left = end - time.monotonic()
            if left > 0:
                run(task, min(left, 60 * task.minutes), scratch, environment)
            else:
                task.report.append("not begun: no time was left")
            done.append(task)
            write(options.out, done, options.small)
            print(task.title, task.report[0], flush=True)


if __name__ == "__main__":
    main()
