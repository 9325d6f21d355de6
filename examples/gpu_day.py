"""What a GPU has to say, in at most 40 minutes: tests, speed, and the estimators at 31M parameters.

    python examples/gpu_day.py --minutes 40 --books books.train.jsonl.xz books.valid.jsonl.xz

Parts run in order of value, each in a process of its own with a share of the time, and docs/gpu.md is written anew
after every part: a cut leaves a result. Where nothing but torch is installed, --wheels FOLDER names a folder of wheels
of the other packages (`pip download`); they are installed beside, not into, the machine's Python. --small tries the
script itself, on any machine.
"""

from __future__ import annotations

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
    "common.data.seq_len=128 shared.data.seq_len=128 common.train.symbols=4096 shared.train.symbols=4096 "
    "common.validation.sequences=8 shared.validation.sequences=8 common.hardware.compile=off base=small seeds=[0] "
    "shared.hardware.compile=off only=['reinforce','uniform']"
)


@dataclass
class Part:
    """One thing to be run.

    Attributes:
        title: in the report.
        minutes: it may take.
        words: of the command, after ``python -m``.
        store: folder in which Sacred leaves its figures; None if the end of what it prints is its result.
    """

    title: str
    minutes: float
    words: list[str]
    store: Path | None = None
    report: list[str] = field(default_factory=list)


def parts(scratch: Path, books: list[str], small: bool) -> list[Part]:
    """All parts, the most valuable first."""

    def bench(config: str, *words: str) -> Part:
        store = scratch / "-".join(["bench", config, *(word.partition("=")[0] for word in words)])
        more = TRIAL.split() if small else list(words)
        command = ["tokenv", "bench", "with", config, "stepping=False", "plain=True", *more, "-F", str(store)]
        return Part(f"`tokenv {' '.join(command[1:-2])}`", 6, command, store)

    own = [f"{where}.data.source={books[0]}" for where in ("common", "shared")] if books else []
    if len(books) > 1:
        own += [f"{where}.data.validation_source={books[1]}" for where in ("common", "shared")]
    compare = ["tokenv", "compare", "with", "compare-31m", *own, *(TRIED.split() if small else [])]
    files = [str(ROOT / "tests" / name) for name in ("test_gpu.py", "data/test_data_prefetch.py")]
    tests = ["pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    return [
        Part("`pytest -m gpu`", 8, tests),
        bench("fineweb-147m", "train.batch_size=32"),
        bench("aspect-4"),
        bench("aspect-4", "hardware.small_flex_blocks=True"),
        Part(f"`tokenv {' '.join(compare[1:])}`", 30, [*compare, f"store={scratch / 'compare'}"]),
    ]


def run(part: Part, seconds: float, folder: Path, environment: dict[str, str]) -> None:
    """Run one part and note what came out, whatever that is."""
    started = time.monotonic()
    command = [sys.executable, "-m", *part.words]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        printed, _ = process.communicate(timeout=seconds)
        ended = f"ended with {process.returncode}"
    except subprocess.TimeoutExpired:
        process.terminate()  # a comparison then saves what it has
        printed, _ = process.communicate()
        ended = "cut off, its time was up"
    part.report.append(f"{ended} after {time.monotonic() - started:.0f} s")
    found = sorted(part.store.glob("*/run.json")) if part.store else []
    if found and process.returncode == 0:
        figures = json.loads(found[-1].read_text())["result"]
        lines = [f"| {words} | {figures[name]:.4g} |" for name, words in SPEED.items() if name in figures]
        part.report += ["", "| | |", "|---|---|", *lines]
    else:
        part.report += ["", "```", *printed.strip().splitlines()[-40:], "```"]


def write(out: Path, done: list[Part], small: bool) -> None:
    """The report, of what has been run so far."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "a CPU"
    lines = ["# On a GPU", "", f"`python examples/gpu_day.py` on {device}, torch {torch.__version__}, Python "
             f"{platform.python_version()}, {time.strftime('%Y-%m-%d')}."]  # fmt: skip
    if small:
        lines += ["", "**A trial of the script (--small): no figure here means anything.**"]
    for part in done:
        lines += ["", f"## {part.title}", *part.report]
    out.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run all parts that fit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=40, help="for all parts together")
    parser.add_argument("--books", nargs="*", default=[], metavar="FILE", help="text to train on, and to validate on")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of what is not installed")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave runs and reports there")
    parser.add_argument("--small", action="store_true", help="try the script, on any machine")
    options = parser.parse_args()
    books, end = [str(Path(book).resolve()) for book in options.books], time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        scratch = (options.keep or Path(folder)).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        path = [str(ROOT)]
        if options.wheels:
            beside = Path(folder) / "packages"
            wheels = sorted(map(str, options.wheels.glob("*.whl")))
            pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(beside)]
            subprocess.run([*pip, *wheels], check=True)
            path.append(str(beside))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        done: list[Part] = []
        for part in parts(scratch, books, options.small):
            left = end - time.monotonic()
            if left > 0:
                run(part, min(left, 60 * part.minutes), scratch, environment)
            else:
                part.report.append("not begun: no time was left")
            done.append(part)
            write(options.out, done, options.small)
            print(part.title, part.report[0], flush=True)


if __name__ == "__main__":
    main()
