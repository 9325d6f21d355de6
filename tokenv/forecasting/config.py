"""Options of forecasts; no import of torch, so that options are checked before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenv.core.errors import UserError

PEERS = ("dlinear",)


def check_request(
    *, horizon: int | None, samples: int, windows: int, season: int | None, peers: Sequence[str], prefix: str = ""
) -> None:
    """Check the options of forecasts.

    Args:
        horizon: number of steps; None for as many as a model's direct head predicts.
        samples: continuations of a history.
        windows: number of test windows; 0 for all.
        season: steps of a season; None to estimate it.
        peers: names of peer models.
        prefix: prefix of the keys in the message.

    Raises:
        UserError: a number is too small, or a peer model is unknown.
    """
    for name, value, least in (("horizon", horizon, 1), ("samples", samples, 2), ("windows", windows, 0)):
        if value is not None and value < least:
            raise UserError(f"{prefix}{name} = {value}: expected at least {least}")
    if season is not None and season < 1:
        raise UserError(f"{prefix}season = {season}: expected a number of steps, such as 24, or null to estimate it")
    for name in peers:
        if name not in PEERS:
            raise UserError(f"{prefix}peers = {list(peers)!r}: expected names among {', '.join(PEERS)}")


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
