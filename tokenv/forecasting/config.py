"""Options of forecasts; no import of torch, so that options are checked before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenv.core.errors import at_least, bounds, check_bounds

PEERS = ("dlinear",)


def _are_peers(names: Any) -> bool:
    return not isinstance(names, str) and all(name in PEERS for name in names)


# Metadata of options, of this request and of ``tokenv forecast``.
HORIZON, SAMPLES, WINDOWS = at_least(1, optional=True), at_least(2), at_least(0)
SEASON = bounds("a number of steps, such as 24, or null to estimate it", at_least(1, optional=True)["accepts"])
PEER_NAMES = bounds(f"names among {', '.join(PEERS)}", _are_peers)


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
        UserError: a number is too small, or a peer model is unknown.
    """

    horizon: int | None = field(default=None, metadata=HORIZON)
    windows: int = field(default=1400, metadata=WINDOWS)
    direct: bool = True
    samples: int = field(default=25, metadata=SAMPLES)
    season: int | None = field(default=None, metadata=SEASON)
    peers: list[str] = field(default_factory=lambda: ["dlinear"], metadata=PEER_NAMES)

    def __post_init__(self) -> None:
        check_bounds(self, "forecast.")
