"""Checks of forecast options, without importing torch, so that options are checked before it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

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
