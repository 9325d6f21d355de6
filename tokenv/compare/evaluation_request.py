"""Describe what is to be measured of a run; options are read before torch is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenv.forecasting.config import check_request


@dataclass(frozen=True)
class ForecastRequest:
    """Forecasts of test windows that are to be scored, as ``tokenv forecast`` does.

    Attributes:
        horizon: steps to forecast; None for all that a run's direct head predicts.
        windows: test windows, evenly over the test steps; 0 for all, one a step.
        direct: ask the direct head; else draw continuations value by value.
        samples: continuations that a forecast is made of, where they are drawn.
        season: steps of a season; None finds it in the training steps.
        peers: further forecasts beside the yardsticks.

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
    """What is to be measured of a run.

    Attributes:
        passages: held-out sequences to keep with their boundaries.
        bpe_vocabulary: size of the BPE vocabulary that boundaries in text are held against.
        calibrate: whether to measure at exactly the target rate; see ``tokenv.evaluation.calibration``.
        rates: boundaries per symbol to measure at besides; see ``tokenv.evaluation.calibration``.
        forecast: forecasts to be scored; None for none.
    """

    passages: int = 3
    bpe_vocabulary: int = 32_000
    calibrate: bool = False
    rates: list[float] = field(default_factory=list)
    forecast: ForecastRequest | None = None
