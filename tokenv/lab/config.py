"""What ``tokenv bench`` may be asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenv.config.conversion import from_dict
from tokenv.config.files import merge, nest_key
from tokenv.config.schema import Config
from tokenv.core.errors import UserError

RANKS = "ranks"  # a size that is no key of the configuration


@dataclass(frozen=True)
class BenchOptions:
    """What to measure.

    Args:
        config: model, batch (``train.batch_size`` x ``data.seq_len``) and hardware; the data are random bytes.
        repeats: timed rounds; every round times every variant once.
        stepping: also step through the environment: its time and its results against the one-pass rollout's.
        plain: also time a plain transformer in the same rounds: as many layers of the same width, all over all bytes,
            with full attention and the middle's MLP.
        scaling: dotted key of the configuration to the sizes at which to measure instead, each in a process of its own,
            such as ``{data.seq_len: [1024, 4096], model.width: [128, 256]}``. With ``ranks: [1, 2, 4]`` so many
            processes of this machine make the same update together.
        rates: boundaries per symbol at which to time reading and writing as well, in turn, such as [0.05, 0.2, 0.5].
        samples: of series: numbers of continuations at which to time forecasts instead, in turn, and the direct head's
            beside them where there is one, such as [1, 25, 100].
        horizon: steps of these forecasts.
        out: where ``scaling`` leaves its figures and its picture: ``OUT.csv`` and ``OUT.png``.

    Raises:
        UserError: fewer than one round, or what ``scaling`` says is no list of sizes of a run.
    """

    config: Config
    repeats: int = 5
    stepping: bool = True
    plain: bool = False
    scaling: dict[str, Any] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    horizon: int = 24
    out: str = "scaling"

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UserError(f"repeats = {self.repeats}: expected at least 1")
        for rate in self.rates:
            if not 1 <= rate * self.config.data.seq_len < self.config.data.seq_len:
                raise UserError(
                    f"rates = {rate:g}: expected boundaries per symbol, at least 1 / data.seq_len and below 1, such "
                    "as 0.2"
                )
        for number in self.samples:
            if number < 2:
                raise UserError(f"samples = {self.samples!r}: expected at least 2 of each, to tell a spread")
        if self.samples and (self.scaling or self.rates):
            raise UserError(f"samples = {self.samples!r}: expected neither scaling nor rates beside it")
        for key, values in self.scaling.items():
            if not isinstance(values, list) or not values or not all(type(value) in (int, float) for value in values):
                raise UserError(f"scaling.{key} = {values!r}: expected a list of sizes, such as [1024, 4096]")
        for _ in self.sizes():
            pass

    def sizes(self) -> Iterator[tuple[str, int | float, Config]]:
        """Every key and value of ``scaling``, and the configuration with it."""
        for key, values in self.scaling.items():
            for value in values:
                if key == RANKS:
                    self._check_ranks(value)
                    yield key, value, self.config
                else:
                    yield key, value, from_dict(Config, merge(self.config.as_dict(), nest_key(key, value)))

    def _check_ranks(self, value: int | float) -> None:
        if not isinstance(value, int) or value < 1:
            raise UserError(f"scaling.{RANKS} = {value!r}: expected numbers of processes, such as [1, 2, 4]")
        from tokenv.config.batch_assignment import BatchAssignment  # help is told without torch

        BatchAssignment.of(self.config.train, world=value)

    def as_dict(self) -> dict[str, Any]:
        """What Sacred stores."""
        own = {name: value for name, value in asdict(self).items() if name != "config"}
        sizes = [{"key": key, "values": values} for key, values in self.scaling.items()]  # Sacred's keys hold no dots
        return self.config.as_dict() | own | {"scaling": sizes}
