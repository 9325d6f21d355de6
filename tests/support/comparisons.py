"""Synthetic comparisons of text and of series, for tests of reports."""

import csv
import itertools
import math
from dataclasses import fields, replace

import numpy as np

from tokenv.compare.comparison import ComparedMethod, ComparedRun, Comparison
from tokenv.compare.config import EvaluationRequest
from tokenv.compare.run_evaluation import VERSION, Agreement, Learned, Passage, RunEvaluation
from tokenv.compare.score_statistics import Difference, apply_holm
from tokenv.config.schema import Config
from tokenv.data.config import DataConfig
from tokenv.series.kind import SeriesKind
from tokenv.series.patches import SeriesExcerpt
from tokenv.series.series_comparison import SeriesEvaluation

TEXTS = (b"def f(x):\n\treturn <x> & 'y'", "ein Stück".encode())
ALL_OF_SERIES = [
    "methods",
    "differences",
    "ranks",
    "loss-steps",
    "loss-flops",
    "boundary-rate",
    "neg-log-prob",
    "patch-lengths",
]
WINDOWS = ["window-1", "window-2"]
OF_SERIES = DataConfig(kind="series", source="regimes", options=SeriesKind(context=8))


def a_run(seed=0, bits=2.0, probability=0.3, points=60, **changes):
    x = [1000.0 * (i + 1) for i in range(points)]
    history = {
        "train/bits_per_byte": (x, [bits + 3 / (i + 1) for i in range(points)]),
        "train/flops": (x, [50 * at for at in x]),
        "train/boundary_rate": (x, [0.2 + 0.1 / (i + 1) for i in range(points)]),
        "train/neg_log_prob": (x, [0.1 + 0.4 / (i + 1) for i in range(points)]),
        "validation/bits_per_byte": (x[9::10], [bits + 3 / (i + 1) for i in range(9, points, 10)]),
    }
    evaluation = RunEvaluation(
        version=VERSION,
        checkpoint="step-1",
        evaluation_request=EvaluationRequest(2, 0),
        fingerprint="",
        unit="bits_per_byte",
        loss=[bits],
        document=[0],
        loss_early=bits + 0.1,
        boundary_rate=0.2,
        calibration=None,
        token_lengths=[1, 2, 4, 1],
        agreement={"whitespace": Agreement(0.5, 0.25, 1 / 3)},
        passages=[a_passage(text, probability) for text in TEXTS],
        learned=Learned(
            {"space": (0.25, 0.9), "letter": (0.75, 0.05)}, [("def ", 7), ("\xc3\xbc <b>", 2)]
        ),
    )
    config = Config(seed=seed, rate=0.1 if seed else 0.2)
    return changed(
        ComparedRun(f"runs/{seed}", config, 3e6 / 7, 12.5, history, evaluation), **changes
    )


def a_passage(text, probability=0.5):
    return Passage(
        text.decode("latin-1"),
        [probability] * len(text),
        [int(i % 3 == 0) for i in range(len(text))],
    )


def changed(run, **changes):
    """Return the run with changed values of its own or of its evaluation; a loss is that of its only sequence."""
    if "loss" in changes:
        changes["loss"] = [changes["loss"]]
    assessed = {
        field.name: changes.pop(field.name)
        for field in fields(run.evaluation)
        if field.name in changes
    }
    return replace(run, evaluation=replace(run.evaluation, **assessed), **changes)


def a_method(name, bits=2.0, seeds=2, probability=0.3, **changes):
    runs = [a_run(seed, bits + 0.01 * seed, probability, **changes) for seed in range(seeds)]
    values = [run.loss for run in runs]
    error = float(np.std(values, ddof=1) / seeds**0.5) if seeds > 1 else math.nan
    return ComparedMethod(name, runs, {"agent.name": name}, float(np.mean(values)), error, 0.02)


def a_window(name="series 3 @ 40", steps=40, channels=1, gold=True, seed=0):
    generator = np.random.default_rng(seed)
    value_NC = generator.normal(size=(steps, channels)).cumsum(0).astype(object)
    value_NC[generator.random((steps, channels)) < 0.1] = None
    probability = generator.random(steps - 1).tolist()
    action = [int(i % 5 == 0) for i in range(steps - 1)]
    return SeriesExcerpt(
        name,
        value_NC.tolist(),
        probability,
        action,
        [i % 9 == 8 for i in range(steps)] if gold else None,
    )


def of_series(method, **changes):
    """Return the same method for series: losses lower by 3, windows, and a loss on the test split."""
    runs = []
    for run in method.runs:
        history = {
            name.replace("bits_per_byte", "nats_per_value"): curve
            for name, curve in run.history.items()
        }
        windows = [a_window(seed=1), a_window("series 5 @ 0", channels=3, gold=False)]
        of_run = {
            "passages": [],
            "windows": windows,
            "learned": None,
            "agreement": {"change points": Agreement(0.5, 0.25, 1 / 3)},
        }
        losses = {
            "loss": run.loss - 3,
            "loss_early": run.evaluation.loss_early - 3,
            "loss_test": run.loss - 2.5,
        }
        of_run |= {
            "unit": "nats_per_value",
            "config": replace(run.config, data=OF_SERIES, codec={"name": "series"}),
            "history": history,
        }
        evaluation = SeriesEvaluation(**vars(run.evaluation))
        runs.append(changed(replace(run, evaluation=evaluation), **of_run | losses | changes))
    return replace(method, runs=runs, loss=method.loss - 3)


def a_comparison_of_series(methods, **changes):
    return a_comparison([of_series(method) for method in methods], **changes)


def a_comparison(methods, **changes):
    differences = {}
    for one, other in itertools.combinations(methods, 2):
        gap = one.loss - other.loss
        differences[one.name, other.name] = Difference(
            gap, 0.02, 0.02, gap - 0.05, gap + 0.05, 0.01
        )
    return replace(
        Comparison("Title", {"budget": "4 MB"}, methods, apply_holm(differences)), **changes
    )


def rows(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
