"""Score the forecasts of several methods, and compare them with naive baselines and DLinear."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tokenv.compare.evaluation_request import ForecastRequest
from tokenv.compare.run_evaluation import Forecasts, RunEvaluation
from tokenv.compare.significance import Difference, Scores, corrected, difference
from tokenv.config.components import Components
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.data.series.windows import SeriesData
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.forecasting.baseline_models import find_season, fit_peers, naive_baselines
from tokenv.forecasting.contexts import Array, held_out_windows
from tokenv.forecasting.forecaster import check_forecast, make_forecasts
from tokenv.forecasting.scores import ScoreAccumulator as ForecastScores

SCORES = ("mse", "mae", "crps")
Pair = tuple[str, str]


class Run(Protocol):
    """What is read of a run."""

    @property
    def folder(self) -> str:
        """Where it is stored."""

    @property
    def seed(self) -> int:
        """Of the run."""

    @property
    def assessment(self) -> RunEvaluation:
        """Its figures."""


@dataclass(frozen=True)
class ScoreStatistics:
    """A score of one forecaster.

    Attributes:
        mean: over windows and seeds.
        seed_error: standard error over seeds; NaN for one, or for a forecaster without.
        window_error: standard error over windows, those of one cluster depending on one another.
        each: of every seed.
    """

    mean: float
    seed_error: float
    window_error: float
    each: list[float]


@dataclass(frozen=True)
class Forecaster:
    """A method, yardstick or peer.

    Attributes:
        name: of it.
        is_method: whether it is a method of the comparison.
        figures: ``mse``, ``mae``, ``crps`` and ``inside``; of others than methods no ``inside``, and a ``crps`` that is
            the ``mae``, as that of every single value is.
        skill: yardstick or peer to 1 - MSE / its MSE.
    """

    name: str
    is_method: bool
    figures: Mapping[str, ScoreStatistics]
    skill: Mapping[str, float]


@dataclass(frozen=True)
class ForecastComparison:
    """All that is told of forecasts.

    Attributes:
        horizon: steps of each.
        windows: test windows that were forecast.
        total: those that there are.
        forecasters: lowest MSE first.
        differences: score to pairs (two methods, or a method and another forecaster) to their difference, window by
            window and seed by seed.
    """

    horizon: int
    windows: int
    total: int
    forecasters: Sequence[Forecaster]
    differences: Mapping[str, Mapping[Pair, Difference]]

    @property
    def peers(self) -> list[str]:
        """Names of those that are no methods, in the order of their MSE."""
        return [each.name for each in self.forecasters if not each.is_method]

    def oriented(self, score: str) -> dict[Pair, Difference]:
        """Every pair from both sides."""
        found = self.differences[score]
        return {**found, **{(second, first): -each for (first, second), each in found.items()}}


def compare_forecasts(methods: Mapping[str, Sequence[Run]], against: str) -> ForecastComparison | None:
    """Compare what runs foretold.

    Args:
        methods: name to its runs, one a seed.
        against: the method whose pairs Holm's correction counts; empty, or of no run, for all pairs.

    Returns:
        None where a run has not been asked to forecast.

    Raises:
        UserError: runs have forecast other steps or windows.
    """
    asked = [(run, run.assessment.forecast) for group in methods.values() for run in group]
    known = [(run, found) for run, found in asked if found is not None]
    if len(known) < len(asked):
        return None
    first_run, first = known[0]
    for run, found in known:
        if (found.horizon, found.cluster) != (first.horizon, first.cluster):
            raise UserError(
                f"{run.folder} forecasts {found.horizon} steps of {len(found.cluster):,} test windows and "
                f"{first_run.folder} {first.horizon} of {len(first.cluster):,}: expected the same windows; name one "
                "forecast.horizon, and compare runs of the same data section"
            )
    forecasters = [_method(name, group, first) for name, group in methods.items()]
    forecasters += [_peer(name, first) for name in first.peers]
    forecasters.sort(key=lambda each: (math.isnan(each.figures["mse"].mean), each.figures["mse"].mean))
    differences = {score: _differences(methods, first, score, against) for score in SCORES}
    return ForecastComparison(first.horizon, len(first.cluster), first.total, forecasters, differences)


def _scores(group: Sequence[Run], name: str) -> Scores:
    found = [run.assessment.forecast for run in group]
    error_SW = np.array([each.error[name] for each in found if each is not None])
    cluster = next(each.cluster for each in found if each is not None)
    return Scores(error_SW, np.array(cluster), tuple(run.seed for run in group))


def _of_peer(found: Forecasts, peer: str, name: str, seeds: tuple[int, ...]) -> Scores:
    """A peer has no seeds: it is the same with each of a method's."""
    error_W = found.peers[peer]["mae" if name == "crps" else name]
    return Scores(np.array([error_W] * len(seeds)), np.array(found.cluster), seeds)


def _method(name: str, group: Sequence[Run], first: Forecasts) -> Forecaster:
    figures = {}
    for score in (*SCORES, "inside"):
        found = _scores(group, score)
        each = [float(value) for value in found.loss_SB.mean(1)]
        figures[score] = ScoreStatistics(found.mean, found.seed_error, found.document_error, each)
    return Forecaster(name, True, figures, _skill(figures["mse"].mean, first))


def _peer(name: str, first: Forecasts) -> Forecaster:
    figures = {}
    for score in SCORES:
        found = _of_peer(first, name, score, (0,))
        figures[score] = ScoreStatistics(found.mean, math.nan, found.document_error, [])
    return Forecaster(name, False, figures, _skill(figures["mse"].mean, first))


def _skill(mse: float, first: Forecasts) -> dict[str, float]:
    other = {name: float(np.mean(errors["mse"])) for name, errors in first.peers.items()}
    return {name: 1 - mse / value if value > 0 else math.nan for name, value in other.items()}


def _differences(
    methods: Mapping[str, Sequence[Run]], first: Forecasts, score: str, against: str
) -> dict[Pair, Difference]:
    own = {name: _scores(group, score) for name, group in methods.items()}
    found = {(one, other): difference(own[one], own[other]) for one, other in itertools.combinations(own, 2)}
    for name, scores in own.items():
        for peer in first.peers:
            found[name, peer] = difference(scores, _of_peer(first, peer, score, scores.seeds))
    tested = {pair: each for pair, each in found.items() if against in pair or against not in methods}
    return found | corrected(tested)


QUANTILES = (0.1, 0.5, 0.9)  # the outermost bound the interval whose coverage is told
OF_MODEL, OF_PEER = ("mse", "mae", "crps", "inside"), ("mse", "mae")


def check_wish(config: Config, wish: ForecastRequest) -> int:
    """Steps of history that forecasts go on from; refuses what a run of this configuration could not be asked.

    Raises:
        UserError: it is of text, its direct head does not reach so far, its sequences or memory are too short, or the
            season is longer than a history.
    """
    if config.data.kind != "series":
        raise UserError(f"forecast with data.kind = {config.data.kind!r}: expected series, or leave forecast out")
    horizon = _horizon(config, wish)
    return check_forecast(config, horizon, samples=wish.samples, direct=wish.direct, season=wish.season)


def _horizon(config: Config, wish: ForecastRequest) -> int:
    if wish.horizon is None and not config.model.horizon:
        raise UserError(
            "forecast.horizon is null and model.horizon = 0: expected one of them, the steps to forecast or those that "
            "a direct head predicts"
        )
    return wish.horizon or config.model.horizon


def score_forecasts(
    config: Config, parts: Components, data: SeriesData, wish: ForecastRequest, logit_bias: float = 0.0
) -> Forecasts:
    """Forecast test windows.

    Args:
        config: of the run.
        parts: of the run, in evaluation mode.
        data: of the run.
        wish: what to forecast.
        logit_bias: see ``tokenv.forecasting.forecaster.forecast``.

    Raises:
        UserError: see ``check_wish``; or there are too few test steps.
    """
    known, horizon = check_wish(config, wish), _horizon(config, wish)
    season = wish.season or find_season(data.series, known)
    histories, points = held_out_windows(data, horizon, wish.windows), naive_baselines(horizon, season)
    points |= fit_peers(wish.peers, data, horizon)
    scores = ForecastScores(QUANTILES)
    every = make_forecasts(
        parts,
        histories,
        points,
        QUANTILES,
        EvalOptions(logit_bias=logit_bias),
        samples=wish.samples,
        direct=wish.direct,
    )
    for made in every:
        scores.add(made.forecast.distribution, made.quantile_BQHC, made.batch, made.point_BHC)
    error, cluster_W = scores.each()

    def listed(name: str) -> list[float]:
        value_W: Array = error[name]
        return [float(value) for value in value_W]

    return Forecasts(
        horizon=horizon,
        total=histories.total,
        cluster=cluster_W.tolist(),
        error={name: listed(name) for name in OF_MODEL},
        peers={peer: {name: listed(f"{name} {peer}") for name in OF_PEER} for peer in points},
    )
