"""Compare methods at several boundary rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tokenv.compare.run_evaluation import RunEvaluation
from tokenv.compare.score_statistics import Scores, apply_holm, estimate_difference, tabulate_differences
from tokenv.evaluation.calibration import CALIBRATED, CONDITIONED, NATIVE

# A method is compared by the first of these which it has: the most exact one.
PRECEDENCE = (CALIBRATED, CONDITIONED, NATIVE)
DIFFERENCE = [
    "difference",
    "difference_seed_error",
    "difference_document_error",
    "low",
    "high",
    "p",
    "p_holm",
    "verdict",
]


def tabulate_rates(evaluations: Mapping[str, Mapping[int, RunEvaluation]], reference: str = "") -> pd.DataFrame:
    """Return what was measured of methods at the requested rates.

    P-values are corrected for all methods and rates which are compared with the reference (Holm).

    Args:
        evaluations: method to seed to the evaluation of that run.
        reference: method with which the others are compared; empty for none.

    Returns:
        One row for every method, way (see ``tokenv.evaluation.calibration``) and rate, in ascending order; none where
        nothing was measured. Columns: ``method``, ``way``, ``asked`` (requested boundaries per symbol; drawn ones if a
        method takes no request), ``drawn`` and ``flops`` (of reading a symbol), means over seeds; ``seeds``, their
        number; ``loss``, ``seed_error``, ``document_error``; ``lowest`` and ``highest`` loss of a seed; ``compared``,
        whether the method is drawn and compared in this way; and ``DIFFERENCE``, its loss minus the reference's at the
        same rate, empty where they are not compared.
    """
    rows: list[dict[str, Any]] = []
    scores: list[Scores] = []
    for method, seeds in evaluations.items():
        document = next(iter(seeds.values())).document
        ways = {each.way for evaluation in seeds.values() for each in evaluation.at_rates}
        best = min(ways, key=PRECEDENCE.index, default="")
        for way in sorted(ways, key=PRECEDENCE.index):
            points = [(seed, each) for seed, run in seeds.items() for each in run.at_rates if each.way == way]
            # A method which takes no request has a rate of its own in every run.
            for rate in [None] if way == NATIVE else sorted({each.asked for _, each in points}):
                runs = {seed: each for seed, each in points if rate in (None, each.asked)}
                loss_SB = np.array([each.loss for each in runs.values()])
                own = Scores(loss_SB, np.array(document[: loss_SB.shape[1]]), tuple(runs))
                drawn, flops = (
                    float(np.mean([getattr(run, key) for run in runs.values()])) for key in ("rate", "flops")
                )
                scores.append(own)
                rows.append(
                    {
                        "method": method,
                        "way": way,
                        "asked": drawn if rate is None else rate,
                        "drawn": drawn,
                        "flops": flops,
                        "seeds": len(own.seeds),
                        "loss": own.mean,
                        "seed_error": own.seed_error,
                        "document_error": own.document_error,
                        "lowest": own.loss_S.min(),
                        "highest": own.loss_S.max(),
                        "compared": way == best,
                    }
                )
    compared = {(row["method"], row["asked"]): i for i, row in enumerate(rows) if row["compared"]}
    pairs = {
        key: estimate_difference(scores[i], scores[compared[reference, key[1]]])
        for key, i in compared.items()
        if key[0] != reference and rows[i]["way"] != NATIVE and (reference, key[1]) in compared
    }
    table = tabulate_differences(apply_holm(pairs))
    for key, values in zip(pairs, table.itertuples(index=False), strict=True):
        rows[compared[key]] |= dict(zip(DIFFERENCE, values, strict=True))
    return pd.DataFrame([dict.fromkeys(DIFFERENCE, "") | row for row in rows])
