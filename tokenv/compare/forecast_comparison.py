"""Score the forecasts of several methods, and compare them with naive baselines and DLinear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tokenv.compare.run_evaluation import Forecasts, RunEvaluation
from tokenv.compare.score_statistics import Difference, Estimate, Pair, compare_scores
from tokenv.config.components import Components
from tokenv.config.schema import Config, ForecastRequest
from tokenv.core.errors import UserError
from tokenv.data.windows import SeriesData
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.forecasting.baseline_models import find_season, fit_peers, naive_baselines
from tokenv.forecasting.contexts import held_out_windows
from tokenv.forecasting.forecaster import check_forecast, make_forecasts
from tokenv.forecasting.scores import ScoreAccumulator

SCORES = ("mse", "mae", "crps")


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
        reference: method whose pairs Holm's correction counts; empty, or of no run, for all pairs.

    Returns:
        None if a run has no forecasts.

    Raises:
        UserError: runs have forecast other steps or windows.
    """
    methods: dict[str, dict[int, Forecasts]] = {}
    for name, runs in evaluations.items():
        methods[name] = {seed: run.forecast for seed, run in runs.items() if run.forecast is not None}
        if len(methods[name]) < len(runs):
            return None
    first_label, first = next(
        (f"{name}, seed {seed}", each) for name, of in methods.items() for seed, each in of.items()
    )
    for name, runs_forecasts in methods.items():
        for seed, each in runs_forecasts.items():
            if (each.horizon, each.cluster) != (first.horizon, first.cluster):
                raise UserError(
                    f"{name}, seed {seed} forecasts {each.horizon} steps of {len(each.cluster):,} test windows and "
                    f"{first_label} {first.horizon} of {len(first.cluster):,}: expected the same windows; name one "
                    "forecast.horizon, and compare runs of the same data section"
                )
    seeds = {name: list(of) for name, of in methods.items()}
    known_reference = reference if reference in methods else ""
    tables: dict[str, Mapping[str, Estimate]] = {}
    differences: dict[str, Mapping[Pair, Difference]] = {}
    for score in (*SCORES, "inside"):
        scores: dict[str, Any] = {name: [each.error[score] for each in of.values()] for name, of in methods.items()}
        if score != "inside":
            scores |= {name: error["mae" if score == "crps" else score] for name, error in first.peers.items()}
        compared = compare_scores(scores, documents=first.cluster, seeds=seeds, reference=known_reference)
        tables[score] = compared.estimates
        if score != "inside":
            differences[score] = compared.differences
    mse = {name: each.mean for name, each in tables["mse"].items()}
    rows = []
    for name in sorted(mse, key=lambda name: (math.isnan(mse[name]), mse[name])):
        row: dict[str, Any] = {"forecaster": name, "is_method": name in methods, "seeds": len(methods.get(name, ()))}
        row |= {"horizon": first.horizon, "windows": len(first.cluster)}
        for score, estimates in tables.items():
            own = estimates.get(name)
            row |= {score: own.mean if own else "", f"{score}_seed_error": own.seed_error if own else ""}
            row[f"{score}_window_error"] = own.document_error if own else ""
        for peer in sorted(first.peers, key=lambda peer: (math.isnan(mse[peer]), mse[peer])):
            row[f"skill against {peer}"] = 1 - mse[name] / mse[peer] if mse[peer] > 0 else math.nan
        rows.append(row)
    seed_mse = {name: [float(np.mean(each.error["mse"])) for each in of.values()] for name, of in methods.items()}
    return ForecastComparison(first.horizon, len(first.cluster), first.total, pd.DataFrame(rows), seed_mse, differences)


QUANTILES = (0.1, 0.5, 0.9)  # the outermost ones bound the interval whose coverage is reported


def check_forecast_request(config: Config, request: ForecastRequest) -> int:
    """Return the steps of history which forecasts continue; raise an error if a run could not make the forecasts.

    Raises:
        UserError: the data are text, the direct head predicts fewer steps, the sequences or the memory are too short,
            or the season is longer than a history.
    """
    if config.data.kind != "series":
        raise UserError(f"forecast with data.kind = {config.data.kind!r}: expected series, or leave forecast out")
    horizon = _resolve_horizon(config, request)
    return check_forecast(config, horizon, samples=request.samples, direct=request.direct, season=request.season)


def _resolve_horizon(config: Config, request: ForecastRequest) -> int:
    if request.horizon is None and not config.model.horizon:
        raise UserError(
            "forecast.horizon is null and model.horizon = 0: expected one of them, the steps to forecast or those that "
            "a direct head predicts"
        )
    return request.horizon or config.model.horizon


def score_forecasts(
    config: Config, parts: Components, data: SeriesData, request: ForecastRequest, logit_bias: float = 0.0
) -> Forecasts:
    """Forecast test windows, and return the errors.

    Args:
        config: configuration of the run.
        parts: components of the run, in evaluation mode.
        data: data of the run.
        request: what to forecast.
        logit_bias: see ``tokenv.forecasting.forecaster.forecast``.

    Raises:
        UserError: see ``check_forecast_request``; or there are too few test steps.
    """
    history, horizon = check_forecast_request(config, request), _resolve_horizon(config, request)
    season = request.season or find_season(data.series, history)
    contexts, points = held_out_windows(data, horizon, request.windows), naive_baselines(horizon, season)
    points |= fit_peers(request.peers, data, horizon)
    scores = ScoreAccumulator(QUANTILES)
    samples, direct = request.samples, request.direct
    for batch in make_forecasts(
        parts, contexts, points, QUANTILES, EvalOptions(logit_bias=logit_bias), samples=samples, direct=direct
    ):
        scores.add(batch.forecast.distribution, batch.quantile_BQHC, batch.batch, batch.point_BHC)
    error, cluster_W = scores.each()
    return Forecasts(
        horizon=horizon,
        total=contexts.total,
        cluster=cluster_W.tolist(),
        error={name: error[name].tolist() for name in (*SCORES, "inside")},
        peers={peer: {name: error[f"{name} {peer}"].tolist() for name in ("mse", "mae")} for peer in points},
    )
