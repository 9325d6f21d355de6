"""Methods held against one another at rates that they were asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tokenv.compare.run_evaluation import RateEvaluation, RunEvaluation
from tokenv.compare.significance import Difference, Scores, corrected, difference
from tokenv.evaluation.calibration import CALIBRATED, CONDITIONED, NATIVE

BEST = (CALIBRATED, CONDITIONED, NATIVE)  # a method's first one of these is compared: the most exact


@dataclass(frozen=True)
class MethodRatePoint:
    """A method at one rate.

    Attributes:
        asked: boundaries per symbol; the drawn ones where nobody can ask.
        rate: as drawn, mean over seeds.
        flops: of reading a symbol, mean over seeds.
        scores: losses of the seeds that were measured there.
        difference: its loss minus the reference's at the same rate; None where they are not compared.
    """

    asked: float
    rate: float
    flops: float
    scores: Scores
    difference: Difference | None = None


@dataclass(frozen=True)
class MethodRateCurve:
    """A method at all rates.

    Attributes:
        method: its name.
        way: how it was asked: see ``tokenv.evaluation.calibration.RatePoint``.
        compared: whether this is the way in which the method is drawn and held against the reference.
        cells: by ascending rate, at least one.
    """

    method: str
    way: str
    compared: bool
    cells: Sequence[MethodRatePoint]


def rate_curves(methods: Mapping[str, Mapping[int, RunEvaluation]], reference: str = "") -> list[MethodRateCurve]:
    """What was measured of methods at the rates that they were asked for.

    P-values are corrected for all methods and rates that are held against the reference (Holm).

    Args:
        methods: name to seed to what was measured of that run.
        reference: the method that the others are held against; empty for none.

    Returns:
        A line for every method and way, the compared one of each first; none where nothing was measured.
    """
    lines = [line for name, seeds in methods.items() for line in _lines(name, seeds)]
    against = {
        cell.asked: cell.scores for line in lines if line.compared and line.method == reference for cell in line.cells
    }
    found = corrected(
        {
            (line.method, cell.asked): difference(cell.scores, against[cell.asked])
            for line in lines
            if line.compared and line.method != reference and line.way != NATIVE
            for cell in line.cells
            if cell.asked in against
        }
    )

    def compared(line: MethodRateCurve) -> MethodRateCurve:
        cells = [replace(cell, difference=found.get((line.method, cell.asked))) for cell in line.cells]
        return replace(line, cells=cells)

    return [compared(line) if line.compared else line for line in lines]


def _lines(method: str, seeds: Mapping[int, RunEvaluation]) -> list[MethodRateCurve]:
    ways = {each.way for of in seeds.values() for each in of.at_rates}
    found: list[MethodRateCurve] = []
    for way in sorted(ways, key=BEST.index):
        runs = {seed: [each for each in of.at_rates if each.way == way] for seed, of in seeds.items()}
        document = next(iter(seeds.values())).document
        # What nothing moves has a rate of its own in every run.
        rates = [None] if way == NATIVE else sorted({each.asked for of in runs.values() for each in of})
        cells = []
        for asked in rates:
            here = {seed: each for seed, of in runs.items() for each in of if asked in (None, each.asked)}
            cells.append(_cell(asked, here, document))
        found.append(MethodRateCurve(method, way, not found, cells))
    return found


def _cell(asked: float | None, runs: Mapping[int, RateEvaluation], document: Sequence[int]) -> MethodRatePoint:
    drawn, flops = (float(np.mean([getattr(each, name) for each in runs.values()])) for name in ("rate", "flops"))
    loss_SB = np.array([each.loss for each in runs.values()])
    scores = Scores(loss_SB, np.array(document[: loss_SB.shape[1]]), tuple(runs))
    return MethodRatePoint(drawn if asked is None else asked, drawn, flops, scores)
