"""Synthetic series, whose change points are known."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

Array = np.ndarray[Any, Any]
ECHO_NOISE = 0.1


def synthetic_series(
    kind: str, count: int, length: int, dwell: int, seed: int
) -> tuple[Array, Array]:
    """Generate series that consist of sections.

    `regimes`: every section is an autoregression with a level, a persistence and a noise of its own. `bursts`: calm
    sections, and ones a seventh as long in which the series swings wildly. `chirps`: sections of a sine whose
    frequency is their own, with no jump in between. `echoes`: the last two steps of a section are a pulse, which has
    a slow answer: `dwell` steps after it there begins a bump, `dwell` steps wide and half as high. Decoys are pulses
    whose two steps have opposite signs; nothing answers them.

    Args:
        kind: `regimes`, `bursts`, `chirps` or `echoes`.
        count: number of series S.
        length: number of steps L.
        dwell: mean steps of a section; each lasts between half and one and a half times its kind's mean.
        seed: seed of the series.

    Returns:
        Values, float64 [S, L], and, bool [S, L], where a section has its last step.
    """
    draw: dict[str, Callable[[Array, np.random.Generator], Array]] = {
        "regimes": _regimes,
        "bursts": _bursts,
        "chirps": _chirps,
        "echoes": partial(_echoes, dwell),
    }
    generator = np.random.default_rng([seed, list(draw).index(kind)])
    section_SL = np.stack(
        [_sections(length, dwell, kind == "bursts", generator) for _ in range(count)]
    )
    return draw[kind](section_SL, generator), _last_steps(section_SL)


def _sections(length: int, dwell: int, uneven: bool, generator: np.random.Generator) -> Array:
    """Draw the index of every step's section; if uneven, odd sections are a seventh as long as the others."""
    steps = generator.integers(
        dwell - dwell // 2, dwell + dwell // 2, size=4 * length // dwell + 8, endpoint=True
    )
    if uneven:
        steps = np.maximum(np.where(np.arange(len(steps)) % 2, steps // 4, 7 * steps // 4), 2)
    return np.repeat(np.arange(len(steps)), steps)[:length]


def _last_steps(section_SL: Array) -> Array:
    """Mark the last step of every section but the last one, whose end is unknown."""
    return np.pad(section_SL[:, 1:] != section_SL[:, :-1], ((0, 0), (0, 1)))


def _per_step(section_SL: Array, draw: Callable[[tuple[int, int]], Array]) -> Array:
    """Draw one number per section, [S, sections], and repeat it for each of its steps, [S, L]."""
    return np.take_along_axis(draw((len(section_SL), int(section_SL.max()) + 1)), section_SL, 1)


def _regimes(section_SL: Array, generator: np.random.Generator) -> Array:
    level_SL = _per_step(section_SL, lambda shape: generator.normal(0.0, 2.0, shape))
    persistence_SL = _per_step(section_SL, lambda shape: generator.uniform(-0.6, 0.9, shape))
    noise_SL = _per_step(
        section_SL, lambda shape: np.exp(generator.uniform(np.log(0.05), np.log(0.6), shape))
    )
    noise_SL *= generator.normal(size=section_SL.shape)
    value_SL = np.empty(section_SL.shape)
    deviation_S = np.zeros(len(section_SL))
    for step in range(section_SL.shape[1]):
        deviation_S = persistence_SL[:, step] * deviation_S + noise_SL[:, step]
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
    period_SL = _per_step(
        section_SL, lambda shape: np.exp(generator.uniform(np.log(4.0), np.log(40.0), shape))
    )
    phase_SL = np.cumsum(2 * np.pi / period_SL, 1)
    return np.sin(phase_SL) + 0.05 * generator.normal(size=section_SL.shape)


def _echoes(dwell: int, section_SL: Array, generator: np.random.Generator) -> Array:
    end_SL = _last_steps(section_SL)
    decoy_section_SL = np.stack(
        [_sections(section_SL.shape[1], dwell // 2, False, generator) for _ in section_SL]
    )
    near_SL = sliding_window_view(np.pad(end_SL, ((0, 0), (3, 3))), 7, axis=1).any(-1)
    size_SL = generator.uniform(1.0, 2.0, end_SL.shape) * generator.choice(
        [-1.0, 1.0], end_SL.shape
    )
    pulse_SL = size_SL * end_SL
    decoy_SL = size_SL * (_last_steps(decoy_section_SL) & ~near_SL)
    bump_W = 0.5 * np.sin(np.linspace(0, np.pi, dwell + 2)[1:-1]) ** 2
    answer_SL = np.zeros_like(size_SL)
    for step, height in enumerate(bump_W, start=dwell):
        answer_SL[:, step:] += height * pulse_SL[:, :-step]
    first_SL = np.pad((pulse_SL - decoy_SL)[:, 1:], ((0, 0), (0, 1)))
    return (
        answer_SL
        + first_SL
        + pulse_SL
        + decoy_SL
        + ECHO_NOISE * generator.normal(size=section_SL.shape)
    )
