"""Measure what rewards gain under a frozen model, and what is left of it once a new model has learned.

    python examples/frozen_or_retrained.py STORE [SEED ...]

For each seed, a policy imitates BPE while a model learns with it. Then rewards train the policy further, and this
model is frozen. The loss under the frozen model says whether rewards are right about the model which they came from.
New models then learn, one with the policy before rewards and one with the policy after them, both frozen. Last, rewards
train the policy together with the model, after an imitation of 15%, against the imitation of the whole run. A gain is a
lower loss in bits per byte, at the same boundary rate. Runs which STORE has are not trained again.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
from scipy import stats

from tokenv.compare.store import read_run
from tokenv.core.sequences import SequenceBatch
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
# together with the model alone: is it rewards which move the policy away, or the model under it?
ONLY_TOGETHER = {"no rewards": ["loss.policy=0"]}


def train(store: Path, name: str, seed: int, options: list[str]) -> Path:
    """Train a run unless the store has it, and return its folder."""
    folder = store / name
    stored = read_run(folder)
    if stored is None or not stored.finished:
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "tokenv", "train", "with", "small", f"seed={seed}"]
        shown = ["-F", str(store), "-i", name]
        subprocess.run([*command, *COMMON, *options, *shown], check=True, stdout=subprocess.DEVNULL)
    return folder


def dashed(name: str) -> str:
    """Return a name as a folder may have it."""
    return name.replace(", ", "-").replace(" ", "-")


def train_frozen(store: Path, seed: int, imitated: Path, estimator: str) -> Path:
    """Train the policy of a run by rewards while its model is frozen, and return the folder."""
    name = f"{seed}-{dashed(estimator)}"
    sources = [f"init_from={imitated}", f"agent.pretrained={imitated}"]
    options = (ESTIMATORS | SLOW_ESTIMATORS)[estimator]
    return train(store, name, seed, [*FROZEN_MODEL, *sources, *REWARDS, *options])


def held_out_batches(folder: Path) -> tuple[SequenceBatch, SequenceBatch]:
    """Return the sequences to evaluate and to calibrate on, which are the same for all runs."""
    config = load_run(str(folder), "latest").config
    return split_for_calibration(load_corpus(config.data), config.validation.sequences)


def measure(folder: Path, batches: tuple[SequenceBatch, SequenceBatch]) -> tuple[float, float]:
    """Return the held-out loss at the rate, and the boundary rate before the logits were shifted to it."""
    run = load_run(str(folder), "latest")
    held_out, own = batches
    bias = calibrate(run.components, own, RATE)
    assert bias is not None
    assert run.state.validation is not None
    shifted = evaluate(run.components, held_out, EvalOptions(logit_bias=bias))
    return shifted.loss, run.state.validation.boundary_rate


def measure_seed(store: Path, seed: int) -> list[dict[str, float | str]]:
    """Train all runs of a seed, and return a row for each estimator."""
    imitated = train(store, f"{seed}-imitated", seed, [*MODEL, *IMITATED, "imitation.fraction=1.0"])
    before = train(store, f"{seed}-new", seed + 100, [*MODEL, f"agent.pretrained={imitated}"])
    batches = held_out_batches(imitated)
    loss, rate = measure(imitated, batches)
    loss_new, _ = measure(before, batches)
    befores = {
        "rate before": rate,
        "frozen before": loss,
        "new before": loss_new,
        "together before": loss,
    }
    start = [*MODEL, *IMITATED, "imitation.fraction=0.15"]
    rows = []
    for name, options in ONLY_TOGETHER.items():
        together = train(store, f"{seed}-{dashed(name)}-together", seed, [*start, *options])
        row: dict[str, float | str] = {"seed": seed, "estimator": name, **befores}
        row["together after"], row["rate together"] = measure(together, batches)
        rows.append(row)
    for estimator in ESTIMATORS | SLOW_ESTIMATORS:
        row = {"seed": seed, "estimator": estimator, **befores}
        rewarded = train_frozen(store, seed, imitated, estimator)
        row["frozen after"], row["rate after"] = measure(rewarded, batches)
        if estimator in ESTIMATORS:
            new = [*MODEL, f"agent.pretrained={rewarded}"]
            after = train(store, f"{rewarded.name}-new", seed + 100, new)
            learning = [*start, *REWARDS, *ESTIMATORS[estimator]]
            together = train(store, f"{rewarded.name}-together", seed, learning)
            row["new after"], _ = measure(after, batches)
            row["together after"], row["rate together"] = measure(together, batches)
        rows.append(row)
    return rows


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
