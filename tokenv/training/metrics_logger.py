"""Log the metrics of updates, and refuse those which are not finite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tokenv.core.errors import RunFailedError
from tokenv.evaluation.run_state import Log, RunState
from tokenv.training.checkpointing import latest_checkpoint
from tokenv.training.metrics import MetricsBuffer, ProgressFile
from tokenv.training.update_flops import UpdateFlops


class NotFiniteError(RunFailedError):
    """The loss or a gradient is infinite or NaN."""


@dataclass
class PendingUpdate:
    """An update whose metrics have not been logged yet.

    Attributes:
        step: number of updates before it.
        symbols: training symbols after it.
        learning_rate: of its step.
        values: its metrics.
        origin: where its last sequences come from.
        seconds: its duration.
    """

    step: int
    symbols: int
    learning_rate: float
    values: MetricsBuffer
    origin: list[str]
    seconds: float = math.nan

    def check(self, folder: Path) -> dict[str, float]:
        """Return the metrics.

        Args:
            folder: of the run's checkpoints, which the error names.

        Raises:
            NotFiniteError: the loss or a gradient is infinite or NaN.
        """
        metrics = self.values.read()
        if not self.values.is_finite():
            wrong = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
            raise NotFiniteError(
                f"step {self.step}: {wrong}; {latest_checkpoint(folder)}. The last sequences were "
                f"{', '.join(self.origin[:4])}, ... Try a lower train.learning_rate, a longer train.warmup_symbols or "
                "hardware.precision=float32"
            )
        return metrics


class MetricsLogger:
    """Log the metrics of updates, and show the progress of the run; a context manager, which closes the bar.

    Args:
        state: of the run; its history and its FLOPs grow with every update.
        log: called with a metric's name, its value and the training symbols so far.
        flops: counts an update's FLOPs.
        folder: of the run's checkpoints.
        total: training symbols of the whole run.
        symbols_per_update: training symbols of one update.
        progress: whether to show a bar.
        writes: whether this process writes the progress file.
    """

    def __init__(
        self,
        state: RunState,
        log: Log,
        flops: UpdateFlops,
        *,
        folder: Path,
        total: int,
        symbols_per_update: int,
        progress: bool,
        writes: bool,
    ) -> None:
        self._state, self._log, self._flops, self._folder = state, log, flops, folder
        self._symbols_per_update = symbols_per_update
        self._pending: list[PendingUpdate] = []
        self._bar = tqdm(
            total=total, initial=state.symbols, unit="B", unit_scale=True, desc="training", disable=not progress
        )
        self._file = ProgressFile(folder, total) if writes else None

    def __enter__(self) -> MetricsLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, update: PendingUpdate) -> None:
        """Take an update whose metrics are to be logged by the next ``flush``."""
        self._pending.append(update)

    def flush(self) -> None:
        """Log all pending updates.

        Raises:
            NotFiniteError: the loss or a gradient of one of them is infinite or NaN.
        """
        while self._pending:
            self._log_update(self._pending.pop(0))

    def _log_update(self, update: PendingUpdate) -> None:
        state, unit = self._state, self._state.unit
        metrics = update.check(self._folder)
        needed, executed = self._flops.take(metrics, self._symbols_per_update)
        state.flops, state.flops_executed = state.flops + needed, state.flops_executed + executed
        metrics |= {
            "learning_rate": update.learning_rate,
            "flops": state.flops,
            "flops_executed": state.flops_executed,
            "symbols_per_second": self._symbols_per_update / update.seconds,
        }
        state.record("train", metrics, self._log, update.symbols)
        self._bar.update(self._symbols_per_update)
        if self._file is not None:
            self._file.update(update.symbols)
        self._bar.set_postfix_str(
            f"{metrics[unit]:.3f} {unit.replace('_per_', '/')}, rate {metrics['boundary_rate']:.3f}, "
            f"entropy {metrics['entropy']:.3f}"
        )
