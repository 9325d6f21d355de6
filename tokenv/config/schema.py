"""The configuration of a training run: every key, its meaning, and what it may be."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

from tokenv.config.registry import nearest
from tokenv.data.config import DataConfig
from tokenv.lm.config import UNetConfig


def _require(condition: bool, key: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"{key} = {value!r}: expected {expected}")


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses beside the language model's own (paper, eq. 27).

    Args:
        policy: of the policy loss.
        rate: of the rate target.
        early: of the early exit's cross-entropy.
        direct: of the direct head's, where ``model.horizon`` is not 0.
    """

    policy: float = 0.01
    rate: float = 0.01
    early: float = 0.1
    direct: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _require(math.isfinite(value) and value >= 0, f"loss.{item.name}", value, "a weight of 0 or more")


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast.

    Args:
        bytes: training bytes in all; a byte is one symbol of a sequence.
        batch_size: sequences of one forward and backward pass; the batch-relative advantage compares these.
        accumulate: passes whose gradients are averaged into one update.
        learning_rate: peak of the schedule.
        warmup_bytes: bytes of the linear warm-up; then a cosine to ``final_learning_rate``. Where these are not less
            than ``bytes``, so that a run would end before its warm-up, the warm-up is a tenth of ``bytes``: a
            configuration stays one that runs when nothing but its length is cut.
        final_learning_rate: end of the schedule, as a fraction of the peak.
        beta1: of AdamW.
        beta2: of AdamW.
        weight_decay: of AdamW, on matrices only.
        clip: largest gradient norm over all parameters.
    """

    bytes: int = 8_000_000
    batch_size: int = 32
    accumulate: int = 1
    learning_rate: float = 3e-3
    warmup_bytes: int = 400_000
    final_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    clip: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bytes", "batch_size", "accumulate"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "a whole number of at least 1")
        _require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "a positive number")
        _require(self.warmup_bytes >= 0, "train.warmup_bytes", self.warmup_bytes, "0 or more")
        _require(0 <= self.final_learning_rate <= 1, "train.final_learning_rate", self.final_learning_rate, "0 to 1")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "a number in [0, 1)")
        _require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "0 or more")
        _require(self.clip > 0, "train.clip", self.clip, "a positive norm (.inf to switch clipping off)")

    @property
    def warmup(self) -> int:
        """Bytes of the warm-up that is run: ``warmup_bytes``, or a tenth of ``bytes`` where these do not fit."""
        return self.warmup_bytes if self.warmup_bytes < self.bytes else self.bytes // 10


@dataclass(frozen=True)
class ValidationConfig:
    """When and on how much to measure.

    Args:
        every_bytes: training bytes between two validations; one more follows the last update.
        sequences: at most so many validation sequences.
        batch_size: sequences of one pass.
    """

    every_bytes: int = 2_000_000
    sequences: int = 512
    batch_size: int = 64

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _require(value >= 1, f"validation.{item.name}", value, "a whole number of at least 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep.

    Args:
        every_bytes: training bytes between two checkpoints; one more follows the last update.
        keep: newest checkpoints kept; the best by validation bits per byte is kept besides.
    """

    every_bytes: int = 2_000_000
    keep: int = 2

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _require(value >= 1, f"checkpoint.{item.name}", value, "a whole number of at least 1")


@dataclass(frozen=True)
class HardwareConfig:
    """Where and in what precision.

    Args:
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` or ``cuda:1``.
        precision: of activations: ``auto`` (bfloat16 where the hardware has it), ``float32``, ``bfloat16`` or
            ``float64`` (parameters too).
        compile: ``auto`` (on CUDA), ``on`` or ``off``.
        threads: CPU threads; 0 for torch's own choice.
    """

    device: str = "auto"
    precision: str = "auto"
    compile: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        precisions = ("auto", "float32", "bfloat16", "float64")
        _require(
            self.device in ("auto", "cpu") or self.device.split(":")[0] == "cuda",
            "hardware.device",
            self.device,
            "auto, cpu, cuda or cuda:N",
        )
        _require(self.precision in precisions, "hardware.precision", self.precision, " or ".join(precisions))
        _require(self.compile in ("auto", "on", "off"), "hardware.compile", self.compile, "auto, on or off")
        _require(self.threads >= 0, "hardware.threads", self.threads, "0 or more")


@dataclass(frozen=True)
class Config:
    """A complete training run.

    Args:
        seed: of parameters, data order and actions.
        rate: target boundaries per symbol, in (0, 1).
        data: corpus and cutting.
        model: size of the U-Net.
        codec: ``name`` of what the U-Net reads and predicts, and its options: ``bytes`` or ``series``.
        agent: ``name`` of an agent and its options.
        estimator: ``name`` of an estimator and its options.
        rate_target: ``name`` of a rate target and its options.
        loss: weights of the losses.
        train: length and optimiser.
        validation: when to measure.
        checkpoint: when to save.
        hardware: device and precision.
    """

    seed: int = 0
    rate: float = 0.2
    data: DataConfig = field(default_factory=DataConfig)
    model: UNetConfig = field(default_factory=UNetConfig)
    codec: dict[str, Any] = field(default_factory=lambda: {"name": "bytes"})
    agent: dict[str, Any] = field(default_factory=lambda: {"name": "learned"})
    estimator: dict[str, Any] = field(default_factory=lambda: {"name": "reinforce"})
    rate_target: dict[str, Any] = field(default_factory=lambda: {"name": "logit_pressure"})
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        _require(self.seed >= 0, "seed", self.seed, "a whole number of 0 or more")
        _require(0 < self.rate < 1, "rate", self.rate, "boundaries per symbol in (0, 1), such as 0.2")
        most = self.data.seq_len - 1
        _require(self.model.horizon <= most, "model.horizon", self.model.horizon, f"at most data.seq_len - 1 = {most}")
        wrong = {"bytes": "series", "series": "text"}.get(self.codec["name"])
        _require(self.data.kind != wrong, "codec.name", self.codec["name"], f"a codec for data.kind={self.data.kind}")

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as in a YAML file."""
        return dataclasses.asdict(self)


NAMED = ("codec", "agent", "estimator", "rate_target")  # sections that name a class and pass it options


def check_keys(values: dict[str, Any], where: str, kind: type = Config, prefix: str = "") -> None:
    """Refuse keys that no configuration has.

    Args:
        values: nested dictionaries, possibly a part of a whole configuration.
        where: the file or command line they come from, for the message.
        kind: dataclass they should fit.
        prefix: of the keys, for the message.

    Raises:
        ValueError: names the file, the key and the nearest known one.
    """
    known = get_type_hints(kind)
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{where}: unknown key {prefix}{key}: {nearest(key, list(known))}")
        if is_dataclass(known[key]):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {prefix}{key} = {value!r}: expected a section with keys of its own")
            check_keys(value, where, known[key], f"{prefix}{key}.")
        elif key in NAMED and not prefix and not isinstance(value, dict):
            raise ValueError(f"{where}: {key} = {value!r}: expected a section such as {key}.name={value}")


def make(kind: type, values: dict[str, Any], prefix: str = "") -> Any:
    """Turn nested dictionaries into a checked dataclass.

    Raises:
        ValueError: a value has the wrong type or is out of range; the message names its key.
    """
    hints = get_type_hints(kind)
    made = {}
    for key, value in values.items():
        made[key] = make(hints[key], value, f"{prefix}{key}.") if is_dataclass(hints[key]) else value
        if not is_dataclass(hints[key]):
            made[key] = _convert(value, hints[key], f"{prefix}{key}")
    return kind(**made)


def _convert(value: Any, hint: Any, key: str) -> Any:
    """Accept what a person may write for a type: 1e6 for a whole number, 1 for a float."""
    if hint is bool:
        _require(isinstance(value, bool), key, value, "true or false")
    elif hint is int:
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
        _require(whole, key, value, "a whole number")
        return int(value)
    elif hint is float:
        if isinstance(value, str):  # YAML reads 3e-3 as text
            try:
                return float(value)
            except ValueError:
                pass
        _require(isinstance(value, int | float) and not isinstance(value, bool), key, value, "a number")
        return float(value)
    elif hint is str:
        _require(isinstance(value, str), key, value, "text")
    elif hint == str | None:
        _require(value is None or isinstance(value, str), key, value, "text or null")
    return value
