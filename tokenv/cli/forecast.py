"""``tokenv forecast``: forecast series with intervals."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenv.cli.options import ForecastOptions, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.hardware import prepare
from tokenv.core.errors import UserError
from tokenv.evaluation.evaluator import EvalOptions
from tokenv.evaluation.loaded_run import LoadedRun, load_run, resolve_rate
from tokenv.plotting.console import console, csv_rows, summary_table, warn, write_json_output
from tokenv.series.baseline_models import Baselines, find_season, fit_peers, naive_baselines
from tokenv.series.contexts import ForecastContexts, held_out_windows, last_windows
from tokenv.series.forecaster import check_forecast, make_forecasts
from tokenv.series.report import (
    ForecastExcerpt,
    draw_forecasts,
    forecast_header,
    forecast_rows,
    iter_series,
    score_rows,
    warnings_of,
)
from tokenv.series.scores import ScoreAccumulator
from tokenv.series.tables import read_table
from tokenv.series.windows import load_series

PICTURE_SERIES = 4  # forecasts in the picture
MAX_JSON = 1000  # forecasts in a JSON file; if there are more, it holds those in the picture


def forecast_series(options: ForecastOptions, _record: Record) -> dict[str, Any]:
    """Forecast series, and score the forecasts if the actual values are known."""
    trained = load_run(options.run, options.checkpoint)
    config = trained.config
    horizon = options.horizon
    prepare(config.hardware)
    if config.data.kind != "series":
        raise UserError(f"run = {options.run!r} is of text: expected a run of series; tokenv generate continues text")
    steps = check_forecast(
        config,
        horizon,
        samples=options.samples,
        direct=options.direct,
        season=options.season,
        held_out=options.csv is None,
    )
    contexts, points = _load_contexts(options, trained)
    season = options.season or find_season(contexts.series, steps)
    table = Path(f"{options.out}.csv")
    forecasts = _forecast_all(options, trained, contexts, naive_baselines(horizon, season) | points, table)
    picture = Path(f"{options.out}.png")
    title = options.title
    if title is None:
        title = f"{options.run}, {horizon} steps"
    context = config.data.options.context
    draw_forecasts(forecasts.pictured, options.quantiles, forecasts.source, picture, title=title, context=context)
    result: dict[str, Any] = {}
    if contexts.known:
        score = forecasts.scores.result()
        result = asdict(score) | {"season": season, "of": contexts.total}
        rows = score_rows(score, contexts.total, horizon)
        console().print(summary_table(rows, title="forecasts against what came"))
        for warning in warnings_of(score, contexts.total):
            warn(warning)
    if trained.state.missed_rate:
        warn(trained.state.missed_rate)
    console().print(f"forecasts: {table}, {picture}; quantiles {forecasts.source}; season {season}")
    stored = forecasts.first if len(contexts) <= MAX_JSON else forecasts.pictured
    values = [each.as_dict(options.quantiles) for each in stored]
    write_json_output(options.json, {"scores": result, "forecasts": values})
    return result


def _load_contexts(options: ForecastOptions, trained: LoadedRun) -> tuple[ForecastContexts, Baselines]:
    """Load the contexts of the forecasts, and fit the requested peers."""
    config = trained.config
    if options.csv is not None:
        return last_windows(read_table(Path(options.csv), config.data.options), config, options.horizon), {}
    data = load_series(config.data)
    contexts = held_out_windows(data, options.horizon, options.windows)
    return contexts, fit_peers(options.peers, data, options.horizon)


@dataclass(frozen=True)
class _Forecasts:
    """What is kept of all forecasts, whose values are in a file.

    Attributes:
        scores: scores of the forecasts whose actual values are known.
        source: source of the quantiles.
        pictured: some forecasts, evenly over all.
        first: the first forecasts.
    """

    scores: ScoreAccumulator
    source: str
    pictured: list[ForecastExcerpt]
    first: list[ForecastExcerpt]


def _forecast_all(
    options: ForecastOptions, trained: LoadedRun, contexts: ForecastContexts, points: Baselines, table: Path
) -> _Forecasts:
    """Compute and score all forecasts batch by batch, and write each to ``table``: there may be too many to keep."""
    components = trained.components
    total = len(contexts)
    rate = resolve_rate(components, trained.config, options.rate)
    batches = make_forecasts(
        components,
        contexts,
        points,
        options.quantiles,
        EvalOptions(seed=options.seed, rate=rate),
        samples=options.samples,
        direct=options.direct,
    )
    chosen = {round(i * (total - 1) / (PICTURE_SERIES - 1)) for i in range(PICTURE_SERIES)}
    scores = ScoreAccumulator(options.quantiles)
    source = ""
    pictured: list[ForecastExcerpt] = []
    first: list[ForecastExcerpt] = []
    number = 0
    with (
        csv_rows(table, forecast_header(options.quantiles)) as write,
        tqdm(total=total, desc="forecast", leave=False, disable=not sys.stderr.isatty()) as bar,
    ):
        for batch in batches:
            source = batch.forecast.distribution.source
            if batch.batch.truth_BHC is not None:
                scores.add(batch.forecast.distribution, batch.quantile_BQHC, batch.batch, batch.point_BHC)
            for each in iter_series(batch):
                for row in forecast_rows(each):
                    write(row)
                if number in chosen:
                    pictured.append(each)
                if number < MAX_JSON:
                    first.append(each)
                number += 1
            bar.update(len(batch.batch.names))
    return _Forecasts(scores, source, pictured, first)


COMMAND = Command("forecast", partial(resolve_options, ForecastOptions), forecast_series, ForecastOptions)
