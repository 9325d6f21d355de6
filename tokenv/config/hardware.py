"""Resolve devices and precisions, and refuse what cannot fit in memory before work starts."""

from __future__ import annotations

import ctypes
import os
import sys

import psutil
import torch

from tokenv.config.schema import Config, HardwareConfig
from tokenv.core.errors import UserError
from tokenv.core.rates import highest_rate
from tokenv.data.series.config import SYNTHETIC_SERIES
from tokenv.lm.config import UNetConfig

ROOM = 1.25  # threads and processes a core from which on training is warned of


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one.

    Raises:
        UserError: a device is asked for that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"hardware.device = {name!r}, but torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices: "
            "choose auto or cpu, or install a CUDA build of torch"
        )
    return device


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 where the hardware multiplies it fast, else float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def prepare(config: HardwareConfig) -> None:
    """Process-wide settings: threads, and memory that is kept instead of returned after every step.

    glibc maps and unmaps large blocks at every allocation, and touching fresh pages then costs more than the
    arithmetic on them. Elsewhere than on glibc nothing is changed.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.set_float32_matmul_precision("high")
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            trim_threshold, mmap_max = -1, -4  # names of malloc.h
            mallopt(mmap_max, 0)
            mallopt(trim_threshold, 2**31 - 1)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def busy_warning(config: HardwareConfig) -> str:
    """Say that fewer threads are faster, where torch's own number of them meets a busy machine; else empty.

    Threads wait for one another several times an operation, so that one that gets no core delays all. The number is
    not lowered here: a run that is resumed bit for bit needs the same one.
    """
    threads = torch.get_num_threads()
    load = psutil.getloadavg()[0]
    on_cpu = resolve_device(config.device).type == "cpu"
    if not on_cpu or config.threads or threads < 2 or threads + load <= ROOM * cores():
        return ""
    return (
        f"this machine is busy (load {load:.1f} on {cores()} cores), and this run's {threads} threads, which wait for "
        "one another, may be several times as slow as one: hardware.threads=1 avoids that"
    )


def peak_resident_memory() -> float:
    """Largest resident memory of this process so far, in GiB."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


STATES = 4  # every parameter comes with a gradient and AdamW's two moments
KEPT_BESIDE_MLP = 12  # activations [B, N, D] that a layer does keep, beside those of its MLP
KEPT = 6  # activations [B, N, D] that a layer keeps for its backward pass, at the very least
SYMBOLS = 256  # a byte's logits; a density over values has fewer, and matters less
TEXT = 64  # bytes of a synthetic document, at the very least


def model_parameters(model: UNetConfig) -> int:
    """Entries of the layers' matrices and of the direct head: what is large in a large model."""
    byte = (model.down_layers + model.up_layers) * (4 + 3 * model.byte_mlp)
    token = model.mid_layers * (4 + 3 * model.token_mlp)
    return model.width**2 * (byte + token) + model.width * (2 + model.horizon) * SYMBOLS


def training_bytes(config: Config, *, parameters: int = 0, samples: int = 1, rows: int | None = None) -> dict[str, int]:
    """The least that training needs, in bytes: what takes it, by the keys that one would lower.

    Args:
        config: the run.
        parameters: of agent and estimator.
        samples: of the boundaries of each sequence.
        rows: sequences of a pass, where several processes share it; None for all.
    """
    model, data, rows = config.model, config.data, rows or config.train.batch_size
    number = 8 if config.hardware.precision == "float64" else 4
    activation = rows * data.seq_len * (number if number == 8 else 2)
    kept = KEPT * (model.down_layers + model.up_layers) * model.width + SYMBOLS
    corpus = 0
    if data.source == "words":
        corpus = (data.words_documents + data.lexicon_size) * TEXT
    if data.source in SYNTHETIC_SERIES:
        corpus = data.series.count * data.series.length * 9
    return {
        "model": (model_parameters(model) + parameters) * number * STATES // config.hardware.fsdp_size,
        "train.batch_size, data.seq_len": activation * (kept + (samples - 1) * model.width),
        "data": corpus,
    }


def kept_bytes(config: Config, *, samples: int = 1, rows: int | None = None) -> int:
    """What all layers keep of a batch for the backward pass, in bytes, where nothing is computed again.

    Args:
        config: the run.
        samples: of the boundaries of each sequence.
        rows: see ``training_bytes``.
    """
    rows = rows or config.train.batch_size
    model, number = config.model, 8 if config.hardware.precision == "float64" else 4
    byte_layers = (model.down_layers + samples * model.up_layers) * (KEPT_BESIDE_MLP + 3 * model.byte_mlp)
    token_layers = samples * highest_rate(config.rate) * model.mid_layers * (KEPT_BESIDE_MLP + 3 * model.token_mlp)
    return int(rows * config.data.seq_len * model.width * number * (byte_layers + token_layers))


def recomputes(config: Config, *, samples: int = 1, rows: int | None = None) -> bool:
    """Return whether layers are computed again in the backward pass, by the configuration or by the free memory."""
    asked = config.hardware.activation_checkpointing
    return asked == "on" or (
        asked == "auto" and 2 * kept_bytes(config, samples=samples, rows=rows) > _memory(config.hardware.device)
    )


def check_training(config: Config, *, parameters: int = 0, samples: int = 1, rows: int | None = None) -> None:
    """Refuse a run that cannot fit in memory; see ``training_bytes``.

    Raises:
        UserError: it cannot; the message names what takes most.
    """
    needed = training_bytes(config, parameters=parameters, samples=samples, rows=rows)
    most = max(needed, key=needed.__getitem__)
    _check("this run", sum(needed.values()), config.hardware.device, f"most of it by {most}: lower these")


def check_generation(config: Config, rows: int, symbols: int) -> None:
    """Refuse to write so many symbols that what attention remembers of them cannot fit in memory.

    Args:
        config: of the run that writes.
        rows: written together.
        symbols: of a row, the prompt's included.

    Raises:
        UserError: it cannot fit.
    """
    _check(
        f"writing {symbols:,} symbols", rows * symbols * _cache_bytes(config), config.hardware.device, "ask for fewer"
    )


def _cache_bytes(config: Config) -> int:
    """Bytes that attention remembers of a symbol, at most one token each."""
    return config.model.mid_layers * 2 * config.model.width * 2 + 8


def check_forecast(config: Config, samples: int, horizon: int) -> None:
    """Refuse forecasts that cannot fit in memory.

    Args:
        config: of the run that forecasts.
        samples: continuations of a forecast, which are written together, one value after the other.
        horizon: steps of each.

    Raises:
        UserError: it cannot fit.
    """
    written = samples * config.data.seq_len * _cache_bytes(config)
    kept = samples * horizon * config.data.series.channels * 8
    _check(f"{samples:,} samples of a forecast", written + kept, config.hardware.device, "lower samples")


def check_draws(config: Config, draws: int, samples: int) -> None:
    """Refuse to draw so many gradients that they, or one of them, cannot fit in memory.

    Args:
        config: of the model, with the batch size and length that gradients are drawn at.
        draws: gradients kept together.
        samples: the most samples of boundaries that one is made of.

    Raises:
        UserError: it cannot fit.
    """
    one = sum(training_bytes(config, samples=samples).values())
    kept = draws * config.train.batch_size * config.data.seq_len * 4
    advice = "lower draws, reference_draws, batch_size, seq_len or the estimators' num_samples"
    _check("this comparison", one + kept, config.hardware.device, advice)


def _check(what: str, needed: int, device: str, advice: str) -> None:
    there, has = resolve_device(device), _memory(device)
    if needed > has:
        raise UserError(
            f"{what} would need at least {needed / 2**30:,.1f} GiB of memory, and {there} has {has / 2**30:,.1f} GiB: "
            f"{advice}"
        )


def _memory(device: str) -> int:
    """Of the machine or the GPU, in bytes."""
    there = resolve_device(device)
    if there.type == "cuda":
        return int(torch.cuda.get_device_properties(there).total_memory)
    return int(psutil.virtual_memory().total)
