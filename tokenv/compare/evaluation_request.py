"""What to measure of a finished run: options, which are read before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenv.forecasting.config import check_request


@dataclass(frozen=True)
class ForecastRequest:
    """Forecasts of test windows to score, as ``tokenv forecast`` does.

    Attributes:
        horizon: steps to forecast; None for all which a run's direct head predicts.
        windows: number of test windows, evenly spaced over the test steps; 0 for one per step.
        direct: whether to use the direct head; else continuations are drawn value by value.
        samples: number of drawn continuations per forecast.
        season: steps of a season; None to estimate it from the training steps.
        peers: further models beside the naive baselines.

    Raises:
        UserError: see ``check_request``.
    """

    horizon: int | None = None
    windows: int = 1400
    direct: bool = True
    samples: int = 25
    season: int | None = None
    peers: list[str] = field(default_factory=lambda: ["dlinear"])

    def __post_init__(self) -> None:
        names = ("horizon", "samples", "windows", "season", "peers")
        check_request(**{name: getattr(self, name) for name in names}, prefix="forecast.")


@dataclass(frozen=True)
class EvaluationRequest:
    """What to measure of a finished run.

    Attributes:
        passages: number of held-out sequences to store with their boundaries.
        bpe_vocabulary: size of the BPE vocabulary which boundaries in text are compared with.
        calibrate: whether to measure at exactly the target rate; see ``tokenv.evaluation.calibration``.
        rates: further boundary rates to measure at, in boundaries per symbol.
        forecast: forecasts to score; None for none.
    """

    passages: int = 3
    bpe_vocabulary: int = 32_000
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    forecast: ForecastRequest | None = None
