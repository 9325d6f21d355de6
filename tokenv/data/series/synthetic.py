"""Synthetic series whose change points are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def synthetic_series(kind: str, count: int, length: int, dwell: int, seed: int) -> tuple[Array, Array]:
    """Generate series that consist of sections.

    `regimes`: every section is an autoregression with a level, a persistence and a noise of its own. `bursts`: calm
    sections, and ones a seventh as long in which the series swings wildly. `chirps`: sections of a sine whose
    frequency is their own, with no jump in between.

    Args:
        kind: `regimes`, `bursts` or `chirps`.
        count: Series S.
        length: Steps L.
        dwell: Mean steps of a section; each lasts between half and one and a half times its kind's mean.
        seed: Of everything.

    Returns:
        Values, float64 [S, L], and, bool [S, L], where a section has its last step.
    """
    generator = np.random.default_rng([seed, ("regimes", "bursts", "chirps").index(kind)])
    rows = [_sections(length, dwell, kind == "bursts", generator) for _ in range(count)]
    section_SL = np.stack(rows)
    gold_SL = np.zeros((count, length), dtype=bool)
    gold_SL[:, :-1] = section_SL[:, 1:] != section_SL[:, :-1]
    draw: Callable[[Array, np.random.Generator], Array] = {"regimes": _regimes, "bursts": _bursts, "chirps": _chirps}[
        kind
    ]
    return draw(section_SL, generator), gold_SL


def _sections(length: int, dwell: int, uneven: bool, generator: np.random.Generator) -> Array:
    """The number of every step's section; where uneven, those of odd numbers are a seventh as long as the others."""
    long = generator.integers(dwell - dwell // 2, dwell + dwell // 2, size=4 * length // dwell + 8, endpoint=True)
    if uneven:
        long = np.maximum(np.where(np.arange(len(long)) % 2, long // 4, 7 * long // 4), 2)
    return np.repeat(np.arange(len(long)), long)[:length]


def _per_step(section_SL: Array, draw: Callable[[tuple[int, int]], Array]) -> Array:
    """One number a section, [S, sections], told to each of its steps, [S, L]."""
    return np.take_along_axis(draw((len(section_SL), int(section_SL.max()) + 1)), section_SL, 1)


def _regimes(section_SL: Array, generator: np.random.Generator) -> Array:
    level_SL = _per_step(section_SL, lambda shape: generator.normal(0.0, 2.0, shape))
    memory_SL = _per_step(section_SL, lambda shape: generator.uniform(-0.6, 0.9, shape))
    noise_SL = _per_step(section_SL, lambda shape: np.exp(generator.uniform(np.log(0.05), np.log(0.6), shape)))
    noise_SL *= generator.normal(size=section_SL.shape)
    value_SL = np.empty(section_SL.shape)
    deviation_S = np.zeros(len(section_SL))
    for step in range(section_SL.shape[1]):
        deviation_S = memory_SL[:, step] * deviation_S + noise_SL[:, step]
        value_SL[:, step] = level_SL[:, step] + deviation_S
    return value_SL


def _bursts(section_SL: Array, generator: np.random.Generator) -> Array:
    busy_SL = section_SL % 2 == 1
    height_SL = _per_step(section_SL, lambda shape: generator.uniform(1.0, 3.0, shape))
    period_SL = _per_step(section_SL, lambda shape: generator.uniform(3.0, 8.0, shape))
    phase_SL = np.cumsum(2 * np.pi / period_SL, 1)
    noise_SL = np.where(busy_SL, 0.2, 0.1) * generator.normal(size=section_SL.shape)
    return np.where(busy_SL, height_SL * np.sin(phase_SL), 0.0) + noise_SL


def _chirps(section_SL: Array, generator: np.random.Generator) -> Array:
    period_SL = _per_step(section_SL, lambda shape: np.exp(generator.uniform(np.log(4.0), np.log(40.0), shape)))
    phase_SL = np.cumsum(2 * np.pi / period_SL, 1)
    return np.sin(phase_SL) + 0.05 * generator.normal(size=section_SL.shape)
