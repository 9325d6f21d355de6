"""Forecasts for programs: data frames in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd

from tokenv.config.hardware import check_forecast
from tokenv.core.errors import UserError
from tokenv.data.series.tables import read_frame
from tokenv.evaluation.evaluator import DEFAULTS, EvalOptions
from tokenv.evaluation.loaded_run import LoadedRun, resolve_rate
from tokenv.forecasting.config import check_request
from tokenv.forecasting.contexts import Array, ContextBatch, last_windows
from tokenv.forecasting.forecast_batch import make_forecasts
from tokenv.forecasting.forecaster import check_horizon


def forecast_frame(
    trained: LoadedRun,
    frame: pd.DataFrame,
    horizon: int,
    quantiles: Sequence[float],
    options: EvalOptions = DEFAULTS,
    *,
    samples: int,
    direct: bool | None,
) -> pd.DataFrame:
    """Continue the series of a data frame; see ``tokenv.library.model.Model.forecast``."""
    if list(quantiles) != sorted(set(quantiles)) or not all(0 < q < 1 for q in quantiles):
        raise UserError(f"quantiles = {list(quantiles)}: expected ascending numbers in (0, 1), as [0.1, 0.5, 0.9]")
    check_request(horizon=horizon, samples=samples, windows=0, season=None, peers=[])
    config, parts = trained.config, trained.components
    if direct is None:
        direct = parts.lm.config.horizon >= horizon
    check_horizon(parts.lm.config, horizon, direct=direct)
    if not direct:
        check_forecast(config, samples, horizon)
    histories = last_windows(read_frame(frame, config.data.series), config, horizon)
    options = replace(options, rate=resolve_rate(parts, config, options.rate))
    found: dict[str, list[pd.DataFrame]] = {series.name: [] for series in histories.series}
    for made in make_forecasts(parts, histories, {}, quantiles, options, samples=samples, direct=direct):
        value = {"mean": made.forecast.law.mean_BHC}
        value |= {f"q{q:g}": made.quantile_BQHC[:, place] for place, q in enumerate(quantiles)}
        for row, name in enumerate(made.batch.names):
            found[name] += _frames(made.batch, row, horizon, {key: value_BHC[row] for key, value_BHC in value.items()})
    return pd.concat([each for frames in found.values() for each in frames], ignore_index=True)


def _frames(batch: ContextBatch, row: int, horizon: int, value: Mapping[str, Array]) -> list[pd.DataFrame]:
    """One for every channel of a series: its values [H, C] by column."""
    date_N, columns = batch.date_BN[row], batch.series[row].columns
    dates = range(1, horizon + 1) if date_N is None else date_N[-horizon:]
    return [
        pd.DataFrame(
            {"unique_id": column if len(columns) > 1 else batch.names[row], "ds": dates}
            | {key: value_HC[:, channel] for key, value_HC in value.items()}
        )
        for channel, column in enumerate(columns)
    ]
