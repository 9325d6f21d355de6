"""Compare methods at several boundary rates."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tokenv.compare.run_evaluation import RateEvaluation, RunEvaluation
from tokenv.compare.score_statistics import (
    COLUMNS,
    Scores,
    apply_holm,
    estimate_difference,
    tabulate_differences,
)
from tokenv.evaluation.calibration import CALIBRATED, CONDITIONED, NATIVE

# a method is compared by the first which it has: the most exact one
PRECEDENCE = (CALIBRATED, CONDITIONED, NATIVE)
DIFFERENCE = [f"difference_{name}" if name.endswith("error") else name for name in COLUMNS]


def tabulate_rates(
    evaluations: Mapping[str, Mapping[int, RunEvaluation]], reference: str = ""
) -> pd.DataFrame:
    """Return what was measured of methods at the requested rates.

    P-values are corrected for all methods and rates which are compared with the reference (Holm).

    Args:
        evaluations: method to seed to the evaluation of that run.
        reference: method with which the others are compared; empty for none.

    Returns:
        One row for every method, way (see ``tokenv.evaluation.calibration``) and rate, in ascending order; none where
        nothing was measured. Columns: ``method``, ``way``, ``target_rate`` (requested boundaries per symbol; drawn ones
        if a method takes no request), ``boundary_rate`` and ``flops`` (of reading a symbol), means over seeds;
        ``seeds``, their number; ``loss``, ``seed_error``, ``document_error``; ``lowest`` and ``highest`` loss of a
        seed; ``compared``, whether the method is drawn and compared in this way; and ``DIFFERENCE``, its loss minus the
        reference's at the same rate, empty where they are not compared.
    """
    rows: list[dict[str, Any]] = []
    scores: list[Scores] = []
    for method, seeds in evaluations.items():
        document = next(iter(seeds.values())).document
        # way and rate to the evaluation of each seed
        groups: dict[tuple[int, float], dict[int, RateEvaluation]] = {}
        for seed, evaluation in seeds.items():
            for each in evaluation.at_rates:
                # A method which takes no request has a rate of its own in every run.
                key = PRECEDENCE.index(each.way), 0.0 if each.way == NATIVE else each.target_rate
                groups.setdefault(key, {})[seed] = each
        for way, target_rate in sorted(groups):
            runs = groups[way, target_rate].values()
            loss_SB = np.array([run.loss for run in runs])
            own = Scores(
                loss_SB, np.array(document[: loss_SB.shape[1]]), tuple(groups[way, target_rate])
            )
            boundary_rate = float(np.mean([run.boundary_rate for run in runs]))
            rows.append(
                {
                    "method": method,
                    "way": PRECEDENCE[way],
                    "target_rate": target_rate or boundary_rate,
                    "boundary_rate": boundary_rate,
                    "flops": float(np.mean([run.flops for run in runs])),
                    "seeds": len(runs),
                    "loss": own.mean,
                    "seed_error": own.seed_error,
                    "document_error": own.document_error,
                    "lowest": own.loss_S.min(),
                    "highest": own.loss_S.max(),
                    "compared": way == min(groups)[0],
                }
            )
            scores.append(own)
    compared = {
        (row["method"], row["target_rate"]): i for i, row in enumerate(rows) if row["compared"]
    }
    pairs = {
        key: estimate_difference(scores[i], scores[compared[reference, key[1]]])
        for key, i in compared.items()
        if key[0] != reference and rows[i]["way"] != NATIVE and (reference, key[1]) in compared
    }
    table = tabulate_differences(apply_holm(pairs))
    for key, values in zip(pairs, table.itertuples(index=False), strict=True):
        rows[compared[key]] |= dict(zip(DIFFERENCE, values, strict=True))
    return pd.DataFrame([dict.fromkeys(DIFFERENCE, "") | row for row in rows])
