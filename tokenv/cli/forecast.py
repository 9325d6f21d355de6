"""``tokenv forecast``: continue series, with intervals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tokenv.cli.json_output import write_json_output
from tokenv.cli.options import ForecastOptions, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.config.hardware import prepare
from tokenv.core.errors import UserError
from tokenv.data.series.tables import read_table
from tokenv.data.series.windows import load_series
from tokenv.evaluation.loaded_run import LoadedRun, load_run, resolve_rate
from tokenv.forecasting.contexts import ForecastContexts, held_out_windows, last_windows
from tokenv.forecasting.forecast_batch import checked_history, fit_peers, make_forecasts
from tokenv.forecasting.naive_baselines import Points, find_season, naive_baselines
from tokenv.forecasting.report import (
    ForecastExcerpt,
    draw_forecasts,
    iter_series,
    score_rows,
    warnings_of,
    write_forecasts,
)
from tokenv.forecasting.scores import ScoreAccumulator
from tokenv.plotting.characters import warn
from tokenv.plotting.console import console, summary_table

DRAWN = 4  # series of the picture
KEPT = 1000  # forecasts of a JSON file; of more, it holds those that are drawn


def forecast_series(options: ForecastOptions, _record: Record) -> dict[str, Any]:
    """Continue series; hold the forecasts against what came, where that is known."""
    trained = load_run(options.run, options.checkpoint)
    config, horizon = trained.config, options.horizon
    prepare(config.hardware)
    if config.data.kind != "series":
        raise UserError(f"run = {options.run!r} is of text: expected a run of series; tokenv generate continues text")
    asked: dict[str, Any] = {"samples": options.samples, "direct": options.direct, "season": options.season}
    known = checked_history(config, horizon, **asked)
    histories, points = _sources(options, trained)
    season = options.season or find_season(histories.series, known)
    made = _ForecastRun(options, trained, histories, naive_baselines(horizon, season) | points)
    table, picture = Path(f"{options.out}.csv"), Path(f"{options.out}.png")
    write_forecasts(made.all_of_them(), options.quantiles, table)
    title = f"{options.run}, {horizon} steps"
    draw_forecasts(made.drawn, options.quantiles, made.source, picture, title=title, context=config.data.series.context)
    missed, result = trained.state.missed_rate, {}
    if histories.known:
        score = made.scores.result()
        result = asdict(score) | {"season": season, "of": histories.total}
        console().print(summary_table(score_rows(score, histories.total, horizon), title="forecasts against what came"))
        for warning in warnings_of(score, histories.total):
            warn(warning)
    if missed:
        warn(missed)
    console().print(f"forecasts: {table}, {picture}; quantiles {made.source}; season {season}")
    kept = made.kept if len(histories) <= KEPT else made.drawn
    write_json_output(options.json, {"scores": result, "forecasts": [each.as_dict(options.quantiles) for each in kept]})
    return result


def _sources(options: ForecastOptions, trained: LoadedRun) -> tuple[ForecastContexts, Points]:
    """What is to be continued, and the peers that were asked for."""
    config = trained.config
    if options.csv is not None:
        return last_windows(read_table(Path(options.csv), config.data.series), config, options.horizon), {}
    data = load_series(config.data)
    histories = held_out_windows(data, options.horizon, options.windows)
    return histories, fit_peers(options.peers, data, options.horizon)


class _ForecastRun:
    """Forecasts, made and scored a batch at a time; what is drawn or told is kept.

    Attributes:
        scores: of those made so far.
        drawn: a few of them, evenly over all.
        kept: the first.
        source: what quantiles are of.
    """

    def __init__(
        self, options: ForecastOptions, trained: LoadedRun, histories: ForecastContexts, points: Points
    ) -> None:
        self._options, self._trained, self._histories, self._points = options, trained, histories, points
        self.scores, self.source = ScoreAccumulator(options.quantiles), ""
        self.drawn: list[ForecastExcerpt] = []
        self.kept: list[ForecastExcerpt] = []

    def all_of_them(self) -> Iterator[ForecastExcerpt]:
        """Make them."""
        options, number = self._options, 0
        last = len(self._histories) - 1
        drawn = {round(i * last / (DRAWN - 1)) for i in range(DRAWN)}
        every = make_forecasts(
            self._trained.components,
            self._histories,
            self._points,
            options.quantiles,
            samples=options.samples,
            direct=options.direct,
            rate=resolve_rate(self._trained.components, self._trained.config, options.rate),
            seed=options.seed,
        )
        with tqdm(total=last + 1, desc="forecast", leave=False, disable=not sys.stderr.isatty()) as bar:
            for made in every:
                self.source = made.forecast.law.source
                if made.batch.truth_BHC is not None:
                    self.scores.add(made.forecast.law, made.quantile_BQHC, made.batch, made.point_BHC)
                for each in iter_series(made):
                    if number in drawn:
                        self.drawn.append(each)
                    if number < KEPT:
                        self.kept.append(each)
                    number += 1
                    yield each
                bar.update(len(made.batch.names))


COMMAND = Command("forecast", partial(resolve_options, ForecastOptions), forecast_series, ForecastOptions)
run = COMMAND.run
