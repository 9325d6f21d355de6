"""What ``tokenv bench`` may be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenv.config.schema import Config
from tokenv.errors import UserError


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Args:
        config: model, batch (``train.batch_size`` x ``data.seq_len``) and hardware; the data are random bytes.
        repeats: timed rounds; every round times every variant once.
        stepping: also step through the environment: its time and its results against the one-pass rollout's.

    Raises:
        UserError: fewer than one round.
    """

    config: Config
    repeats: int = 5
    stepping: bool = True

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UserError(f"repeats = {self.repeats}: expected at least 1")

    def as_dict(self) -> dict[str, Any]:
        """What Sacred stores."""
        return self.config.as_dict() | {"repeats": self.repeats, "stepping": self.stepping}
