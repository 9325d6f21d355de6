"""What a training run tells in the terminal while it runs: one line at its start, and signs of life without bars."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tokenv.config.components import Components
from tokenv.config.hardware import resolve_device, resolve_precision
from tokenv.config.schema import Config
from tokenv.plotting.terminology import TERMINOLOGY

FIRST_SECONDS, EVERY_SECONDS = 10.0, 60.0


def start_line(config: Config, parts: Components, folder: Path | None, resume: str | None = None) -> str:
    """What runs: where it is kept, on what it trains, how large it is, who learns how, and on what machine.

    Args:
        config: the run.
        parts: its model and agent, on any device.
        folder: where it is kept; None for nowhere.
        resume: the checkpoint that it goes on from.
    """
    lm, agent = (sum(p.numel() for p in module.parameters()) for module in (parts.lm, parts.agent))
    device = resolve_device(config.hardware.device)
    precision = str(resolve_precision(config.hardware.precision, device)).removeprefix("torch.")
    learner = f"estimator {config.estimator['name']}" if parts.agent.learns else "which does not learn"
    data, symbols = config.data, TERMINOLOGY[config.data.kind].symbol
    told = [
        f"{'not stored' if folder is None else folder}{f' (from {resume})' if resume else ''}",
        f"{config.train.symbols:,} {symbols}s of {data.source}, {data.seq_len} a sequence",
        f"{lm:,} parameters, {agent:,} of the agent",
        f"agent {config.agent['name']}, {learner}, rate {config.rate:g}",
        f"{device}, {precision}, seed {config.seed}",
    ]
    return " · ".join(told)


class Heartbeat:
    """A line on stderr now and then, for logs: how far a run is, how it does, and when it will be done.

    Called as a log of metrics is.

    Args:
        config: the run.
        unit: of its losses, such as ``bits_per_byte``.
        seen: symbols it was trained on before, if it goes on.
    """

    def __init__(self, config: Config, unit: str, seen: int = 0) -> None:
        self._total, self._unit, self._seen = config.train.symbols, unit, seen
        self._symbol = TERMINOLOGY[config.data.kind].symbol
        self._started = time.monotonic()
        self._next = self._started + FIRST_SECONDS
        self._last: dict[str, float] = {}

    def __call__(self, name: str, value: float, symbols: int) -> None:
        """Take one value of a metric; at the time, and with the last metric of a step, a line is written."""
        self._last[name] = value
        now = time.monotonic()
        if now < self._next or name != "train/symbols_per_second":
            return
        self._next = now + EVERY_SECONDS
        speed = (symbols - self._seen) / (now - self._started)
        left = _duration((self._total - symbols) / speed) if speed > 0 else "unknown"
        losses = [
            f"{part} {self._last[key]:.3f} {self._unit.replace('_per_', '/')}"
            for part in ("train", "validation")
            if (key := f"{part}/{self._unit}") in self._last
        ]
        said = [
            f"{symbols:,} of {self._total:,} {self._symbol}s ({symbols / self._total:.0%})",
            *losses,
            f"rate {self._last.get('train/boundary_rate', float('nan')):.3f}",
            f"{speed:,.0f} {self._symbol}s/s",
            f"{left} left",
        ]
        print("training: " + ", ".join(said), file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{round(seconds)} s" if minutes < 2 else f"{minutes} min" if minutes < 120 else f"{minutes / 60:.1f} h"
