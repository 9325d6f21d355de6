"""Made-up comparisons of text and of series, as reports show them."""

import csv
import itertools
import math
from dataclasses import replace

import numpy as np

from tokenv.compare.compared import Agreement, ComparedMethod, ComparedRun, Comparison, Pair
from tokenv.report.characters import characters
from tokenv.report.series import Patched
from tokenv.report.words import SERIES

TEXTS = (b"def f(x):\n\treturn <x> & 'y'", "ein Stück".encode())
ALL_OF_SERIES = ["methods", "differences", "loss-steps", "loss-flops", "boundary-rate", "neg-log-prob", "patch-lengths"]
WINDOWS = ["window-1", "window-2"]


def a_run(seed=0, bits=2.0, probability=0.3, points=60, **changes):
    x = [1000.0 * (i + 1) for i in range(points)]
    history = {
        "train/bits_per_byte": (x, [bits + 3 / (i + 1) for i in range(points)]),
        "train/flops": (x, [50 * at for at in x]),
        "train/boundary_rate": (x, [0.2 + 0.1 / (i + 1) for i in range(points)]),
        "train/neg_log_prob": (x, [0.1 + 0.4 / (i + 1) for i in range(points)]),
        "validation/bits_per_byte": (x[9::10], [bits + 3 / (i + 1) for i in range(9, points, 10)]),
    }
    passages = [characters(t, [probability] * len(t), [i % 3 == 0 for i in range(len(t))]) for t in TEXTS]
    run = ComparedRun(
        seed=seed,
        folder=f"runs/{seed}",
        loss=bits,
        loss_early=bits + 0.1,
        boundary_rate=0.2,
        flops=3e6 / 7,
        seconds=12.5,
        history=history,
        token_lengths=[1, 2, 4, 1],
        agreement={"whitespace": Agreement(0.5, 0.25, 1 / 3)},
        passages=passages,
    )
    return replace(run, **changes)


def a_method(name, bits=2.0, seeds=2, probability=0.3, **changes):
    runs = [a_run(seed, bits + 0.01 * seed, probability, **changes) for seed in range(seeds)]
    values = [run.loss for run in runs]
    error = float(np.std(values, ddof=1) / seeds**0.5) if seeds > 1 else math.nan
    return ComparedMethod(name, runs, {"agent.name": name}, float(np.mean(values)), error, 0.02)


def a_window(name="series 3 @ 40", steps=40, channels=1, gold=True, seed=0):
    generator = np.random.default_rng(seed)
    value_NC = generator.normal(size=(steps, channels)).cumsum(0)
    value_NC[generator.random((steps, channels)) < 0.1] = np.nan
    known = {"gold_N": np.arange(steps) % 9 == 8} if gold else {}
    return Patched(name, value_NC, np.arange(steps - 1) % 5 == 0, generator.random(steps - 1), context=8, **known)


def of_series(method, **changes):
    """The same method, had it read series: lower losses by 3, windows, and a loss on the test split."""
    runs = []
    for run in method.runs:
        history = {name.replace("bits_per_byte", "nats_per_value"): curve for name, curve in run.history.items()}
        windows = [a_window(seed=1), a_window("series 5 @ 0", channels=3, gold=False)]
        of_run = {"passages": [], "windows": windows, "agreement": {"change points": Agreement(0.5, 0.25, 1 / 3)}}
        losses = {"loss": run.loss - 3, "loss_early": run.loss_early - 3, "loss_test": run.loss - 2.5}
        runs.append(replace(run, history=history, **of_run | losses | changes))
    return replace(method, runs=runs, loss=method.loss - 3)


def a_comparison_of_series(methods, **changes):
    said = {"passages": [], "unit": "nats_per_value", "words": SERIES, "has_test": True}
    return a_comparison([of_series(method) for method in methods], **said | changes)


def a_comparison(methods, **changes):
    pairs = []
    for one, other in itertools.combinations(methods, 2):
        gap = one.loss - other.loss
        sign = "not separable" if abs(gap) < 0.05 else ("better" if gap < 0 else "worse")
        pairs.append(Pair(one.name, other.name, gap, (gap - 0.05, gap + 0.05), sign, f"{one.name} is {sign}."))
    made = Comparison("Title", {"budget": "4 MB"}, methods, pairs, ["first", "second"], [0.1, 0.2], notes=["A note."])
    return replace(made, **changes)


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
