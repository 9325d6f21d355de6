"""Give methods equal compute, and build a comparison of runs."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from tokenv.compare.comparison import ComparedMethod, ComparedRun, Comparison
from tokenv.compare.evaluate_run import evaluate_run
from tokenv.compare.evaluation_request import EvaluationRequest
from tokenv.compare.forecast_comparison import compare_forecasts
from tokenv.compare.rate_curves import rate_curves
from tokenv.compare.settings import differing_settings
from tokenv.compare.significance import Scores, corrected, difference
from tokenv.compare.store import StoredRun
from tokenv.config.components import build_components
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.evaluation.run_state import RunState
from tokenv.plotting.theme import TERMINOLOGY, in_words
from tokenv.storage import checkpoints


def with_equal_compute(config: Config) -> Config:
    """The same run with ``train.batch_size`` passes through the decoder in an update, however many a text takes.

    Args:
        config: of a run that would take one text for a pass.
    """
    train, passes = config.train, build_components(config, torch.device("meta"), pretrained=False).passes
    texts = max(train.batch_size // max(passes.learning + passes.reward_only + passes.relaxed, 1), 1)

    def scaled(symbols: int) -> int:
        return max(symbols * texts // train.batch_size, 1)

    return replace(
        config,
        train=replace(
            train, batch_size=texts, symbols=scaled(train.symbols), warmup_symbols=scaled(train.warmup_symbols)
        ),
        validation=replace(config.validation, every_symbols=scaled(config.validation.every_symbols)),
    )


def compared_run(stored: StoredRun, evaluation_request: EvaluationRequest) -> ComparedRun:
    """A finished run with its figures; it is measured if that was not done before."""
    assessment = evaluate_run(stored.folder, evaluation_request)
    state = RunState.read(checkpoints.find(stored.folder))
    return ComparedRun(
        folder=str(stored.folder),
        config=stored.config,
        flops=state.flops,
        seconds=_seconds(*state.history["train/symbols_per_second"]),
        history=state.history,
        assessment=assessment,
    )


def _seconds(seen: Sequence[int], symbols_per_second: Sequence[float]) -> float:
    """Seconds of all updates."""
    steps = zip(seen, [0, *seen[:-1]], symbols_per_second, strict=True)
    return sum((now - before) / speed for now, before, speed in steps)


def build_comparison(
    methods: Mapping[str, Sequence[ComparedRun]],
    title: str,
    failed: Mapping[str, str],
    *,
    against: str = "",
    facts: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare methods.

    Args:
        methods: name to its runs, one a seed and at least one.
        title: of the report.
        failed: runs that did not finish, and why.
        against: the method whose pairs Holm's correction counts, and that others are held against at rates that were
            asked for; empty, or of no run, for all pairs and the first method with a range of rates.
        facts: told besides what the runs tell.

    Raises:
        UserError: runs were measured on different data, or in different units.
    """
    first, *others = [run for group in methods.values() for run in group]
    for run in others:
        _check_comparable(run, first)
    document_B = np.array(first.assessment.document)
    scores = {
        name: Scores(
            np.array([run.assessment.loss for run in group]), document_B, tuple(run.config.seed for run in group)
        )
        for name, group in methods.items()
    }
    settings = differing_settings({name: group[0].config for name, group in methods.items()})
    compared = [
        ComparedMethod(
            name=name,
            runs=group,
            settings=settings[name],
            loss=scores[name].mean,
            seed_error=scores[name].seed_error,
            document_error=scores[name].document_error,
        )
        for name, group in methods.items()
    ]
    differences = {
        (one, other): difference(scores[one], scores[other]) for one, other in itertools.combinations(methods, 2)
    }
    tested = {pair: found for pair, found in differences.items() if against in pair or against not in methods}
    told = {**_facts([first, *others]), **(facts or {})}
    reference = against if against in methods else _with_a_range(methods)
    lines = rate_curves({name: {r.seed: r.assessment for r in group} for name, group in methods.items()}, reference)
    forecasts = compare_forecasts(methods, against)
    return Comparison(title, told, compared, differences | corrected(tested), failed, lines, reference, forecasts)


def _with_a_range(methods: Mapping[str, Sequence[ComparedRun]]) -> str:
    """The first method whose runs have a range of rates; empty where none has."""
    return next((name for name, group in methods.items() if isinstance(group[0].config.rate, RateRange)), "")


def _check_comparable(run: ComparedRun, first: ComparedRun) -> None:
    found, wanted = run.assessment, first.assessment
    if found.unit != wanted.unit:
        raise UserError(
            f"{run.folder} is measured in {in_words(found.unit)} and {first.folder} in {in_words(wanted.unit)}: "
            "expected runs whose codec has the same unit"
        )
    if (found.fingerprint, found.document) != (wanted.fingerprint, wanted.document):
        raise UserError(
            f"{run.folder} and {first.folder} were measured on different held-out {run.config.data.kind}: expected "
            "runs of the same data section and the same validation.sequences"
        )


def _facts(runs: Sequence[ComparedRun]) -> dict[str, str]:
    first, told = runs[0].config, runs[0].assessment
    words = TERMINOLOGY[first.data.kind]
    budgets = sorted({f"{run.config.train.symbols:,}" for run in runs})
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
