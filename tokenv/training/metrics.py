"""Metrics of updates: read without waiting for the device, checked to be finite, and logged."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tokenv.config.components import Components
from tokenv.core.devices import is_accelerator
from tokenv.core.errors import RunFailedError
from tokenv.core.processes import ProgressFile
from tokenv.evaluation.run_state import Log, RunState
from tokenv.lm.flops import Batch, Tokens, policy_flops, update_flops
from tokenv.training.checkpointing import latest_checkpoint

LINE_SECONDS = 30.0  # between two lines of progress where stderr is no terminal
LINE = "{desc}: {n_fmt} of {total_fmt} ({percentage:.0f}%), {rate_fmt}, {remaining} left{postfix}\n"


class NotFiniteError(RunFailedError):
    """The loss or a gradient is infinite or NaN."""


class MetricsBuffer:
    """Hold an update's metrics; reading them waits for a GPU, and is immediate on a CPU.

    Args:
        values: metrics by name, one number each, on one device.
        watched: names of the metrics which must be finite.
    """

    def __init__(self, values: Mapping[str, Tensor], watched: Sequence[str]) -> None:
        self._names = list(values)
        self.watched = watched
        self._device_values = torch.stack([value.double() for value in values.values()])
        self._host_values = self._device_values.to("cpu", non_blocking=True)  # into pinned memory
        self._event = None
        if is_accelerator(self._device_values.device):
            self._event = torch.get_device_module(self._device_values.device).Event()
            self._event.record()

    @property
    def found_inf(self) -> Tensor:
        """On the device of the values: 1.0 if a watched metric is infinite or NaN, else 0.0."""
        chosen = [self._names.index(name) for name in self.watched]
        return (
            1
            - torch.stack([self._device_values[number] for number in chosen])
            .sum()
            .isfinite()
            .float()
        )

    def read(self) -> dict[str, float]:
        """Return all metrics by name."""
        if self._event is not None:
            self._event.synchronize()
        return dict(zip(self._names, self._host_values.tolist(), strict=True))


@dataclass
class PendingUpdate:
    """An update whose metrics have not been logged yet.

    Attributes:
        step: number of updates before it.
        symbols: training symbols after it.
        learning_rate: learning rate of its step.
        values: its metrics.
        flops: counter of its FLOPs.
        origin: sources of its last sequences.
        seconds: its duration.
        further: metrics of its further steps; see ``tokenv.training.update.policy_epochs``.
    """

    step: int
    symbols: int
    learning_rate: float
    values: MetricsBuffer
    flops: UpdateFlops
    origin: list[str]
    seconds: float = math.nan
    further: MetricsBuffer | None = None

    def check(self, folder: Path) -> dict[str, float]:
        """Return the metrics.

        Args:
            folder: folder of the run's checkpoints, which the error names.

        Raises:
            NotFiniteError: the loss or a gradient is infinite or NaN.
        """
        metrics = self.values.read()
        if not math.isfinite(sum(metrics[name] for name in self.values.watched)):
            wrong = ", ".join(
                f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value)
            )
            raise NotFiniteError(
                f"step {self.step}: {wrong}; {latest_checkpoint(folder)}. The last sequences were "
                f"{', '.join(self.origin[:4])}, ... Try a lower train.learning_rate, a longer train.warmup_symbols or "
                "hardware.precision=float32"
            )
        return metrics


class UpdateFlops:
    """Count the FLOPs of updates.

    Args:
        components: language model, agent and estimator of the run.
        batch: sequences of an update.
        optimizer: FLOPs of an update's optimizer steps; see ``tokenv.training.optimizers.optimizer_flops``.
    """

    def __init__(self, components: Components, batch: Batch, optimizer: int) -> None:
        self._lm = components.lm
        self._batch = batch
        self._policy = policy_flops(components.agent)
        self._passes = components.passes
        self._optimizer = optimizer

    def take(self, metrics: dict[str, Any]) -> dict[str, int]:
        """Return the FLOPs of an update by the names of ``RunState``, and remove the token counts from its metrics.

        Args:
            metrics: metrics of the update, with those of ``tokenv.training.losses.count_tokens``.
        """
        tokens = _take_tokens(metrics, "")
        padded = _take_tokens(metrics, "_padded")
        count = partial(
            update_flops, self._lm, self._batch, policy_flops=self._policy, passes=self._passes
        )
        update = {
            "flops": count(tokens),
            "flops_linear": count(tokens, attention=False),
            "flops_executed": count(padded, recompute=self._lm.recomputes),
        }
        return {name: flops + self._optimizer for name, flops in update.items()}


def _take_tokens(metrics: dict[str, Any], padded: str) -> Tokens:
    names = [
        f"{what}{suffix}{padded}"
        for what in ("tokens", "token_pairs")
        for suffix in ("", "_forward")
    ]
    return Tokens(*(round(metrics.pop(name)) for name in names))


class MetricsLogger:
    """Log the metrics of updates, and show the progress of the run; a context manager, which closes the bar.

    Args:
        state: state of the run; its history and its FLOPs grow with every update.
        log: function called with a metric's name, its value and the training symbols so far.
        folder: folder of the run's checkpoints.
        total: training symbols of the whole run.
        symbols_per_update: training symbols of one update.
        symbol: name of a symbol.
        progress: whether to show a bar; where stderr is no terminal, a line every half minute.
        writes: whether this process writes the progress file.
    """

    def __init__(
        self,
        state: RunState,
        log: Log,
        *,
        folder: Path,
        total: int,
        symbols_per_update: int,
        symbol: str,
        progress: bool,
        writes: bool,
    ) -> None:
        self._state = state
        self._log = log
        self._folder = folder
        self._total = total
        self._symbols_per_update = symbols_per_update
        self._pending: list[PendingUpdate] = []
        look: dict[str, Any] = {}
        if not sys.stderr.isatty():
            # with a delay there is no line before the first update
            look = {"bar_format": LINE, "mininterval": LINE_SECONDS, "miniters": 1, "delay": 0.01}
        self._bar = tqdm(
            total=total,
            initial=state.symbols,
            unit=f" {symbol}s",
            unit_scale=True,
            desc="training",
            disable=not progress,
            **look,
        )
        self._file = ProgressFile(folder, total) if writes else None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, update: PendingUpdate) -> None:
        """Queue an update whose metrics the next ``flush`` logs."""
        self._pending.append(update)

    def flush(self) -> None:
        """Log all pending updates.

        Raises:
            NotFiniteError: the loss or a gradient of one of them is infinite or NaN.
        """
        while self._pending:
            self._log_update(self._pending.pop(0))

    def _log_update(self, update: PendingUpdate) -> None:
        state = self._state
        unit = self._state.unit
        metrics = update.check(self._folder)
        if update.further is not None:
            metrics |= update.further.read()
        flops = update.flops.take(metrics)
        state.add_flops(flops)
        metrics |= {name: getattr(state, name) for name in flops}
        metrics |= {
            "learning_rate": update.learning_rate,
            "symbols_per_second": self._symbols_per_update / update.seconds,
        }
        state.record("train", metrics, self._log, update.symbols)
        if self._file is not None:
            self._file.update(update.symbols)
        shown = (
            f"{metrics[unit]:.3f} {unit.replace('_per_', '/')}, rate {metrics['boundary_rate']:.3f}"
        )
        if state.validation is not None:
            shown += f", validation {state.validation.loss:.3f}"
        self._bar.set_postfix_str(shown, refresh=False)
        # the last update goes beyond the total
        self._bar.update(min(update.symbols, self._total) - self._bar.n)
