"""The configuration of a training run: all keys with their meanings, defaults and ranges."""

import os
import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tokenv.core.conversion import Limit, Named, Section
from tokenv.core.errors import (
    COUNT,
    DECAY,
    FRACTION,
    NOT_NEGATIVE,
    NOT_NEGATIVE_OR_NULL,
    POSITIVE,
    POSITIVE_OR_NULL,
    SEED,
    SHARE,
    UserError,
    bounds,
    check_bounds,
)
from tokenv.core.rates import RateRange
from tokenv.data.config import DataConfig
from tokenv.data.kinds import all_kinds
from tokenv.lm.config import UNetConfig


def _check_named(key: str, section: Section) -> None:
    """Raise an error unless a section names a class."""
    name = section.get("name")
    if not isinstance(name, str):
        raise UserError(f"{key}.name = {name!r}: expected the name of one, or package.module:Class")


MAY_CHANGE_ON_RESUME = ("validation", "checkpoint", "hardware")  # sections of ``Config``
# Without effect on results, or only on their last digits, but for the precision.
NOT_IN_IDENTITY = ("checkpoint", "hardware")
VOCABULARY_OR_0 = bounds(
    "0, or a whole number of at least 256", lambda value: value == 0 or value >= 256
)
EARLY_WEIGHT = 0.1  # of the early exit's loss, if ``loss.early`` is null
# At least 1024, which every process can have, so that a stored run of a larger machine stays readable.
MAX_THREADS = max(4 * (os.cpu_count() or 1), 1024)
SYMBOLS = bounds("a whole number of at least 1, such as 8e6", COUNT["accepts"])
MAX_NORM = bounds("a positive norm (.inf to switch clipping off)", lambda value: value > 0)
DEVICE = bounds(
    "auto, cpu, cuda or cuda:N",
    lambda name: re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None,
)
RATE = bounds(
    "boundaries per symbol in (0, 1), such as 0.2, or a range such as rate.min=0.05 rate.max=0.5",
    lambda rate: isinstance(rate, RateRange) or 0 < rate < 1,
)
NAMED = {"check": _check_named}
THREADS = bounds(f"0 to {MAX_THREADS}", lambda value: 0 <= value <= MAX_THREADS)


@dataclass(frozen=True)
class LossConfig:
    """Weights of the losses (paper, eq. 27), and what they train.

    Args:
        likelihood: weight of the language model's own loss. The authors' released code has 0.9 beside an early exit
            of 0.1.
        policy: weight of the policy loss.
        rate: weight of the rate target's loss.
        imitation: weight of the cross-entropy between ``imitation.teacher`` and the policy after the imitation, while
            rewards train it (kickstarting, Schmitt et al. 2018, arXiv 1803.03835).
        early: weight of the early exit's cross-entropy; null for 0.1 if the estimator or the agent reads the early
            exit, and 0 otherwise. With 0, training does not compute the early exit.
        auxiliary: weight of the auxiliary head's loss if the codec has one and predicts single symbols, too.
        detach_encoder: whether policy loss and rate target train the agent alone: no gradient of theirs reaches the
            encodings which it reads, and the encoder. An imitation still trains both.
    """

    likelihood: float = field(default=1.0, metadata=NOT_NEGATIVE)
    policy: float = field(default=0.01, metadata=NOT_NEGATIVE)
    rate: float = field(default=0.01, metadata=NOT_NEGATIVE)
    imitation: float = field(default=0.0, metadata=NOT_NEGATIVE)
    early: float | None = field(default=None, metadata=NOT_NEGATIVE_OR_NULL)
    auxiliary: float = field(default=1.0, metadata=NOT_NEGATIVE)
    detach_encoder: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, "loss.")

    def weight(self, name: str) -> float:
        """Return the weight of a loss which is computed."""
        value: float | None = getattr(self, name)
        return EARLY_WEIGHT if value is None else value


@dataclass(frozen=True)
class ImitationConfig:
    """Imitation of another agent, with which the training of the policy begins (``tokenv.estimators.Imitation``).

    Until then one sample of each sequence is drawn, the estimator and the rate target wait, and the language model
    learns on the policy's own boundaries.

    Args:
        teacher: ``name`` of an agent which draws the boundaries of whole sequences, and its options, such as
            ``imitation.teacher.name=whitespace``; or ``pretrained``, an earlier run. Empty for no imitation.
        fraction: share of ``train.symbols`` for which the policy imitates, in (0, 1]; 1 for the whole run.
        weight: weight of the cross-entropy, in place of ``loss.policy``.
    """

    teacher: Section = field(default_factory=dict, metadata={"kind": "agent"})
    fraction: float = field(default=0.05, metadata=SHARE)
    weight: float = field(default=1.0, metadata=POSITIVE)

    def __post_init__(self) -> None:
        if self.teacher:
            _check_named("imitation.teacher", self.teacher)
        check_bounds(self, "imitation.")

    def symbols(self, total: int) -> int:
        """Return the training symbols for which the policy imitates, of so many in all."""
        return round(self.fraction * total) if self.teacher else 0


@dataclass(frozen=True)
class TrainConfig:
    """Length and optimizer of the training.

    Args:
        symbols: number of training symbols: bytes of text, steps of series.
        batch_size: sequences of one forward and backward pass; the batch-relative advantage compares these.
        gradient_accumulation_steps: passes whose gradients are averaged into one update.
        optimizer: ``adamw`` as in the paper, or ``muon``, which orthogonalises the steps of the layers' matrices (all
            other parameters have AdamW) and learns more from few updates, with a learning rate about five times as
            high.
        learning_rate: peak of the schedule.
        embedding_learning_rate: peak for the language model's embedding, output heads and all other parameters outside
            its layers, which have AdamW under ``muon``, too; null for ``learning_rate``.
        agent_learning_rate: peak for agent and estimator, with the same schedule; null for ``learning_rate``.
        warmup_symbols: symbols of the linear warm-up, which a cosine to ``final_learning_rate`` follows. If it is not
            less than ``symbols``, the warm-up is a tenth of ``symbols``, so that a shorter run needs no other key.
        initial_learning_rate: start of the warm-up, as a fraction of the peak.
        final_learning_rate: end of the schedule, as a fraction of the peak.
        beta1: first beta of AdamW; momentum of Muon.
        beta2: second beta of AdamW.
        weight_decay: weight decay of the matrices, with both optimizers.
        decay_vectors: whether norms and biases have the weight decay, too, as torch's AdamW has it by default.
        max_grad_norm: largest norm of the gradient of all parameters; a larger gradient is scaled down to it.
    """

    symbols: int = field(default=8_000_000, metadata=SYMBOLS)
    batch_size: int = field(default=32, metadata=COUNT)
    gradient_accumulation_steps: int = field(default=1, metadata=COUNT)
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = field(default=3e-3, metadata=POSITIVE)
    embedding_learning_rate: float | None = field(default=None, metadata=POSITIVE_OR_NULL)
    agent_learning_rate: float | None = field(default=None, metadata=POSITIVE_OR_NULL)
    warmup_symbols: int = field(default=400_000, metadata=NOT_NEGATIVE)
    initial_learning_rate: float = field(default=0.0, metadata=FRACTION)
    final_learning_rate: float = field(default=0.0, metadata=FRACTION)
    beta1: float = field(default=0.9, metadata=DECAY)
    beta2: float = field(default=0.999, metadata=DECAY)
    weight_decay: float = field(default=0.01, metadata=NOT_NEGATIVE)
    decay_vectors: bool = False
    max_grad_norm: Limit = field(default=1.0, metadata=MAX_NORM)

    def __post_init__(self) -> None:
        check_bounds(self, "train.")

    @property
    def warmup(self) -> int:
        """Symbols of the warm-up: ``warmup_symbols``, or a tenth of ``symbols`` if these are fewer."""
        return self.warmup_symbols if self.warmup_symbols < self.symbols else self.symbols // 10


@dataclass(frozen=True)
class ValidationConfig:
    """Schedule and size of the validation.

    Args:
        every_symbols: training symbols between two validations; one more follows the last update.
        sequences: maximal number of validation sequences; the statistics of boundaries of a run's page take no more.
        batch_size: sequences of one pass.
        calibrate: whether to validate once more at exactly the target rate, on the same sequences, with the policy's
            logits shifted by a bias which other validation sequences determine (``tokenv.evaluation.calibration``).
            These metrics are named ``calibrated/``.
        bpe_vocabulary: tokens of a BPE tokenizer, trained on the training data, with whose boundaries a validation of
            text compares the policy's, as it does with whitespace's; 0 for none.
    """

    every_symbols: int = field(default=2_000_000, metadata=SYMBOLS)
    sequences: int = field(default=512, metadata=COUNT)
    batch_size: int = field(default=64, metadata=COUNT)
    calibrate: bool = False
    bpe_vocabulary: int = field(default=0, metadata=VOCABULARY_OR_0)

    def __post_init__(self) -> None:
        check_bounds(self, "validation.")


@dataclass(frozen=True)
class CheckpointConfig:
    """Schedule and number of checkpoints.

    Args:
        every_symbols: training symbols between two checkpoints; one more follows the last update.
        keep: number of newest checkpoints which are not deleted, beside the best by validation bits per byte.
    """

    every_symbols: int = field(default=2_000_000, metadata=SYMBOLS)
    keep: int = field(default=2, metadata=COUNT)

    def __post_init__(self) -> None:
        check_bounds(self, "checkpoint.")


@dataclass(frozen=True)
class HardwareConfig:
    """Device, precision and memory.

    Args:
        device: ``auto`` (CUDA if it is available), ``cpu``, ``cuda`` or ``cuda:1``.
        precision: precision of activations: ``auto`` (bfloat16 if the hardware supports it; float32 where a CPU reads
            a stored run), ``float32``, ``bfloat16`` or ``float64`` (of parameters, too).
        compile: whether layers, exits and the policy's draws are compiled, with the same results except for rounding:
            ``auto`` (on CUDA), ``on`` or ``off``.
        activation_checkpointing: whether the backward pass computes the layers' activations again instead of saving
            them, which costs a third more arithmetic and saves most of the memory: ``auto`` (if activations would take
            more than half of the memory which is free at the start), ``on`` or ``off``.
        sequence_packing: whether the token-level layers process the tokens of all sequences as one sequence, instead of
            padding to the longest, with the same results: ``auto`` (if layers are compiled, which keeps their shapes
            constant), ``on`` or ``off``.
        small_flex_blocks: whether a GPU's byte-level attention uses blocks of 64 instead of 128 if ``model.window`` is
            at most 64, which halves the arithmetic; kernels are tuned for minutes at the first step.
        threads: number of CPU threads, at most 1024 or four times the cores; 0 for torch's default.
        fsdp_size: number of processes which share one copy of the model, if torchrun starts several; 1 for a complete
            copy in each (docs/scale.md).
    """

    device: str = field(default="auto", metadata=DEVICE)
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    activation_checkpointing: Literal["auto", "on", "off"] = "auto"
    sequence_packing: Literal["auto", "on", "off"] = "auto"
    small_flex_blocks: bool = False
    threads: int = field(default=0, metadata=THREADS)
    fsdp_size: int = field(default=1, metadata=COUNT)

    def __post_init__(self) -> None:
        check_bounds(self, "hardware.")


@dataclass(frozen=True)
class Config:
    """Configuration of a training run.

    Args:
        seed: seed of parameters, data order and actions.
        rate: target boundaries per symbol, in (0, 1); or a range, ``{min: 0.05, max: 0.5}``, from which every sequence
            draws its own rate, on which the agent is conditioned (docs/rates.md).
        data: corpus, and how it becomes sequences.
        model: configuration of the U-Net.
        codec: ``name`` of the codec between data and U-Net, and its options: ``bytes`` or ``series``.
        agent: ``name`` of an agent and its options.
        estimator: ``name`` of an estimator and its options.
        rate_target: ``name`` of a rate target and its options.
        init_from: earlier run (its best checkpoint) or checkpoint from which the language model is loaded, with its
            ``model`` and ``codec`` sections; null draws new parameters.
        freeze_lm: whether the language model is not trained, so that only agent and estimator learn.
        imitation: what the policy imitates before it learns from rewards; nothing by default.
        loss: weights of the losses.
        train: length and optimizer.
        callbacks: names of callbacks, which act before and after training, such as ``[shrink]``; or ``name`` and
            options of each, such as ``[{name: mine, file: w.txt}]``.
        validation: schedule and size of the validation.
        checkpoint: schedule and number of checkpoints.
        hardware: device and precision.
    """

    seed: int = field(default=0, metadata=SEED)
    rate: float | RateRange = field(default=0.2, metadata=RATE)
    data: DataConfig = field(default_factory=DataConfig)
    model: UNetConfig = field(default_factory=UNetConfig)
    codec: Section = field(default_factory=lambda: {"name": "bytes"}, metadata=NAMED)
    agent: Section = field(default_factory=lambda: {"name": "learned"}, metadata=NAMED)
    estimator: Section = field(default_factory=lambda: {"name": "reinforce"}, metadata=NAMED)
    rate_target: Section = field(default_factory=lambda: {"name": "logit_pressure"}, metadata=NAMED)
    init_from: str | None = None
    freeze_lm: bool = False
    imitation: ImitationConfig = field(default_factory=ImitationConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    callbacks: list[Named] = field(default_factory=list)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.freeze_lm and self.init_from is None:
            raise UserError(
                "freeze_lm = True: expected init_from=RUN beside it, since this model is not trained"
            )
        if self.loss.imitation and not self.imitation.teacher:
            raise UserError(
                f"loss.imitation = {self.loss.imitation:g} without imitation.teacher: expected "
                "imitation.teacher.name=AGENT beside it, such as whitespace, or loss.imitation=0"
            )
        vocabulary = self.validation.bpe_vocabulary
        if vocabulary and not self.data.options.references:
            raise UserError(
                f"validation.bpe_vocabulary = {vocabulary}: expected 0, for {self.data.kind} has no BPE tokens"
            )
        codec = self.codec["name"]
        own_codec = self.data.options.codec
        for kind, other in all_kinds().items():
            if codec == other.codec != own_codec:
                raise UserError(
                    f"codec.name = {codec!r}: expected a codec for data.kind={self.data.kind}, such as "
                    f"{own_codec}, or data.kind={kind} beside it"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return nested dictionaries, as in a YAML file."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the part which is the same in all configurations of the same run.

        Of ``hardware`` it has the precision alone, on which results depend visibly.
        """
        every = self.as_dict().items()
        values = {key: value for key, value in every if key not in NOT_IN_IDENTITY}
        return values | {"hardware": {"precision": self.hardware.precision}}

    def method_settings(self) -> dict[str, Any]:
        """Return the identity without the seed: runs of one method have them in common."""
        return {key: value for key, value in self.identity().items() if key != "seed"}
