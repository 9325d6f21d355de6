"""Devices, precisions and threads, and checks that work fits in memory before it starts."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from dataclasses import dataclass, replace

import psutil
import torch
from threadpoolctl import threadpool_limits

from tokenv.config.schema import Config, HardwareConfig, TrainConfig
from tokenv.core.devices import has_own_memory, is_accelerator
from tokenv.core.errors import UserError
from tokenv.core.rates import highest_rate
from tokenv.lm.config import UNetConfig
from tokenv.lm.elapsed import CLASSES

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MAX_LOAD = 1.25  # threads and processes per core; more causes a warning


def resolve_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` is CUDA where it is available.

    Raises:
        UserError: the device does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"hardware.device = {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices: "
            "choose auto or cpu, or install a CUDA build of torch"
        )
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Return a precision by name; ``auto`` is bfloat16 where the hardware multiplies it fast, else float32.

    Raises:
        UserError: no precision has this name.
    """
    if name in PRECISIONS:
        return PRECISIONS[name]
    if name != "auto":
        names = ", ".join(["auto", *PRECISIONS])
        raise UserError(f"hardware.precision = {name!r}: expected one of {names}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def for_inference(config: HardwareConfig) -> HardwareConfig:
    """Return the hardware with which a stored run is read: on a CPU, ``auto`` is float32 there.

    In bfloat16 the result of a row depends visibly on the other rows of its batch.
    """
    on_cpu = not is_accelerator(resolve_device(config.device))
    return replace(config, precision="float32") if on_cpu and config.precision == "auto" else config


def prepare(config: HardwareConfig) -> None:
    """Set the number of threads, and let this process keep its memory instead of returning it after every step.

    glibc maps and unmaps large blocks at every allocation, and the first access to fresh pages then costs more than the
    arithmetic on them. Without glibc nothing is changed.
    """
    if config.threads:
        set_threads(config.threads)
    torch.set_float32_matmul_precision("high")
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            trim_threshold, mmap_max = -1, -4  # constants of malloc.h
            mallopt(mmap_max, 0)
            mallopt(trim_threshold, 2**31 - 1)


def set_threads(count: int) -> None:
    """Set the number of threads of torch, and of scipy's BLAS, by which a decoder computes step by step."""
    import scipy.linalg  # noqa: F401, loads that BLAS, which could not be limited before

    torch.set_num_threads(count)
    threadpool_limits(count, user_api="blas")


def cores() -> int:
    """Return the number of cores which this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_warning(config: HardwareConfig) -> str:
    """Return a warning where torch's default number of threads is too large for a busy machine; else an empty text.

    Threads wait for one another several times per operation, so that a thread without a core delays all. The number is
    not lowered here, since resuming a run bit for bit needs the same number.
    """
    threads = torch.get_num_threads()
    load = psutil.getloadavg()[0]
    busy = threads > 1 and threads + load > MAX_LOAD * cores()
    if is_accelerator(resolve_device(config.device)) or config.threads or not busy:
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores()} cores), and this run's {threads} threads, which wait for "
        "one another, may be several times as slow as one: hardware.threads=1 avoids that"
    )


def peak_resident_memory() -> float:
    """Return the largest resident memory of this process so far, in GiB."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


STATES = 4  # tensors per parameter: itself, its gradient and AdamW's two moments
ACTIVATIONS = 12  # [B, N, D], saved by a layer beside those of its MLP
MIN_ACTIVATIONS = 6  # [B, N, D], saved by a layer at the very least
SYMBOLS = 256  # logits of a byte; a density over values has fewer parameters
MIN_DOCUMENT = 64  # bytes of a synthetic document, at the very least


def model_parameters(model: UNetConfig) -> int:
    """Return the number of parameters in the matrices of layers, embeddings and heads."""
    byte = (model.down_layers + model.up_layers) * (4 + 3 * model.byte_mlp)
    token = model.mid_layers * (4 + 3 * model.token_mlp)
    rows = 2 * SYMBOLS + model.elapsed * CLASSES
    return model.width**2 * (byte + token) + model.width * rows


def training_bytes(
    config: Config, *, parameters: int = 0, samples: int = 1, rows: int | None = None
) -> dict[str, int]:
    """Return a lower bound of the memory for training in bytes, by the configuration keys which determine it.

    Args:
        config: configuration of the run.
        parameters: number of parameters of agent and estimator.
        samples: number of samples of each sequence's boundaries.
        rows: number of sequences of a pass on this device; None for all.
    """
    model = config.model
    data = config.data
    rows = rows or config.train.batch_size
    number = 8 if config.hardware.precision == "float64" else 4
    activation = rows * data.seq_len * (number if number == 8 else 2)
    saved = MIN_ACTIVATIONS * (model.down_layers + model.up_layers) * model.width + SYMBOLS
    corpus = 0
    if data.source == "words":
        corpus = (data.words_documents + data.lexicon_size) * MIN_DOCUMENT
    if data.source in data.options.sources:
        corpus = data.options.min_bytes
    return {
        "model": (model_parameters(model) + parameters)
        * number
        * STATES
        // config.hardware.fsdp_size,
        "train.batch_size, data.seq_len": activation * (saved + (samples - 1) * model.width),
        "data": corpus,
    }


def activation_bytes(config: Config, *, samples: int = 1, rows: int | None = None) -> int:
    """Return the memory of a batch's activations in bytes, without activation checkpointing.

    Args:
        config: configuration of the run.
        samples: number of samples of each sequence's boundaries.
        rows: see ``training_bytes``.
    """
    rows = rows or config.train.batch_size
    model = config.model
    number = 8 if config.hardware.precision == "float64" else 4
    byte_layers = (model.down_layers + samples * model.up_layers) * (
        ACTIVATIONS + 3 * model.byte_mlp
    )
    token_layers = (
        samples * highest_rate(config.rate) * model.mid_layers * (ACTIVATIONS + 3 * model.token_mlp)
    )
    return int(rows * config.data.seq_len * model.width * number * (byte_layers + token_layers))


def uses_activation_checkpointing(
    config: Config, *, samples: int = 1, rows: int | None = None
) -> bool:
    """Return whether layers are computed again in the backward pass, by the configuration or by the free memory."""
    mode = config.hardware.activation_checkpointing
    needed = 2 * activation_bytes(config, samples=samples, rows=rows)
    return mode == "on" or (mode == "auto" and needed > _memory(config.hardware.device)[0])


def check_training(
    config: Config, *, parameters: int = 0, samples: int = 1, rows: int | None = None
) -> None:
    """Check that a run can fit in memory; see ``training_bytes``.

    Raises:
        UserError: it cannot; the message names the keys which take most.
    """
    needed = training_bytes(config, parameters=parameters, samples=samples, rows=rows)
    most = max(needed, key=needed.__getitem__)
    _check(
        "this run",
        sum(needed.values()),
        config.hardware.device,
        f"most of it by {most}: lower these",
    )


def check_generation(config: Config, rows: int, symbols: int) -> None:
    """Check that attention's cache for generated symbols can fit in memory.

    Args:
        config: configuration of the run.
        rows: number of sequences which are generated in one batch.
        symbols: number of symbols of a sequence, including the prompt.

    Raises:
        UserError: it cannot fit.
    """
    _check(
        f"writing {symbols:,} symbols",
        rows * symbols * _cache_bytes(config),
        config.hardware.device,
        "ask for fewer",
    )


def _cache_bytes(config: Config) -> int:
    """Return the bytes of attention's cache per symbol, with at most one token each, in float32."""
    return config.model.mid_layers * 2 * config.model.width * 4 + 8


def check_forecast(config: Config, samples: int, horizon: int) -> None:
    """Check that forecasts can fit in memory.

    Args:
        config: configuration of the run.
        samples: number of continuations of a forecast, which are generated in one batch.
        horizon: number of steps of each.

    Raises:
        UserError: it cannot fit.
    """
    written = samples * config.data.seq_len * _cache_bytes(config)
    stored = samples * horizon * config.data.options.channels * 8
    _check(
        f"{samples:,} samples of a forecast",
        written + stored,
        config.hardware.device,
        "lower samples",
    )


def check_draws(config: Config, draws: int, samples: int) -> None:
    """Check that gradients can be drawn and stored in memory.

    Args:
        config: configuration of the model, with the batch size and sequence length of the gradients.
        draws: number of gradients in memory.
        samples: largest number of samples of boundaries for one gradient.

    Raises:
        UserError: it cannot fit.
    """
    one = sum(training_bytes(config, samples=samples).values())
    stored = draws * config.train.batch_size * config.data.seq_len * 4
    advice = "lower draws, reference_draws, batch_size, seq_len or the estimators' num_samples"
    _check("this comparison", one + stored, config.hardware.device, advice)


def _check(work: str, needed: int, device: str, advice: str) -> None:
    total = _memory(device)[1]
    if needed > total:
        raise UserError(
            f"{work} would need at least {needed / 2**30:,.1f} GiB of memory, and {resolve_device(device)} has "
            f"{total / 2**30:,.1f} GiB: {advice}"
        )


def _memory(name: str) -> tuple[int, int]:
    """Return the free and the total memory of the machine or the GPU in bytes."""
    device = resolve_device(name)
    if has_own_memory(device):
        return torch.get_device_module(device).mem_get_info(device)
    machine = psutil.virtual_memory()
    return machine.available, machine.total


@dataclass(frozen=True)
class BatchAssignment:
    """The sequences of one of W ranks among the A passes of B sequences which make an update.

    The ranks form gcd(A, W) groups of successive ranks. Each group computes successive passes, and the members of a
    group share the rows of each pass, in the order of their ranks. A pass is shared only if there are more ranks than
    groups.

    Attributes:
        accumulate: number of passes A.
        batch_size: number of sequences B of each pass.
        rank: rank of this process.
        world: number of ranks W.
        split_each_pass: whether all ranks share every pass, because each pass reads state of the one before.

    Raises:
        UserError: the ranks do not divide the sequences.
    """

    accumulate: int
    batch_size: int
    rank: int = 0
    world: int = 1
    split_each_pass: bool = False

    def __post_init__(self) -> None:
        sequences = self.accumulate * self.batch_size
        if sequences % self.world:
            raise UserError(
                f"{self.world} processes cannot share the {sequences} sequences of an update evenly "
                f"(train.gradient_accumulation_steps = {self.accumulate}, train.batch_size = {self.batch_size}): "
                f"expected a number that divides {sequences}, such as {_divisor(sequences, self.world)}: change "
                "torchrun's --nproc-per-node, or train.batch_size"
            )
        if self.split_each_pass and self.batch_size % self.world:
            raise UserError(
                f"{self.world} processes with train.batch_size = {self.batch_size}: this agent or estimator keeps "
                "state from one pass to the next, so that all processes share every pass: expected a number "
                f"that divides train.batch_size, such as {_divisor(self.batch_size, self.world)}"
            )

    @classmethod
    def of(
        cls, config: TrainConfig, rank: int = 0, world: int = 1, *, split_each_pass: bool = False
    ) -> BatchAssignment:
        """Return the assignment of a run."""
        return cls(
            config.gradient_accumulation_steps, config.batch_size, rank, world, split_each_pass
        )

    def streams(self, most: int) -> int:
        """Return the largest number of streams, up to ``most``, which divides the update's sequences."""
        passes = 1 if self.split_each_pass else self.accumulate
        return _divisor(passes * self.batch_size, most)

    @property
    def groups(self) -> int:
        """Number of groups of ranks which share their passes."""
        return 1 if self.split_each_pass else math.gcd(self.accumulate, self.world)

    @property
    def members(self) -> int:
        """Number of ranks of a group."""
        return self.world // self.groups

    @property
    def passes(self) -> range:
        """This rank's passes of the update."""
        count = self.accumulate // self.groups
        first = self.rank // self.members * count
        return range(first, first + count)

    @property
    def rows(self) -> range:
        """This rank's rows of these passes."""
        count = self.batch_size // self.members
        first = self.rank % self.members * count
        return range(first, first + count)


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` up to ``most``."""
    return next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)
