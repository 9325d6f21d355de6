"""How far a run has come: saved and read whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tokenv.config.conversion import convert, from_dict, migrate_keys
from tokenv.config.schema import Config
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.evaluation.evaluator import Evaluation
from tokenv.storage import checkpoints

Log = Callable[[str, float, int], None]
RATE_FREE_AGENTS = ("bpe", "mixed", "never", "whitespace")  # agents whose rate is the text's own, or drawn
RATE_TOLERANCE = 0.2
History = dict[str, tuple[list[int], list[float]]]


def off_target(config: Config, rate: float) -> bool:
    """Whether a rate of boundaries is more than a fifth off the run's target; no, where it has none, or a range."""
    if isinstance(config.rate, RateRange) or config.agent["name"] in RATE_FREE_AGENTS:
        return False
    return abs(rate / config.rate - 1) > RATE_TOLERANCE


@dataclass
class RunState:
    """All of a run but its tensors.

    Attributes:
        config: the run, as plain nested dictionaries; ``settings`` gives it checked.
        unit: what its losses are measured in, such as ``bits_per_byte``.
        step: updates done.
        symbols: trained on so far.
        flops: that the method has needed so far.
        flops_executed: so far, padded tokens and recomputed layers included.
        data: where the streams of training sequences stand.
        history: all metrics by name: symbols seen and values.
        validation: the last one.
    """

    config: dict[str, Any]
    unit: str
    step: int = 0
    symbols: int = 0
    flops: int = 0
    flops_executed: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    validation: Evaluation | None = None

    @property
    def settings(self) -> Config:
        """The configuration.

        Raises:
            ValueError: this version cannot read it.
        """
        settings: Config = from_dict(Config, self.config)
        return settings

    @property
    def loss(self) -> float | None:
        """Validation loss of the parameters as they are; None if they have learned since, or were never validated."""
        symbols, losses = self.history.get(f"validation/{self.unit}", ([], []))
        return losses[-1] if symbols and symbols[-1] == self.symbols else None

    @property
    def missed_rate(self) -> str:
        """A sentence, where the last validation's boundaries miss the target rate; else empty."""
        config, last = self.settings, self.validation
        if last is None or not off_target(config, last.boundary_rate):
            return ""
        return f"the run draws {last.boundary_rate:.3g} boundaries a step and misses its target, rate = {config.rate:g}"

    def record(self, prefix: str, values: Mapping[str, float | None], log: Log, at: int | None = None) -> None:
        """Add metrics to the history, and log them; None is not measured. ``at`` so many symbols; None: at present."""
        at = self.symbols if at is None else at
        for name, value in values.items():
            if value is not None:
                symbols, recorded = self.history.setdefault(f"{prefix}/{name}", ([], []))
                symbols.append(at)
                recorded.append(value)
                log(f"{prefix}/{name}", value, at)

    def replay(self, log: Log) -> None:
        """Log the whole history."""
        for name, (symbols, values) in self.history.items():
            for seen, value in zip(symbols, values, strict=True):
                log(name, value, seen)

    def as_dict(self) -> dict[str, Any]:
        """What ``state.json`` holds; the loss stands under its unit's name."""
        validation = None if self.validation is None else self.validation.metrics()
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"validation": validation, self.unit: self.loss}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], whence: object = "the state") -> RunState:
        """What ``as_dict`` gave, now or in an earlier version: symbols were bytes, and bits the only unit.

        Raises:
            UserError: it is no such thing; the message names ``whence``.
        """
        try:
            return cls._from_dict(values, f"{whence}: ")
        except KeyError as error:
            raise UserError(f"{whence}: {error} is missing: expected a state as a checkpoint holds it") from None
        except (TypeError, AttributeError) as error:
            raise UserError(f"{whence}: no state as a checkpoint holds it: {error}") from None

    @classmethod
    def _from_dict(cls, values: Mapping[str, Any], where: str) -> RunState:
        unit = convert(values.get("unit", "bits_per_byte"), str, f"{where}unit")
        validation, history = values["validation"], dict(values["history"])
        if "train/bytes_per_second" in history:
            history["train/symbols_per_second"] = history.pop("train/bytes_per_second")
        return cls(
            config=migrate_keys(Config, values["config"]),
            unit=unit,
            step=convert(values["step"], int, f"{where}step"),
            symbols=convert(values["symbols"] if "symbols" in values else values["bytes"], int, f"{where}symbols"),
            flops=convert(values["flops"], int, f"{where}flops"),
            flops_executed=convert(values.get("flops_executed", values["flops"]), int, f"{where}flops_executed"),
            data=convert(values["data"], dict[str, Any], f"{where}data"),
            history={name: _series(of, f"{where}history of {name}") for name, of in history.items()},
            validation=Evaluation.from_metrics(validation, unit) if validation else None,
        )

    @classmethod
    def read(cls, path: Path) -> RunState:
        """Of a checkpoint, without its tensors."""
        return cls.from_dict(checkpoints.load_state(path), path)


def _series(of: Any, where: str) -> tuple[list[int], list[float]]:
    """Symbols seen and values of one metric."""
    two = isinstance(of, list | tuple) and len(of) == 2 and all(isinstance(each, list | tuple) for each in of)
    if not two or len(of[0]) != len(of[1]) or not all(isinstance(x, int | float) for each in of for x in each):
        raise UserError(f"{where}: expected symbols seen and as many values, two lists of numbers")
    return list(of[0]), list(of[1])
