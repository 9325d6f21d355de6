"""Measure what rewards gain under a frozen model, and what is left of it once a new model has learned.

    python examples/frozen_or_retrained.py STORE [SEED ...]

For each seed, a policy imitates BPE while a model learns with it. Then rewards train the policy further, and this
model is frozen. The loss under the frozen model says whether rewards are right about the model which they came from.
New models then learn, one with the policy before rewards and one with the policy after them, both frozen. Last, rewards
train the policy together with the model, after an imitation of 15%, against the imitation of the whole run. A gain is a
lower loss in bits per byte, at the same boundary rate. Runs which STORE has are not trained again.
"""

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
from scipy import stats

from tokenv.data.corpus import load_corpus
from tokenv.evaluation.calibration import calibrate, split_for_calibration
from tokenv.evaluation.evaluator import EvalOptions, evaluate
from tokenv.evaluation.loaded_run import load_run

SEEDS = range(600, 608)
RATE = 0.26
COMMON = [
    f"rate={RATE}",
    "train.optimizer=muon",
    "train.learning_rate=0.015",
    "hardware.threads=1",
    "hardware.precision=float32",
]
MODEL = ["train.symbols=2_000_000"]
IMITATED = [
    "imitation.teacher.name=bpe",
    "imitation.teacher.vocabulary_size=32000",
    "loss.early=0.1",  # which rewards read later
]
REWARDS = ["loss.policy=10", "estimator.scaled=true"]
FROZEN_MODEL = ["train.symbols=1_000_000", "freeze_lm=true", "agent.frozen=false"]
RLOO = ["estimator.name=rloo", "estimator.reward_only=true"]
ESTIMATORS = {
    "reinforce, gamma 0.9": ["estimator.name=reinforce", "estimator.gamma=0.9"],
    "rloo, gamma 0.9": [*RLOO, "estimator.gamma=0.9"],
    "rloo, gamma 0.5": [*RLOO, "estimator.gamma=0.5"],
}
# under the frozen model alone: is it the noise of the gradient which moves the policy away?
SLOW = "train.learning_rate=0.0015"
SLOW_ESTIMATORS = {
    "reinforce, gamma 0.9, learning rate 0.0015": [*ESTIMATORS["reinforce, gamma 0.9"], SLOW],
    "rloo, gamma 0.9, learning rate 0.0015": [*ESTIMATORS["rloo, gamma 0.9"], SLOW],
}


def is_complete(folder: Path) -> bool:
    """Return whether a run has come to its end."""
    status = folder / "run.json"
    return status.is_file() and json.loads(status.read_text())["status"] == "COMPLETED"


def train(store: Path, name: str, seed: int, options: list[str]) -> Path:
    """Train a run unless the store has it, and return its folder."""
    folder = store / name
    if not is_complete(folder):
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "tokenv", "train", "with", "small", f"seed={seed}"]
        shown = ["-F", str(store), "-i", name]
        subprocess.run([*command, *COMMON, *options, *shown], check=True, stdout=subprocess.DEVNULL)
    return folder


def measure(folder: Path) -> tuple[float, float]:
    """Return the held-out loss at the rate, and the boundary rate before the logits were shifted to it."""
    run = load_run(str(folder), "latest")
    corpus = load_corpus(run.config.data)
    held_out, own = split_for_calibration(corpus, run.config.validation.sequences)
    bias = calibrate(run.components, own, RATE)
    assert bias is not None
    plain = evaluate(run.components, held_out)
    shifted = evaluate(run.components, held_out, EvalOptions(logit_bias=bias))
    return shifted.loss, plain.boundary_rate


def measure_frozen(
    store: Path, seed: int, imitated: Path, estimator: str, options: list[str]
) -> tuple[Path, dict[str, float | str]]:
    """Train the policy of a run by rewards under its frozen model; return the run, and its rate and loss."""
    name = f"{seed}-{estimator.replace(', ', '-').replace(' ', '-')}"
    sources = [f"init_from={imitated}", f"agent.pretrained={imitated}"]
    rewarded = train(store, name, seed, [*FROZEN_MODEL, *sources, *REWARDS, *options])
    loss, rate = measure(rewarded)
    row: dict[str, float | str] = {"seed": seed, "estimator": estimator}
    return rewarded, row | {"rate after": rate, "frozen after": loss}


def measure_seed(store: Path, seed: int) -> list[dict[str, float | str]]:
    """Train all runs of a seed, and return a row for each estimator."""
    imitated = train(store, f"{seed}-imitated", seed, [*MODEL, *IMITATED, "imitation.fraction=1.0"])
    before = train(store, f"{seed}-new", seed + 100, [*MODEL, f"agent.pretrained={imitated}"])
    loss, rate = measure(imitated)
    loss_new, _ = measure(before)
    start = [*MODEL, *IMITATED, "imitation.fraction=0.15"]
    rows = []
    for estimator, options in ESTIMATORS.items():
        rewarded, row = measure_frozen(store, seed, imitated, estimator, options)
        new = [*MODEL, f"agent.pretrained={rewarded}"]
        after = train(store, f"{rewarded.name}-new", seed + 100, new)
        learning = [*start, *REWARDS, *options]
        together = train(store, f"{rewarded.name}-together", seed, learning)
        row["new after"], _ = measure(after)
        row["together after"], row["rate together"] = measure(together)
        rows.append(row)
    for estimator, options in SLOW_ESTIMATORS.items():
        _, row = measure_frozen(store, seed, imitated, estimator, options)
        rows.append(row)
    befores = {"frozen before": loss, "new before": loss_new, "together before": loss}
    return [{**row, "rate before": rate, **befores} for row in rows]


def main(store: str, *seeds: str) -> None:
    """Train, measure, write ``frozen_or_retrained.csv`` and print the gain of rewards by estimator."""
    folder = Path(store).resolve()
    chosen = [int(seed) for seed in seeds] or list(SEEDS)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda seed: measure_seed(folder, seed), chosen))
    table = pd.DataFrame([row for rows in found for row in rows])
    table.to_csv(folder / "frozen_or_retrained.csv", index=False)
    for estimator, rows in table.groupby("estimator", sort=False):
        for model in ("frozen", "new", "together"):
            gain = (rows[f"{model} before"] - rows[f"{model} after"]).dropna()
            if gain.empty:
                continue
            test = stats.ttest_1samp(gain, 0)
            low, high = test.confidence_interval()
            print(
                f"{estimator}, {model}: {gain.mean():+.4f} ({low:+.4f} to {high:+.4f}, "
                f"p = {test.pvalue:.2g}, n = {len(gain)})"
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
