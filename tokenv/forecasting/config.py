"""What may be asked of forecasts, checked; options are read before torch is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from tokenv.core.errors import UserError

PEERS = ("dlinear",)


def check_request(
    *, horizon: int | None, samples: int, windows: int, season: int | None, peers: Sequence[str], prefix: str = ""
) -> None:
    """Refuse what no forecast can be asked.

    Args:
        horizon: steps; None for as many as a model's direct head predicts.
        samples: continuations of a history.
        windows: test windows; 0 for all.
        season: steps of a season; None to find it.
        peers: further forecasts.
        prefix: of the keys, for the message.

    Raises:
        UserError: a number is too small, or a peer is unknown.
    """
    for name, value, least in (("horizon", horizon, 1), ("samples", samples, 2), ("windows", windows, 0)):
        if value is not None and value < least:
            raise UserError(f"{prefix}{name} = {value}: expected at least {least}")
    if season is not None and season < 1:
        raise UserError(f"{prefix}season = {season}: expected the steps of one, such as 24, or null to find it")
    for name in peers:
        if name not in PEERS:
            raise UserError(f"{prefix}peers = {list(peers)!r}: expected names among {', '.join(PEERS)}")
