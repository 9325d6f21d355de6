"""``tokenv forecast``, which this package registers as other packages register commands of theirs."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenv.config.commands import Record
from tokenv.core.atomic import output
from tokenv.core.errors import COUNT, UserError, bounds
from tokenv.core.rates import REQUESTED_RATE
from tokenv.evaluation.run_command import RunCommand, check_input
from tokenv.plotting.console import console, summary_table, warn, write_json_output
from tokenv.series.config import PEER_NAMES, SAMPLES, SEASON, WINDOWS

if TYPE_CHECKING:
    from tokenv.config.schema import Config
    from tokenv.series.baseline_models import Baselines
    from tokenv.series.contexts import ForecastContexts

QUANTILES = bounds(
    "ascending numbers in (0, 1), as [0.1,0.5,0.9]",
    lambda values: bool(values) and all(low < high for low, high in pairwise([0, *values, 1])),
)
MAX_JSON = 1000  # forecasts in a JSON file; if there are more, it holds those in the picture


@dataclass(frozen=True)
class Forecast(RunCommand):
    """Continue a series, with intervals: ``with run=runs/8 csv=my.csv``; without csv, score test windows.

    Args:
        json: file for all results, in addition to what is printed; null for none.
        csv: CSV or parquet file whose series are continued, wide or long (``unique_id, ds, y``); null for the test
            windows of the run's data, whose forecasts are compared with the actual values.
        horizon: number of steps to forecast.
        samples: number of continuations per forecast.
        rate: boundaries per step, for a run which was trained for a range of rates; null for the mean of the range.
        windows: number of test windows to forecast, evenly over the test steps; 0 for all, one per step.
        direct: take the densities of all steps from the direct head, instead of sampling value after value.
        season: steps of a season, for the seasonal naive baseline; null estimates it on the training steps.
        peers: further models to compare with: ``dlinear``, trained on the training windows.
        quantiles: probabilities, ascending; the first and the last bound the interval in the picture.
        out: name of the output files, without their endings .csv and .png.
        title: title of the picture; empty for none, null for one which names the run.
    """

    json: str | None = field(default=None, metadata=output())
    csv: str | None = field(default=None, metadata={"check": check_input})
    horizon: int = field(default=96, metadata=COUNT)
    samples: int = field(default=100, metadata=SAMPLES)
    rate: float | None = field(default=None, metadata=REQUESTED_RATE)
    windows: int = field(default=16, metadata=WINDOWS)
    direct: bool = False
    season: int | None = field(default=None, metadata=SEASON)
    peers: list[str] | str = field(default_factory=list, metadata=PEER_NAMES)
    quantiles: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9], metadata=QUANTILES)
    out: str = field(default="forecast", metadata=output(".csv", ".png"))
    title: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.peers, str):
            object.__setattr__(
                self, "peers", [name for name in self.peers.strip("[] ").split(",") if name]
            )
        super().__post_init__()
        if self.peers and self.csv is not None:
            raise UserError(
                f"peers = {self.peers!r} with csv: expected csv=null, for they are held against what came"
            )

    def work(self, _record: Record) -> dict[str, Any]:
        """Forecast series, and score the forecasts if the actual values are known."""
        from tokenv.evaluation.evaluator import EvalOptions
        from tokenv.evaluation.loaded_run import resolve_rate
        from tokenv.series.baseline_models import find_season, naive_baselines
        from tokenv.series.forecaster import check_forecast, make_forecasts
        from tokenv.series.report import draw_forecasts, score_rows, warnings_of, write_forecasts

        trained = self.load(kind="series")
        config = trained.config
        horizon = self.horizon
        steps = check_forecast(
            config,
            horizon,
            samples=self.samples,
            direct=self.direct,
            season=self.season,
            held_out=self.csv is None,
        )
        contexts, points = self._load_contexts(config)
        season = self.season or find_season(contexts.series, steps)
        batches = make_forecasts(
            trained.components,
            contexts,
            naive_baselines(horizon, season) | points,
            self.quantiles,
            EvalOptions(seed=self.seed, rate=resolve_rate(trained.components, config, self.rate)),
            samples=self.samples,
            direct=self.direct,
        )
        table = Path(f"{self.out}.csv")
        shown = sys.stderr.isatty()
        forecasts = write_forecasts(
            batches, len(contexts), self.quantiles, table, most=MAX_JSON, progress=shown
        )
        picture = Path(f"{self.out}.png")
        title = self.title
        if title is None:
            title = f"{self.run}, {horizon} steps"
        draw_forecasts(
            forecasts.pictured,
            self.quantiles,
            forecasts.source,
            picture,
            title=title,
            context=config.data.options.context,
        )
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
        files = f"{table}, {picture}"
        console().print(f"forecasts: {files}; quantiles {forecasts.source}; season {season}")
        values = [each.as_dict(self.quantiles) for each in forecasts.stored]
        write_json_output(self.json, {"scores": result, "forecasts": values})
        return result

    def _load_contexts(self, config: Config) -> tuple[ForecastContexts, Baselines]:
        """Load the contexts of the forecasts, and fit the requested peers."""
        from tokenv.series.baseline_models import fit_peers
        from tokenv.series.contexts import held_out_windows, last_windows
        from tokenv.series.tables import read_table
        from tokenv.series.windows import load_series

        if self.csv is not None:
            table = read_table(Path(self.csv), config.data.options)
            return last_windows(table, config, self.horizon), {}
        data = load_series(config.data)
        peers = fit_peers(self.peers, data, self.horizon)
        return held_out_windows(data, self.horizon, self.windows), peers
