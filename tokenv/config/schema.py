"""The configuration of a training run: every key, its meaning, and what it may be."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tokenv.config.conversion import RENAMED_OPTIONS, Limit, Section
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.data.config import DataConfig
from tokenv.lm.config import UNetConfig


def _require(condition: bool, key: str, value: Any, expected: str) -> None:
    if not condition:
        raise UserError(f"{key} = {value!r}: expected {expected}")


def check_seed(seed: int, key: str = "seed") -> None:
    """Refuse what is no seed for all who draw random numbers.

    Raises:
        UserError: it is negative or too large.
    """
    _require(0 <= seed < 2**32, key, seed, "a whole number from 0 to 4294967295")


# What holds of a key of ``Config``, by its field's metadata.
MAY_CHANGE = {"may_change": True}  # when a run is resumed
NO_SETTING = {"setting": False}  # says nothing about the method
MACHINE = MAY_CHANGE | NO_SETTING | {"identity": False}  # changes no result, or only its last digits
EARLY_WEIGHT = 0.1  # of the early exit's loss, where ``loss.early`` is null
MOST_THREADS = 1024  # any process can have; a million crash it


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses beside the language model's own (paper, eq. 27).

    Args:
        policy: of the policy loss.
        rate: of the rate target.
        early: of the early exit's cross-entropy; null for 0.1 where the agent learns or reads the early exit, and none
            elsewhere. Where it is 0, or null for an agent that has no use for it, training skips the early exit.
        direct: of the direct head's, where ``model.horizon`` is not 0; with ``model.direct`` it is the model's own.
    """

    policy: float = 0.01
    rate: float = 0.01
    early: float | None = None
    direct: float = 1.0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            _require(value is None or value >= 0, f"loss.{item.name}", value, "a weight of 0 or more")

    def weight(self, name: str) -> float:
        """Return the weight of a loss that is computed."""
        value: float | None = getattr(self, name)
        return EARLY_WEIGHT if value is None else value


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast.

    Args:
        symbols: training symbols in all: bytes of text, steps of series.
        batch_size: sequences of one forward and backward pass; the batch-relative advantage compares these.
        gradient_accumulation_steps: passes whose gradients are averaged into one update.
        optimizer: who makes an update's step: ``adamw`` as in the paper, or ``muon``, which orthogonalises the steps of
            the layers' matrices (everything else is AdamW's) and learns more from few updates, with a learning rate
            some five times as high.
        learning_rate: peak of the schedule.
        embedding_learning_rate: the same of the language model's embedding, output heads and all else outside its
            layers, which AdamW learns under ``muon``, too; null for ``learning_rate``.
        agent_learning_rate: the same of agent and estimator, whose schedule has the same shape; null for
            ``learning_rate``.
        warmup_symbols: symbols of the linear warm-up; then a cosine to ``final_learning_rate``. Where these are not
            less than ``symbols``, so that a run would end before its warm-up, the warm-up is a tenth of ``symbols``:
            a configuration stays one that runs when nothing but its length is cut.
        final_learning_rate: end of the schedule, as a fraction of the peak.
        beta1: of AdamW; the momentum of Muon.
        beta2: of AdamW.
        weight_decay: of both, on matrices only.
        max_grad_norm: largest norm of the gradient of all parameters; a larger gradient is scaled down to it.
    """

    symbols: int = field(default=8_000_000, metadata={"was": "bytes"})
    batch_size: int = 32
    gradient_accumulation_steps: int = field(default=1, metadata={"was": "accumulate"})
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    embedding_learning_rate: float | None = None
    agent_learning_rate: float | None = None
    warmup_symbols: int = field(default=400_000, metadata={"was": "warmup_bytes"})
    final_learning_rate: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    max_grad_norm: Limit = field(default=1.0, metadata={"was": "clip"})

    def __post_init__(self) -> None:
        for name in ("symbols", "batch_size", "gradient_accumulation_steps"):
            _require(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "a whole number of at least 1")
        _require(self.learning_rate > 0, "train.learning_rate", self.learning_rate, "a positive number")
        for name in ("embedding_learning_rate", "agent_learning_rate"):
            own = getattr(self, name)
            _require(own is None or own > 0, f"train.{name}", own, "a positive number, or null")
        _require(self.warmup_symbols >= 0, "train.warmup_symbols", self.warmup_symbols, "0 or more")
        _require(0 <= self.final_learning_rate <= 1, "train.final_learning_rate", self.final_learning_rate, "0 to 1")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name}", getattr(self, name), "a number in [0, 1)")
        _require(self.weight_decay >= 0, "train.weight_decay", self.weight_decay, "0 or more")
        _require(
            self.max_grad_norm > 0,
            "train.max_grad_norm",
            self.max_grad_norm,
            "a positive norm (.inf to switch clipping off)",
        )

    @property
    def warmup(self) -> int:
        """Symbols of the warm-up that is run: ``warmup_symbols``, or a tenth of ``symbols`` where these do not fit."""
        return self.warmup_symbols if self.warmup_symbols < self.symbols else self.symbols // 10


@dataclass(frozen=True)
class ValidationConfig:
    """When and on how much to measure.

    Args:
        every_symbols: training symbols between two validations; one more follows the last update.
        sequences: at most so many validation sequences.
        batch_size: sequences of one pass.
        calibrate: whether to measure once more at exactly the target rate, on the same sequences; the policy's logits
            are shifted as other validation sequences ask (``tokenv.evaluation.calibration``). Metrics are named
            ``calibrated/``.
    """

    every_symbols: int = field(default=2_000_000, metadata={"was": "every_bytes"})
    sequences: int = 512
    batch_size: int = 64
    calibrate: bool = False

    def __post_init__(self) -> None:
        for name in ("every_symbols", "sequences", "batch_size"):
            _require(
                getattr(self, name) >= 1, f"validation.{name}", getattr(self, name), "a whole number of at least 1"
            )


@dataclass(frozen=True)
class CheckpointConfig:
    """When to save, and what to keep.

    Args:
        every_symbols: training symbols between two checkpoints; one more follows the last update.
        keep: newest checkpoints kept; the best by validation bits per byte is kept besides.
    """

    every_symbols: int = field(default=2_000_000, metadata={"was": "every_bytes"})
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
        compile: whether layers, exits and the policy's draws are compiled; the results are the same but for rounding:
            ``auto`` (on CUDA), ``on`` or ``off``.
        activation_checkpointing: whether layers are computed again in the backward pass instead of being kept until
            then, a third more arithmetic for a fraction of the memory: ``auto`` (where what is kept would take more
            than half of the machine's memory), ``on`` or ``off``.
        sequence_packing: whether the token-level layers work on the tokens of all sequences in one pack, instead of
            padding to the longest; the results are the same: ``auto`` (where layers are compiled: they then keep their
            shapes), ``on`` or ``off``.
        small_flex_blocks: whether a GPU's byte-level attention works in blocks of 64, not 128, where ``model.window``
            is at most 64: half the arithmetic, by kernels that are looked for by the clock, minutes at the first step.
        threads: CPU threads, at most 1024 or four times the cores; 0 for torch's own choice.
        fsdp_size: processes that keep one copy of the model between them, where torchrun starts several; 1 for a whole
            copy each (docs/scale.md).
    """

    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    activation_checkpointing: Literal["auto", "on", "off"] = field(default="auto", metadata={"was": "recompute"})
    sequence_packing: Literal["auto", "on", "off"] = field(default="auto", metadata={"was": "pack"})
    small_flex_blocks: bool = field(default=False, metadata={"was": "small_blocks"})
    threads: int = 0
    fsdp_size: int = field(default=1, metadata={"was": "shard"})

    def __post_init__(self) -> None:
        _require(self.fsdp_size >= 1, "hardware.fsdp_size", self.fsdp_size, "a whole number of at least 1")
        known = re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device)
        _require(known is not None, "hardware.device", self.device, "auto, cpu, cuda or cuda:N")
        # A stored run of a larger machine stays readable here.
        most = max(4 * (os.cpu_count() or 1), MOST_THREADS)
        _require(0 <= self.threads <= most, "hardware.threads", self.threads, f"0 to {most}")


@dataclass(frozen=True)
class Config:
    """A complete training run.

    Args:
        seed: of parameters, data order and actions.
        rate: target boundaries per symbol, in (0, 1); or a range, ``{min: 0.05, max: 0.5}``, of which every sequence
            has its own, which the agent is told (docs/rates.md).
        data: corpus and cutting.
        model: size of the U-Net.
        codec: ``name`` of what the U-Net reads and predicts, and its options: ``bytes`` or ``series``.
        agent: ``name`` of an agent and its options.
        estimator: ``name`` of an estimator and its options.
        rate_target: ``name`` of a rate target and its options.
        init_from: an earlier run (its best checkpoint) or a checkpoint whose language model is taken, with its
            ``model`` and ``codec`` sections; null draws the parameters.
        freeze_lm: whether the language model keeps its parameters, so that only agent and estimator learn.
        loss: weights of the losses.
        train: length and optimiser.
        validation: when to measure.
        checkpoint: when to save.
        hardware: device and precision.
    """

    seed: int = field(default=0, metadata=NO_SETTING)
    rate: float | RateRange = 0.2
    data: DataConfig = field(default_factory=DataConfig)
    model: UNetConfig = field(default_factory=UNetConfig)
    codec: Section = field(default_factory=lambda: {"name": "bytes"})
    agent: Section = field(default_factory=lambda: {"name": "learned"}, metadata={"options_were": RENAMED_OPTIONS})
    estimator: Section = field(default_factory=lambda: {"name": "reinforce"})
    rate_target: Section = field(default_factory=lambda: {"name": "logit_pressure"})
    init_from: str | None = field(default=None, metadata={"was": "start.model"})
    freeze_lm: bool = field(default=False, metadata={"was": "start.frozen"})
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig, metadata=MAY_CHANGE)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig, metadata=MACHINE)
    hardware: HardwareConfig = field(default_factory=HardwareConfig, metadata=MACHINE)

    def __post_init__(self) -> None:
        for key in ("codec", "agent", "estimator", "rate_target"):
            name = getattr(self, key).get("name")
            _require(isinstance(name, str), f"{key}.name", name, "the name of one, or package.module:Class")
        check_seed(self.seed)
        untrained = self.freeze_lm and self.init_from is None
        _require(not untrained, "freeze_lm", self.freeze_lm, "init_from=RUN beside it: nobody has trained this model")
        if not isinstance(self.rate, RateRange):  # which checks itself
            words = "boundaries per symbol in (0, 1), such as 0.2, or a range such as rate.min=0.05 rate.max=0.5"
            _require(0 < self.rate < 1, "rate", self.rate, words)
        most = self.data.seq_len - 1
        _require(self.model.horizon <= most, "model.horizon", self.model.horizon, f"at most data.seq_len - 1 = {most}")
        if self.model.direct:
            self._check_direct()
        wrong = {"bytes": "series", "series": "text"}.get(self.codec["name"])
        _require(self.data.kind != wrong, "codec.name", self.codec["name"], f"a codec for data.kind={self.data.kind}")

    def _check_direct(self) -> None:
        _require(self.data.kind == "series", "data.kind", self.data.kind, "series, for model.direct=True")
        context, history = self.data.series.context, self.data.seq_len - self.model.horizon
        expected = (
            f"data.seq_len - model.horizon = {history} with model.direct=True: the history gives the frame, and "
            "nothing of it has a likelihood"
        )
        _require(context == history, "data.series.context", context, expected)

    @property
    def cut_len(self) -> int:
        """Symbols of the sequences that an agent cuts, the last of which draws no boundary.

        All of a sequence, or with ``model.direct`` the history and one symbol more.
        """
        return self.data.seq_len - (self.model.horizon - 1 if self.model.direct else 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries, as in a YAML file."""
        return dataclasses.asdict(self)


def _keys(fact: str, *, else_: bool) -> tuple[str, ...]:
    return tuple(item.name for item in fields(Config) if item.metadata.get(fact, else_))


MAY_CHANGE_ON_RESUME = _keys("may_change", else_=False)
IDENTITY = _keys("identity", else_=True)  # what two runs have in common that are the same run
SETTINGS = _keys("setting", else_=True)  # what tells methods apart
