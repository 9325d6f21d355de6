"""Time the use of trained models: bytes read and written a second, FLOPs and cache.

Run `python examples/inference_speed.py runs/1 runs/2 …`, on an otherwise idle machine.

All models read and write the same texts in turn, in one run. Medians of the rounds are printed with the least and the
most, so that models are compared by ratios of one table.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import tokenv
from tokenv.lab.costs import interleave
from tokenv.library.model import Model
from tokenv.lm.flops import reading_flops

BYTES = 512  # of a text
TEXTS = 64  # which are read, or written, together
PROMPT = 16
FLOAT_BYTES = 4
COLUMNS = (
    "run",
    "tokens per byte",
    "FLOPs per byte",
    "bytes read a second",
    "written, one text",
    f"written, {TEXTS} texts",
    f"cache after {BYTES} bytes, KiB",
)


def cache_kib(model: Model, tokens: float) -> float:
    """Return the KiB of keys and values of one text of ``BYTES`` bytes: two vectors a layer and position, float32."""
    config = model.lm.config
    positions = (config.down_layers + config.up_layers) * min(config.window, BYTES)
    positions += config.mid_layers * tokens
    return 2 * config.width * positions * FLOAT_BYTES / 1024


def measure(models: dict[str, Model], texts: list[bytes], rounds: int) -> dict[str, list[float]]:
    """Return the bytes a second of each model and way in each round; a first round is not counted."""
    ways = {}
    size = {}
    prompts = [text[:PROMPT] for text in texts]
    for name, model in models.items():
        write = partial(model.generate, max_new_tokens=BYTES - PROMPT, seed=0)
        ways[f"{name} read"] = partial(model.log_likelihood, texts)
        size[f"{name} read"] = TEXTS * BYTES
        ways[f"{name} one"] = partial(write, prompts[0])
        size[f"{name} one"] = BYTES
        ways[f"{name} together"] = partial(write, prompts)
        size[f"{name} together"] = TEXTS * BYTES
    seconds = interleave(ways, rounds, torch.device("cpu"), warmup=1)
    return {way: [size[way] / each for each in seconds[way]] for way in ways}


def in_words(values: list[float]) -> str:
    """Return the median of some speeds with the least and the most."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    """Time the models of the command line, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("runs", nargs="+", help="folders of runs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    source = Path(argparse.__file__).read_bytes()
    texts = [source[start : start + BYTES] for start in range(0, TEXTS * BYTES, BYTES)]
    models = {run: tokenv.load(run) for run in arguments.runs}
    speed = measure(models, texts, arguments.rounds)
    table = Table(*COLUMNS)
    for run, model in models.items():
        tokens = statistics.mean(len(spans) for spans in model.tokens(texts))
        flops = reading_flops(model.lm, tokens / BYTES, model.agent, BYTES)
        table.add_row(
            run,
            f"{tokens / BYTES:.3f}",
            f"{flops:,.0f}",
            in_words(speed[f"{run} read"]),
            in_words(speed[f"{run} one"]),
            in_words(speed[f"{run} together"]),
            f"{cache_kib(model, tokens):,.0f}",
        )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
