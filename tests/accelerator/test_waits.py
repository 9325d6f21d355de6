"""Every agent and estimator trains on an accelerator, and an update waits for it as seldom as possible."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_accelerator import NAME, FakeAccelerator
from tiny import settings

from tokenv.config import registry
from tokenv.config.files import merge, resolve
from tokenv.core import checkpoints
from tokenv.training.trainer import Trainer, train

SHORT = {"symbols": 256, "batch_size": 4, "warmup_symbols": 64}
SETTINGS = settings(train=SHORT, hardware={"device": NAME}, validation={"sequences": 4})
SERIES = {
    "data": {
        "kind": "series",
        "source": "regimes",
        "options": {"context": 24, "count": 6, "length": 300, "dwell": 8},
    },
    "codec": {"name": "series"},
}
PATCHES = merge(SERIES, {"codec": {"horizon": 8, "direct": True}})
LEARNED = {"agent": {"name": "learned", "window": 0}}
CASES: dict[str, dict[str, Any]] = {name: {"agent": {"name": name}} for name in registry.AGENTS}
CASES |= {
    name: LEARNED | {"estimator": {"name": name}} for name in registry.ESTIMATORS if name != "path"
}
CASES |= {
    "exact_count": {"agent": {"name": "exact_count", "window": 1}, "estimator": {"name": "rloo"}},
    "events": SERIES | {"agent": {"name": "events"}},
    "conditional": PATCHES | {"agent": {"name": "conditional"}, "estimator": {"name": "reinpatch"}},
    "nawrot": {
        "agent": {"name": "nawrot"},
        "estimator": {"name": "gumbel"},
        "rate_target": {"name": "binomial"},
    },
    "hnet": {
        "agent": {"name": "hnet"},
        "estimator": {"name": "path"},
        "rate_target": {"name": "ratio"},
    },
    "muon": LEARNED | {"train": {"optimizer": "muon"}},
    "recomputed": LEARNED | {"hardware": {"activation_checkpointing": "on"}},
}
POOLINGS = {"nawrot": "mean", "hnet": "smooth"}

SETTLED = "equal at agents/learned.py"  # have the draws settled?
TOKENS = "copy to the host at tokenv/lm/segments.py"  # how many are there?
METRICS = "event at tokenv/training/metrics.py"  # those of the update before
# the decisions for which the CPU couples the noise
NOISE = "copy to the host at tokenv/env/random_inputs.py"
USUAL = {SETTLED: 1, TOKENS: 1, METRICS: 1}
WAITS = dict.fromkeys(CASES, USUAL)
# one round settles them
WAITS |= {name: {TOKENS: 1, METRICS: 1} for name in registry.AGENTS if name != "learned"}
# bytes alone
WAITS |= {
    name: {SETTLED: 1, METRICS: 1} for name in ("straight", "gumbel", "reinmax", "gumbel_rao")
}
WAITS |= {name: USUAL | {NOISE: 1} for name in ("arm", "disarm", "arms", "bitflip")}
WAITS |= {
    "ppo": USUAL | {METRICS: 2},  # also those of further steps
    # samples which only earn a reward are decoded by themselves
    "rloo_clipped": USUAL | {TOKENS: 2, METRICS: 2},
    "branch": USUAL | {NOISE: 1, TOKENS: 2},
    # the warm start's end
    "off_policy": {"_local_scalar_dense at estimators/surrogates.py": 2, TOKENS: 1, METRICS: 1},
    "entropy": {"mask at agents/heuristic.py": 1, TOKENS: 1, METRICS: 1},
    "bpe": {
        "copy to the host at agents/bpe.py": 2,
        "copy to the device at agents/bpe.py": 1,
        TOKENS: 1,
        METRICS: 1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_trains_evaluates_and_saves(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Counter[str]] = []
    step = Trainer.train_step
    sections = merge({"model": {"pooling": POOLINGS.get(case, "select")}}, CASES[case])
    with FakeAccelerator() as accelerator:

        def counted(trainer: Trainer) -> None:
            accelerator.waits.clear()
            step(trainer)
            waits.append(Counter(name.rpartition(":")[0] for name in accelerator.waits.elements()))

        monkeypatch.setattr(Trainer, "train_step", counted)
        train(resolve([], merge(SETTINGS, sections)), tmp_path, lambda *_: None)
    assert waits[-1] == WAITS[case]
    assert len(waits) == 2
    assert [path.name for path in checkpoints.list_complete(tmp_path)] == ["step-00000002"]
