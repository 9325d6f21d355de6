"""How far a run has come: saved and read whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from tokenv.config.convert import make, renamed
from tokenv.config.schema import Config
from tokenv.data.stream import TrainStream
from tokenv.run.evaluate import Evaluation
from tokenv.run.parts import Parts
from tokenv.storage import checkpoints

Log = Callable[[str, float, int], None]
History = dict[str, tuple[list[int], list[float]]]


@dataclass
class RunState:
    """All of a run but its tensors.

    Attributes:
        config: the run, as plain nested dictionaries; ``settings`` gives it checked.
        unit: what its losses are measured in, such as ``bits_per_byte``.
        step: updates done.
        symbols: trained on so far.
        flops: spent so far.
        data: where the stream of training sequences stands.
        history: all metrics by name: symbols seen and values.
        validation: the last one.
    """

    config: dict[str, Any]
    unit: str
    step: int = 0
    symbols: int = 0
    flops: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=dict)
    validation: Evaluation | None = None

    @property
    def settings(self) -> Config:
        """The configuration.

        Raises:
            ValueError: this version cannot read it.
        """
        settings: Config = make(Config, self.config)
        return settings

    @property
    def loss(self) -> float | None:
        """Validation loss of the parameters as they are; None if they have learned since, or were never validated."""
        symbols, losses = self.history.get(f"validation/{self.unit}", ([], []))
        return losses[-1] if symbols and symbols[-1] == self.symbols else None

    def record(self, prefix: str, values: Mapping[str, float | None], log: Log) -> None:
        """Add metrics to the history, and log them; None is not measured."""
        for name, value in values.items():
            if value is not None:
                symbols, recorded = self.history.setdefault(f"{prefix}/{name}", ([], []))
                symbols.append(self.symbols)
                recorded.append(value)
                log(f"{prefix}/{name}", value, self.symbols)

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
    def from_dict(cls, values: Mapping[str, Any]) -> RunState:
        """What ``as_dict`` gave, now or in an earlier version: symbols were bytes, and bits the only unit."""
        unit = values.get("unit", "bits_per_byte")
        validation, history = values["validation"], dict(values["history"])
        if "train/bytes_per_second" in history:
            history["train/symbols_per_second"] = history.pop("train/bytes_per_second")
        return cls(
            config=renamed(Config, values["config"]),
            unit=unit,
            step=values["step"],
            symbols=values["symbols"] if "symbols" in values else values["bytes"],
            flops=values["flops"],
            data=values["data"],
            history={name: (list(x), list(y)) for name, (x, y) in history.items()},
            validation=Evaluation.from_metrics(validation, unit) if validation else None,
        )

    @classmethod
    def read(cls, path: Path) -> RunState:
        """Of a checkpoint, without its tensors."""
        return cls.from_dict(checkpoints.load_state(path))

    def checkpoint(self, parts: Parts, optimizer: torch.optim.Optimizer, stream: TrainStream) -> checkpoints.Checkpoint:
        """All that is needed to go on from here."""
        self.data = stream.state_dict()
        moments = checkpoints.optimizer_tensors(optimizer, parts.named_parameters())
        return checkpoints.Checkpoint(parts.state_dict(), moments, self.as_dict())

    @classmethod
    def restore(
        cls,
        checkpoint: checkpoints.Checkpoint,
        parts: Parts,
        optimizer: torch.optim.Optimizer,
        stream: TrainStream,
    ) -> RunState:
        """Put model, optimiser and stream where they were at ``checkpoint``."""
        state = cls.from_dict(checkpoint.state)
        parts.load_state_dict(checkpoint.tensors)
        checkpoints.load_optimizer(optimizer, parts.named_parameters(), checkpoint.optimizer)
        stream.load_state_dict(state.data)
        return state
