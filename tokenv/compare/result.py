"""From finished, measured runs to everything that a report shows."""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenv.compare.assess import assess
from tokenv.compare.assessment import Assessment, Window
from tokenv.compare.compared import Agreement, ComparedMethod, ComparedRun, Comparison, Pair
from tokenv.compare.notes import notes
from tokenv.compare.statistics import Scores, compare, sentence
from tokenv.compare.store import StoredRun, read_run
from tokenv.config.schema import SETTINGS, Config
from tokenv.errors import UserError
from tokenv.report.characters import characters
from tokenv.report.series import Patched
from tokenv.report.words import WORDS, in_words
from tokenv.run.build import learns
from tokenv.storage import checkpoints


@dataclass(frozen=True)
class Measured:
    """A finished run and what was measured of it.

    Attributes:
        stored: the run.
        state: of its last checkpoint.
        assessment: its figures on held-out data.
    """

    stored: StoredRun
    state: dict[str, Any]
    assessment: Assessment

    @property
    def config(self) -> Config:
        """Of the run."""
        return self.stored.config


def finished(folder: Path) -> StoredRun:
    """Read a finished run.

    Raises:
        UserError: there is no finished training run in the folder.
    """
    stored = read_run(folder)
    if stored is None or not stored.finished:
        what = "there is no training run" if stored is None else f"the run's status is {stored.status}"
        raise UserError(f"runs: {folder}: {what}; expected the folder of a finished one, such as runs/1")
    return stored


def measured(stored: StoredRun, *, passages: int, bpe_vocabulary: int) -> Measured:
    """A finished run with its figures; it is measured if that was not done before."""
    assessment = assess(stored.folder, passages=passages, bpe_vocabulary=bpe_vocabulary)
    return Measured(stored, checkpoints.load_state(checkpoints.find(stored.folder)), assessment)


def check_one_kind(configs: Mapping[str, Config]) -> None:
    """Refuse to hold text against series.

    Args:
        configs: name of a run or method to its configuration.

    Raises:
        UserError: two of them are of different kinds of data; the message names both.
    """
    firsts: dict[str, str] = {}
    for name, config in configs.items():
        firsts.setdefault(config.data.kind, name)
    if len(firsts) > 1:
        (kind, name), (other_kind, other) = firsts.items()
        raise UserError(
            f"{name} is of {kind} and {other} of {other_kind}: expected runs of one data.kind, for the losses of two "
            "are in different units; compare them apart"
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, with dotted keys."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        pairs |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return pairs


LEARNERS_SETTING = ("estimator", "rate_target")
LEARNERS_LOSS = ("policy", "rate")


def distinguishing(configs: Mapping[str, Config]) -> dict[str, dict[str, str]]:
    """What each of several configurations does differently from some other: key to value, as text."""
    every = {name: _settings(config) for name, config in configs.items()}
    known = dict.fromkeys(itertools.chain.from_iterable(every.values()))
    varying = [key for key in known if len({repr(values.get(key)) for values in every.values()}) > 1]
    return {name: {key: str(values[key]) for key in varying if key in values} for name, values in every.items()}


def _settings(config: Config) -> dict[str, Any]:
    """All that says what a run does, with dotted keys; an agent that does not learn has no estimator."""
    learning = learns(config.agent)
    told = [key for key in SETTINGS if learning or key not in LEARNERS_SETTING]
    values = {key: value for key, value in config.as_dict().items() if key in told}
    if not learning:
        values["loss"] = {name: weight for name, weight in values["loss"].items() if name not in LEARNERS_LOSS}
    return flat(values)


def by_settings(runs: Sequence[Measured]) -> dict[str, list[Measured]]:
    """Runs that differ in nothing but the seed, as methods named by what tells them apart.

    Raises:
        UserError: two runs are the same, seed included.
    """
    groups: dict[str, list[Measured]] = {}
    for run in runs:
        key = repr({k: v for k, v in run.config.as_dict().items() if k in SETTINGS})
        same = [other for other in groups.get(key, []) if other.config.seed == run.config.seed]
        if same:
            raise UserError(
                f"runs: {run.stored.folder} and {same[0].stored.folder} are the same run, seed included: drop one"
            )
        groups.setdefault(key, []).append(run)
    settings = distinguishing({key: group[0].config for key, group in groups.items()})
    agents = [group[0].config.agent["name"] for group in groups.values()]
    names = {}
    for key, group in groups.items():
        name = group[0].config.agent["name"]
        others = {k: v for k, v in settings[key].items() if k != "agent.name"}
        names[key] = name if agents.count(name) == 1 else ", ".join([name, *(f"{k}={v}" for k, v in others.items())])
    return {names[key]: group for key, group in groups.items()}


def build(methods: Mapping[str, Sequence[Measured]], title: str, failed: Mapping[str, str]) -> Comparison:
    """Compare methods.

    Args:
        methods: name to its runs, one a seed and at least one.
        title: of the report.
        failed: runs that did not finish, and why.

    Raises:
        UserError: runs were measured on different data, or in different units.
    """
    runs = [run for group in methods.values() for run in group]
    words, unit = WORDS[runs[0].config.data.kind], runs[0].assessment.unit
    for run in runs[1:]:
        if run.assessment.unit != unit:
            raise UserError(
                f"{run.stored.folder} is measured in {in_words(run.assessment.unit)} and {runs[0].stored.folder} in "
                f"{in_words(unit)}: expected runs whose codec has the same unit"
            )
        if (run.assessment.fingerprint, run.assessment.document) != (
            runs[0].assessment.fingerprint,
            runs[0].assessment.document,
        ):
            raise UserError(
                f"{run.stored.folder} and {runs[0].stored.folder} were measured on different held-out {words.data}: "
                "expected runs of the same data section and the same validation.sequences"
            )
    document_B = np.array(runs[0].assessment.document)
    scores = {
        name: Scores(
            np.array([run.assessment.loss for run in group]), document_B, tuple(run.config.seed for run in group)
        )
        for name, group in methods.items()
    }
    settings = distinguishing({name: group[0].config for name, group in methods.items()})
    return Comparison(
        title=title,
        facts=_facts(methods),
        methods=[
            ComparedMethod(
                name=name,
                runs=[_run(run) for run in group],
                settings=settings[name],
                loss=scores[name].mean,
                seed_error=scores[name].seed_error,
                document_error=scores[name].document_error,
            )
            for name, group in methods.items()
        ],
        pairs=[_pair(first, second, scores, in_words(unit)) for first, second in itertools.combinations(methods, 2)],
        passages=[f"held-out passage {number + 1}" for number in range(len(runs[0].assessment.passages))],
        target_rates=sorted({run.config.rate for run in runs}),
        failed=failed,
        notes=notes(words, unit),
        unit=unit,
        words=words,
        has_test=runs[0].config.data.kind == "series",
    )


def _run(run: Measured) -> ComparedRun:
    history, told = run.state["history"], run.assessment
    return ComparedRun(
        seed=run.config.seed,
        folder=str(run.stored.folder),
        loss=float(np.mean(told.loss)),
        loss_early=told.loss_early,
        boundary_rate=told.boundary_rate,
        flops=run.state["flops"],
        seconds=_seconds(*history["train/bytes_per_second"]),
        history=history,
        token_lengths=told.token_lengths,
        agreement={name: Agreement(**values) for name, values in told.agreement.items()},
        passages=[
            characters(passage.text.encode("latin-1"), passage.boundary_prob, [bool(a) for a in passage.action])
            for passage in told.passages
        ],
        windows=[_patched(window, run.config.data.series.context) for window in told.windows],
        loss_test=math.nan if told.loss_test is None else told.loss_test,
    )


def _patched(window: Window, context: int) -> Patched:
    return Patched(
        name=window.name,
        value_NC=np.array(window.value, dtype=float),
        boundary_T=np.array(window.action, dtype=bool),
        probability_T=np.array(window.boundary_prob),
        context=context,
        gold_N=None if window.gold is None else np.array(window.gold),
    )


def _seconds(seen: Sequence[int], bytes_per_second: Sequence[float]) -> float:
    """Seconds of all updates."""
    steps = zip(seen, [0, *seen[:-1]], bytes_per_second, strict=True)
    return sum((now - before) / speed for now, before, speed in steps)


def _pair(first: str, second: str, scores: Mapping[str, Scores], unit: str) -> Pair:
    difference = compare(scores[first], scores[second])
    interval = (difference.low, difference.high)
    told = sentence(first, second, difference, unit)
    return Pair(first, second, difference.mean, interval, difference.verdict, told)


def _facts(methods: Mapping[str, Sequence[Measured]]) -> dict[str, str]:
    runs = [run for group in methods.values() for run in group]
    first = runs[0].config
    told, words = runs[0].assessment, WORDS[first.data.kind]
    budgets = sorted({f"{run.config.train.bytes:,}" for run in runs})
    seeds = sorted({run.config.seed for run in runs})
    source = first.data.source if "/" not in first.data.source else Path(first.data.source).name
    found = {"change points": f"found within {first.data.tolerance} steps"} if "change points" in told.agreement else {}
    return {
        "data": f"{source}, sequences of {first.data.seq_len} {words.symbol}s",
        f"training {words.symbol}s": " or ".join(budgets),
        "held out": f"{len(told.loss):,} sequences of {len(set(told.document)):,} {words.document}s",
        **found,
        "seeds": ", ".join(map(str, seeds)),
        "drawn on": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
    }
