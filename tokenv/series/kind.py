"""Time series as a kind of data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from tokenv.core.errors import UserError
from tokenv.core.terminology import Terminology
from tokenv.data.config import HUB_PREFIX, DataConfig
from tokenv.data.kinds import DataKind
from tokenv.series.config import (
    SUFFIXES,
    SYNTHETIC_SERIES,
    DirectHeadConfig,
    ForecastRequest,
    SeriesConfig,
)

WORDS = Terminology("series", "step", "patch", "patches", "group", "change points")


@dataclass(frozen=True)
class SeriesKind(SeriesConfig, DataKind):
    """Time series, which are split by time and cut into windows. The options are those of ``SeriesConfig``."""

    words: ClassVar[Terminology] = WORDS
    codec: ClassVar[str] = "series"
    sources: ClassVar[Mapping[str, str]] = SYNTHETIC_SERIES
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    picture: ClassVar[str] = "patches.png"
    draw_picture: ClassVar[str] = "tokenv.series.report:draw_held_out_patches"
    model: ClassVar[str] = "tokenv.series.frames:SeriesModel"
    forecast_work: ClassVar[str] = "tokenv.series.forecast_speed:prepare_forecasts"
    evaluation: ClassVar[str] = "tokenv.series.series_comparison:SeriesEvaluation"
    report: ClassVar[str] = "tokenv.series.comparison_report:SeriesReport"
    forecast: ClassVar[type] = ForecastRequest

    @property
    def boundary_tolerance(self) -> int:
        """Steps that a boundary may be off a true one."""
        return self.tolerance

    @property
    def codec_options(self) -> dict[str, Any]:
        """Numbers of predicted values and of covariates in a symbol."""
        return {"channels": self.channels, "covariates": len(self.covariates)}

    @property
    def min_bytes(self) -> int:
        """Memory of the synthetic series: values, and true boundaries."""
        return self.count * self.length * 9

    @classmethod
    def claims(cls, source: str) -> bool:
        """Return whether a source is a synthetic series or a .csv file; .parquet may also hold text."""
        return source in cls.sources or source.endswith(".csv")

    def check_source(self, data: DataConfig) -> None:
        """Check that the source holds series, and that the context leaves something to predict.

        Raises:
            UserError: it does not.
        """
        source = data.source
        if (
            not self.claims(source)
            and not source.endswith(SUFFIXES)
            and not source.startswith(HUB_PREFIX)
        ):
            raise UserError(
                f"data.source is {source!r}; expected of a series one of {', '.join(SYNTHETIC_SERIES)}, a "
                f"{' or '.join(SUFFIXES)} file or {HUB_PREFIX}owner/name: choose one, or set data.kind=text"
            )
        if data.validation_source is not None:
            raise UserError(
                f"data.validation_source is {data.validation_source!r}; a series is held out by time: leave it out"
            )
        if self.context >= data.seq_len:
            raise UserError(
                f"data.options.context is {self.context}; expected less than data.seq_len = {data.seq_len}, or "
                "no step is left to predict: lower it"
            )
        if self.joint and source in SYNTHETIC_SERIES:
            raise UserError(
                f"data.options.joint is true; {source!r} has a single channel: leave it out"
            )

    def load(self, data: DataConfig) -> Any:
        """Read or generate the series; see ``load_series``."""
        from tokenv.series.windows import load_series

        return load_series(data)

    def prepare_model(self, lm: Any, dataset: Any) -> None:
        """Fit the linear path and the moments of covariates to the training steps."""
        from tokenv.series.baseline_models import fit_to_training_steps

        fit_to_training_steps(lm, dataset)

    def check_forecast(self, config: Any, request: ForecastRequest) -> None:
        """Check that a run can make the forecasts which a comparison requests; see ``check_forecast_request``."""
        from tokenv.series.series_comparison import check_forecast_request

        check_forecast_request(config, request)

    def check_run(self, config: Any, codec: Any) -> None:
        """Check that forecasts by the direct head, and covariates, fit the windows.

        Raises:
            UserError: they do not.
        """
        head = DirectHeadConfig.of(config.codec)
        most = config.data.seq_len - 1
        if head.horizon > most:
            raise UserError(
                f"codec.horizon = {head.horizon}: expected at most data.seq_len - 1 = {most}"
            )
        if head.direct:
            self._check_direct(config, head)
        if self.covariates:
            self._check_covariates(config, head.horizon)

    def _check_direct(self, config: Any, head: DirectHeadConfig) -> None:
        history = config.data.seq_len - head.horizon
        if self.context != history:
            raise UserError(
                f"data.options.context = {self.context}: expected data.seq_len - codec.horizon = {history} with "
                "codec.direct=True: the history is normalised as a whole, and has no likelihood"
            )
        path = head.linear_path
        if path not in (0, history):
            raise UserError(
                f"codec.linear_path = {path}: expected 0, or data.seq_len - codec.horizon = {history}"
            )

    def _check_covariates(self, config: Any, horizon: int) -> None:
        if horizon < 1:
            raise UserError(
                f"codec.horizon = {horizon}: expected at least 1 with covariates, which the direct head alone reads"
            )
        steps = 0
        expected = "0, which is right without data.options.future_covariates"
        if self.future_covariates:
            steps = horizon
            expected = f"{steps}, which is codec.horizon"
        if self.future_steps != steps:
            raise UserError(f"data.options.future_steps = {self.future_steps}: expected {expected}")
        if config.data.source in SYNTHETIC_SERIES:
            raise UserError(
                f"data.source = {config.data.source!r}: expected a file or hub data set, whose columns are covariates"
            )
