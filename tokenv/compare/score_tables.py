"""Compare methods at several boundary rates, and by their forecasts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tokenv.compare.run_evaluation import Forecasts, RateEvaluation, RunEvaluation
from tokenv.compare.score_statistics import (
    COLUMNS,
    Difference,
    Pair,
    Scores,
    ScoreTable,
    apply_holm,
    compare_scores,
    estimate_difference,
    tabulate_differences,
)
from tokenv.core.errors import UserError
from tokenv.evaluation.calibration import CALIBRATED, CONDITIONED, NATIVE

# a method is compared by the first which it has: the most exact one
PRECEDENCE = (CALIBRATED, CONDITIONED, NATIVE)
DIFFERENCE = [f"difference_{name}" if name.endswith("error") else name for name in COLUMNS]
SCORES = ("mse", "mae", "crps")  # of forecasts


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
        # way and rate to the evaluation of each seed
        groups: dict[tuple[int, float], dict[int, RateEvaluation]] = {}
        for seed, evaluation in seeds.items():
            for each in evaluation.at_rates:
                # A method which takes no request has a rate of its own in every run.
                key = PRECEDENCE.index(each.way), 0.0 if each.way == NATIVE else each.asked
                groups.setdefault(key, {})[seed] = each
        for way, asked in sorted(groups):
            runs = groups[way, asked].values()
            loss_SB = np.array([run.loss for run in runs])
            own = Scores(loss_SB, np.array(document[: loss_SB.shape[1]]), tuple(groups[way, asked]))
            drawn = float(np.mean([run.rate for run in runs]))
            flops = float(np.mean([run.flops for run in runs]))
            row = {
                "method": method,
                "way": PRECEDENCE[way],
                "asked": asked or drawn,
                "drawn": drawn,
                "flops": flops,
            }
            row |= {"seeds": len(runs), "loss": own.mean, "seed_error": own.seed_error}
            row |= {
                "document_error": own.document_error,
                "lowest": own.loss_S.min(),
                "highest": own.loss_S.max(),
            }
            rows.append(row | {"compared": way == min(groups)[0]})
            scores.append(own)
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


@dataclass(frozen=True)
class ForecastComparison:
    """Scores of forecasts of test windows.

    Attributes:
        horizon: steps of each forecast.
        windows: number of forecast test windows.
        total: number of test windows in the data.
        table: one row a forecaster (a method, naive baseline or DLinear), lowest MSE first: ``forecaster``,
            ``is_method``, ``seeds``, ``horizon``, ``windows``; each of ``SCORES`` and ``inside`` (share of values in
            the 80% interval; empty for others than methods, and the CRPS of others is their MAE), with
            ``..._seed_error`` and ``..._window_error``, windows of one cluster being dependent; and ``skill against
            NAME``, 1 - MSE / the MSE of that baseline.
        seed_mse: method to the MSE of every seed.
        differences: score to pairs (two methods, or a method and another forecaster) to their difference, window by
            window and seed by seed.
    """

    horizon: int
    windows: int
    total: int
    table: pd.DataFrame
    seed_mse: Mapping[str, list[float]]
    differences: Mapping[str, Mapping[Pair, Difference]]

    @property
    def baselines(self) -> list[str]:
        """Names of the forecasters which are no methods, by their MSE."""
        return list(self.table.forecaster[~self.table.is_method])


def compare_forecasts(
    evaluations: Mapping[str, Mapping[int, RunEvaluation]], reference: str
) -> ForecastComparison | None:
    """Compare the forecasts of runs.

    Args:
        evaluations: method to seed to the evaluation of that run.
        reference: method whose pairs Holm's correction counts; empty for all pairs.

    Returns:
        None if a run has no forecasts.

    Raises:
        UserError: runs have forecast other steps or windows.
    """
    methods: dict[str, dict[int, Forecasts]] = {}
    for name, runs in evaluations.items():
        methods[name] = {
            seed: run.forecast for seed, run in runs.items() if run.forecast is not None
        }
        if len(methods[name]) < len(runs):
            return None
    every = []
    for name, of_method in methods.items():
        every += [(f"{name}, seed {seed}", each) for seed, each in of_method.items()]
    first_label, first = every[0]
    for label, each in every:
        if (each.horizon, each.cluster) != (first.horizon, first.cluster):
            raise UserError(
                f"{label} forecasts {each.horizon} steps of {len(each.cluster):,} test windows and {first_label} "
                f"{first.horizon} of {len(first.cluster):,}: expected the same windows; name one forecast.horizon, and "
                "compare runs of the same data section"
            )
    tables: dict[str, ScoreTable] = {}
    for score in (*SCORES, "inside"):
        scores: dict[str, Any] = {}
        for name, of_method in methods.items():
            scores[name] = [each.error[score] for each in of_method.values()]
        if score != "inside":
            scores |= {
                name: error["mae" if score == "crps" else score]
                for name, error in first.peers.items()
            }
        seeds = {name: list(of) for name, of in methods.items()}
        tables[score] = compare_scores(
            scores, documents=first.cluster, seeds=seeds, reference=reference
        )
    mse = tables["mse"].methods["mean"].sort_values(kind="stable")
    table = pd.DataFrame(
        {"forecaster": mse.index, "is_method": mse.index.isin(list(methods))}, index=mse.index
    )
    table["seeds"] = [len(methods.get(name, ())) for name in mse.index]
    table["horizon"] = first.horizon
    table["windows"] = len(first.cluster)
    for score, compared in tables.items():
        columns = {
            "mean": score,
            "seed_error": f"{score}_seed_error",
            "document_error": f"{score}_window_error",
        }
        own = compared.methods[list(columns)].rename(columns=columns).astype(object)
        table = table.join(own.reindex(mse.index, fill_value=""))
    for peer in mse.index[~table.is_method]:
        if mse[peer] > 0:
            table[f"skill against {peer}"] = 1 - mse / mse[peer]
        else:
            table[f"skill against {peer}"] = math.nan
    return ForecastComparison(
        horizon=first.horizon,
        windows=len(first.cluster),
        total=first.total,
        table=table.reset_index(drop=True).infer_objects(),
        seed_mse={name: list(own.loss_S) for name, own in tables["mse"].scores.items()},
        differences={score: tables[score].differences for score in SCORES},
    )
