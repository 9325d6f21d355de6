"""What a comparison measures and compares of series only: loss and forecasts of test windows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from tokenv.compare.run_evaluation import DrawnBoundaries, RunEvaluation
from tokenv.compare.score_statistics import Difference, Pair, ScoreTable, compare_scores
from tokenv.config.schema import Config
from tokenv.core.conversion import Figure
from tokenv.core.errors import UserError
from tokenv.data.config import DataConfig
from tokenv.evaluation.evaluator import EvalOptions, evaluate
from tokenv.series.baseline_models import find_season, fit_peers, naive_baselines
from tokenv.series.config import DirectHeadConfig, ForecastRequest
from tokenv.series.contexts import held_out_windows
from tokenv.series.forecaster import check_forecast, make_forecasts
from tokenv.series.patches import SeriesExcerpt, make_excerpts
from tokenv.series.scores import ScoreAccumulator

QUANTILES = (0.1, 0.5, 0.9)  # the outermost ones bound the interval whose coverage is reported
SCORES = ("mse", "mae", "crps")  # of forecasts


@dataclass(frozen=True)
class Forecasts:
    """Errors of forecasts of test windows, for values standardised by the training steps.

    Attributes:
        horizon: steps of each forecast.
        total: number of test windows in the data.
        cluster: cluster of every window; windows of one cluster depend on one another.
        error: ``mse``, ``mae``, ``crps`` and ``inside`` (share of values within the 80% interval) of every window.
        peers: ``mse`` and ``mae`` of every window by the name of a baseline.
    """

    horizon: int
    total: int
    cluster: list[int]
    error: dict[str, list[Figure]]
    peers: dict[str, dict[str, list[Figure]]]

    def __post_init__(self) -> None:
        for figures in (self.error, *self.peers.values()):
            if any(len(each) != len(self.cluster) for each in figures.values()):
                raise UserError(
                    f"expected {len(self.cluster)} errors of every kind, one for each forecast"
                )


@dataclass(frozen=True, kw_only=True)
class SeriesEvaluation(RunEvaluation):
    """Scores of one run on held-out windows of series.

    Attributes:
        windows: first windows.
        loss_test: loss on the test windows; None where there are none.
        forecast: forecast errors; None if they were not requested.
    """

    windows: list[SeriesExcerpt] = field(default_factory=list)
    loss_test: Figure | None = None
    forecast: Forecasts | None = None

    @classmethod
    def measure(cls, drawn: DrawnBoundaries) -> dict[str, Any]:
        """Return the first windows, the loss on test windows, and the errors of the requested forecasts."""
        count = drawn.request.passages
        shown = make_excerpts(drawn.held_out, drawn.prob_BT[:count], drawn.action_BT[:count])
        return {
            "windows": shown,
            "loss_test": _test_loss(drawn),
            "forecast": _score_forecasts(drawn),
        }

    @classmethod
    def compare(
        cls, evaluations: Mapping[str, Mapping[int, SeriesEvaluation]], reference: str
    ) -> ForecastComparison | None:
        """Compare forecasts; see ``compare_forecasts``."""
        return compare_forecasts(evaluations, reference)

    def figures(self) -> dict[str, float]:
        """Return the loss on test windows, NaN if it is unknown."""
        if self.loss_test is None:
            return {"loss_test": math.nan}
        return {"loss_test": self.loss_test}

    def facts(self, data: DataConfig) -> dict[str, str]:
        """Return how near a boundary must be to a change point that it finds."""
        name = data.options.words.true_boundaries
        if name not in self.agreement:
            return {}
        return {name: f"found within {data.options.boundary_tolerance} steps"}

    def reads_ahead(self, config: Config) -> bool:
        """Return whether boundaries depend on what is still to be predicted: not with ``codec.direct``."""
        return super().reads_ahead(config) and not DirectHeadConfig.of(config.codec).direct


def _test_loss(drawn: DrawnBoundaries) -> float | None:
    trained = drawn.trained
    series: Any = drawn.corpus.dataset
    try:
        test = series.test(trained.config.validation.sequences)
    except ValueError:  # too short for a window
        return None
    return evaluate(trained.components, test, drawn.options).loss


def check_forecast_request(config: Config, request: ForecastRequest) -> tuple[int, int]:
    """Return the steps of history which forecasts continue, and those to forecast, if a run can make the forecasts.

    Raises:
        UserError: the direct head predicts fewer steps, the sequences or the memory are too short,
            or the season is longer than a history.
    """
    predicted = DirectHeadConfig.of(config.codec).horizon
    if request.horizon is None and not predicted:
        raise UserError(
            "forecast.horizon is null and codec.horizon = 0: expected one of them, the steps to forecast or those that "
            "a direct head predicts"
        )
    horizon = request.horizon or predicted
    history = check_forecast(
        config, horizon, samples=request.samples, direct=request.direct, season=request.season
    )
    return history, horizon


def _score_forecasts(drawn: DrawnBoundaries) -> Forecasts | None:
    """Forecast the requested test windows, with logits shifted as in the evaluation, and return the errors."""
    request = drawn.request.forecast
    if request is None:
        return None
    data: Any = drawn.corpus.dataset
    history, horizon = check_forecast_request(drawn.trained.config, request)
    season = request.season or find_season(data.series, history)
    contexts = held_out_windows(data, horizon, request.windows)
    points = naive_baselines(horizon, season)
    points |= fit_peers(request.peers, data, horizon)
    scores = ScoreAccumulator(QUANTILES)
    batches = make_forecasts(
        drawn.trained.components,
        contexts,
        points,
        QUANTILES,
        EvalOptions(logit_bias=drawn.options.logit_bias),
        samples=request.samples,
        direct=request.direct,
    )
    for batch in batches:
        scores.add(batch.forecast.distribution, batch.quantile_BQHC, batch.batch, batch.point_BHC)
    error, cluster_W = scores.each()
    peers: dict[str, dict[str, list[float]]] = {}
    for peer in points:
        peers[peer] = {name: error[f"{name} {peer}"].tolist() for name in ("mse", "mae")}
    return Forecasts(
        horizon=horizon,
        total=contexts.total,
        cluster=cluster_W.tolist(),
        error={name: error[name].tolist() for name in ("mse", "mae", "crps", "inside")},
        peers=peers,
    )


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
    evaluations: Mapping[str, Mapping[int, SeriesEvaluation]], reference: str
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
        known = {seed: run.forecast for seed, run in runs.items() if run.forecast is not None}
        if len(known) < len(runs):
            return None
        methods[name] = known
    first = _check_windows(methods)
    tables = {}
    for score in (*SCORES, "inside"):
        tables[score] = _compare_score(methods, first, score, reference)
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


def _check_windows(methods: Mapping[str, Mapping[int, Forecasts]]) -> Forecasts:
    """Return the forecasts of one run, unless another has forecast other steps or windows."""
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
    return first


def _compare_score(
    methods: Mapping[str, Mapping[int, Forecasts]], first: Forecasts, score: str, reference: str
) -> ScoreTable:
    """Compare one score of methods and baselines, of which nothing is known to be inside an interval."""
    of_baseline = {"mse": "mse", "mae": "mae", "crps": "mae"}
    scores: dict[str, Any] = {}
    seeds = {}
    for name, of_method in methods.items():
        scores[name] = [each.error[score] for each in of_method.values()]
        seeds[name] = list(of_method)
    if score in of_baseline:
        for name, error in first.peers.items():
            scores[name] = error[of_baseline[score]]
    return compare_scores(scores, documents=first.cluster, seeds=seeds, reference=reference)
