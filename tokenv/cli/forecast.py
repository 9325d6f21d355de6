"""``tokenv forecast``: continue series, with intervals."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tokenv.cli.found import write_found
from tokenv.cli.options import ForecastOptions, resolve_options
from tokenv.cli.sacred import Command, Record
from tokenv.data.series.tables import read_csv
from tokenv.data.series.windows import load_series
from tokenv.errors import UserError
from tokenv.forecast.forecast import forecast, held_out_windows, history_steps, last_windows
from tokenv.forecast.report import as_dicts, draw_forecasts, write_forecasts
from tokenv.forecast.scores import score_forecasts
from tokenv.lm.codecs.series import VALUE
from tokenv.report.table import console, summary_table
from tokenv.run.asked import rate_to_tell
from tokenv.run.hardware import prepare
from tokenv.run.memory import check_forecast
from tokenv.run.stored import load_run

DRAWN = 4  # series of the picture


def forecast_series(options: ForecastOptions, _record: Record) -> dict[str, Any]:
    """Continue series; hold the forecasts against what came, where that is known."""
    trained = load_run(options.run, options.checkpoint)
    config = trained.config
    prepare(config.hardware)
    if config.data.kind != "series":
        raise UserError(f"run = {options.run!r} is of text: expected a run of series; tokenv generate continues text")
    known, held_out = history_steps(config, options.horizon), None
    if options.csv is None:
        held_out = held_out_windows(load_series(config.data), options.horizon, options.windows)
        names, history_BL = held_out.names, held_out.symbol_BN[:, :known]
    else:
        recording = read_csv(Path(options.csv), config.data.series)
        names, history_BL = last_windows(recording, config, options.horizon)
    check_forecast(config, len(names), options.samples, options.horizon, direct=options.direct)
    made = forecast(
        trained.parts,
        names,
        history_BL,
        options.horizon,
        samples=options.samples,
        seed=options.seed,
        direct=options.direct,
        rate=rate_to_tell(trained.parts, config, options.rate),
        progress=sys.stderr.isatty(),
    )
    truth_BHC = None if held_out is None else held_out.symbol_BN[:, known:, :, VALUE].numpy()
    table, picture, result = Path(f"{options.out}.csv"), Path(f"{options.out}.png"), {}
    write_forecasts(made, options.quantiles, table, truth_BHC=truth_BHC)
    some = sorted({round(i * (len(made) - 1) / (DRAWN - 1)) for i in range(DRAWN)})
    draw_forecasts(
        [made[i] for i in some],
        options.quantiles,
        picture,
        title=f"{options.run}, {options.horizon} steps",
        context=config.data.series.context,
        truth_BHC=None if truth_BHC is None else truth_BHC[some],
    )
    if held_out is not None:
        result = asdict(score_forecasts(made, held_out))
        rows = {name: f"{result[name]:.4f} ± {result[f'{name}_error']:.4f}" for name in ("mse", "mae", "crps")}
        rows["of"] = f"{result['windows']} windows, {options.horizon} steps, standardised"
        console().print(summary_table(rows, title="forecasts against what came"))
    console().print(f"forecasts: {table}, {picture}")
    write_found(options.json, {"scores": result, "forecasts": as_dicts(made, options.quantiles, truth_BHC)})
    return result


COMMAND = Command("forecast", partial(resolve_options, ForecastOptions), forecast_series)
run = COMMAND.run
