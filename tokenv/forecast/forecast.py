"""Forecasting a series: many possible continuations, boundaries drawn on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from tokenv import keys
from tokenv.config.schema import Config
from tokenv.data.memory import spread_order
from tokenv.data.series.config import SYNTHETIC_SERIES
from tokenv.data.series.tables import Recording
from tokenv.data.series.windows import Series, SeriesData, frame, moments
from tokenv.env.generate import generate
from tokenv.env.rollout import rollout
from tokenv.errors import UserError
from tokenv.lm.codecs.base import Codec
from tokenv.lm.codecs.series import LOCATION, SCALE, VALUE, SeriesCodec
from tokenv.run.parts import Parts

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Forecast:
    """One series' continuations.

    Attributes:
        name: of the series.
        history_LC: what was known, NaN where missing.
        sample_SHC: S equally probable continuations of H steps, on the original scale; S quantiles of every step
            where the direct head made them.
        drawn: whether they were drawn, and are no quantiles.
        boundary_L: where patches end in the history, bool; as drawn for the first continuation.
        probability_L: of a boundary in the history.
    """

    name: str
    history_LC: Array
    sample_SHC: Array
    drawn: bool
    boundary_L: Array
    probability_L: Array

    @property
    def mean_HC(self) -> Array:
        """Mean of the continuations."""
        return np.asarray(self.sample_SHC.mean(0))

    def quantile_QHC(self, probabilities: Sequence[float]) -> Array:
        """Quantiles of the continuations, one for each of Q probabilities."""
        return np.quantile(self.sample_SHC, probabilities, axis=0)


def history_steps(config: Config, horizon: int) -> int:
    """Steps of history that a model reads before a forecast: all that its sequences leave.

    Raises:
        UserError: ``horizon`` is below 1, or leaves no step between the context and the forecast.
    """
    known = config.data.seq_len - horizon
    if horizon < 1 or known <= config.data.series.context:
        most = config.data.seq_len - config.data.series.context - 1
        raise UserError(
            f"horizon = {horizon}: expected 1 to {most}, for the model was trained on sequences of data.seq_len = "
            f"{config.data.seq_len} steps, of which the first {config.data.series.context} are context: train one with "
            "a longer data.seq_len"
        )
    return known


def last_windows(recording: Recording, config: Config, horizon: int) -> tuple[list[str], Tensor]:
    """The end of recorded series, as histories to forecast from.

    Args:
        recording: read with the run's options.
        config: of the run.
        horizon: steps to be forecast.

    Returns:
        Names, and framed symbols [B, L, C, 5]; B series of one channel, or one of all where the run's are joint.

    Raises:
        UserError: the recording is too short, or a column holds no value.
    """
    wanted, options = history_steps(config, horizon), config.data.series
    value_LC = recording.value_LC[-wanted:]
    if len(value_LC) <= options.context:
        raise UserError(
            f"{recording.name} has {len(recording.value_LC)} rows: expected more than the data.series.context = "
            f"{options.context} that the model reads first"
        )
    mean_C, std_C = moments(recording.value_LC)
    for column, mean in zip(recording.columns, mean_C, strict=True):
        if math.isnan(mean):
            raise UserError(f"column {column!r} of {recording.name} holds no value: name others in columns")
    std_C = np.where(std_C > 0, std_C, 1.0)
    if options.joint:
        names, value_BLC, mean_BC, std_BC = [recording.name], value_LC[None], mean_C[None], std_C[None]
    else:
        names, value_BLC = recording.columns, value_LC.T[:, :, None]
        mean_BC, std_BC = mean_C[:, None], std_C[:, None]
    symbol = frame(value_BLC, options.context, mean_BC=mean_BC, std_BC=std_BC, floor=options.floor)
    return names, torch.from_numpy(symbol)


@torch.no_grad()
def forecast(
    parts: Parts,
    names: Sequence[str],
    history_BL: Tensor,
    horizon: int,
    *,
    samples: int = 100,
    seed: int = 0,
    batch_size: int = 512,
    direct: bool = False,
    rate: float | None = None,
    progress: bool = False,
) -> list[Forecast]:
    """Continue histories, value by value, as the model's own density and policy draw them; or all values at once.

    Args:
        parts: model and agent, in evaluation mode.
        names: of the B series.
        history_BL: framed symbols [B, L, C, 5].
        horizon: steps H to write.
        samples: continuations S of every history.
        seed: of values and boundaries.
        batch_size: continuations written together.
        direct: ask the direct head: every step's quantiles (k - 1/2) / S instead of draws, a density per step and
            nothing of how steps hang together.
        rate: that the agent is told, if it is told one.
        progress: show a bar.

    Raises:
        UserError: ``samples`` below 2; ``direct``, and the model's direct head does not reach so far.
    """
    if samples < 2:
        raise UserError(f"samples = {samples}: expected at least 2, to tell a spread")
    lm, reach = parts.lm, parts.lm.config.horizon
    if direct and reach < horizon:
        has = f"reaches {reach} steps" if reach else "is missing"
        raise UserError(
            f"horizon = {horizon} with direct=True: the model's direct head {has}: train one with "
            f"model.horizon={horizon}, or let it write value by value (direct=False)"
        )
    generator = torch.Generator(lm.head.weight.device).manual_seed(seed)
    rows = batch_size if direct else max(1, batch_size // samples)
    bar = tqdm(history_BL.split(rows), desc="forecast", unit="batch", leave=False, disable=not progress)
    made: list[tuple[Array, ...]] = []
    for history in bar:
        action, probability, boundary = _boundaries(parts, history, generator, rate)
        if direct:
            y_RLD = lm.read_out(lm.encode(history.to(action.device)), action, boundary)
            value_RSHC = _quantiles(lm.codec, lm.direct(y_RLD[:, -1])[:, :horizon], history[:, -1], samples)
        else:
            prompt = history.repeat_interleave(samples, 0).to(action.device)
            written = generate(lm, parts.agent, prompt, horizon, generator=generator, rate=rate)
            value_RSHC = written.symbol_BN[:, history.shape[1] :, :, VALUE].unflatten(0, (-1, samples)).cpu()
        frame_RC5 = history[:, 0]
        sample = value_RSHC * frame_RC5[:, None, None, :, SCALE] + frame_RC5[:, None, None, :, LOCATION]
        values = (history[..., VALUE], sample, action.bool().cpu(), probability.float().cpu())
        made += zip(*(tensor.numpy() for tensor in values), strict=True)
    return [
        Forecast(name, history_LC, sample_SHC, not direct, boundary_L, probability_L)
        for name, (history_LC, sample_SHC, boundary_L, probability_L) in zip(names, made, strict=True)
    ]


def _boundaries(
    parts: Parts, history_BL: Tensor, generator: torch.Generator, rate: float | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Boundaries of histories, their probabilities, and what the pooling reads of them: [B, L] each."""
    # A rollout decides nothing at its last symbol, so one more is put there.
    symbol_BN = torch.cat([history_BL, history_BL[:, -1:]], 1).to(generator.device)
    td = rollout(parts.lm, parts.agent, symbol_BN, generator=generator, rate=rate)
    return td[keys.ACTION], td[keys.BOUNDARY_PROB], td.get(keys.BOUNDARY, None)


def _quantiles(codec: Codec, parameters_BHP: Tensor, last_BC5: Tensor, count: int) -> Tensor:
    """Quantiles (k - 1/2) / count in units of the frame: [B, H, P] -> float64 [B, count, H, C], on the CPU."""
    assert isinstance(codec, SeriesCodec)
    q_S = (torch.arange(count, device=parameters_BHP.device) + 0.5) / count
    quantile_BSHC = codec.quantile(parameters_BHP.unsqueeze(1), q_S[:, None, None])
    return quantile_BSHC.double().cpu() + codec.base(last_BC5)[:, None, None]


@dataclass(frozen=True)
class HeldOut:
    """Windows whose ends are to be forecast.

    Attributes:
        names: of the B windows.
        series: of each.
        symbol_BN: framed symbols, [B, N, C, 5].
        cluster_B: windows of one number depend on one another: they overlap, or lie in the same time.
    """

    names: list[str]
    series: list[Series]
    symbol_BN: Tensor
    cluster_B: Tensor


def held_out_windows(data: SeriesData, horizon: int, count: int = 0) -> HeldOut:
    """Windows whose last ``horizon`` steps are test steps, one a step, as the literature takes them.

    Args:
        data: the series.
        horizon: steps H of every window that are to be forecast.
        count: at most so many, evenly over all of them; 0 for all.

    Raises:
        UserError: the test steps are too few for a window.
    """
    length = data.config.seq_len
    windows = data.windows("test", before=length - horizon, stride=1)
    chosen = np.sort(spread_order(len(windows))[: count or None])
    batch, place_B = windows.take(chosen), windows.place_P[chosen]
    # Columns recorded at the same time depend on one another; synthetic series are independent.
    synthetic = data.config.source in SYNTHETIC_SERIES
    cluster_B = windows.start_P[chosen] // length * len(data.series) + (place_B if synthetic else 0)
    series = [data.series[place] for place in place_B]
    return HeldOut(batch.origin, series, batch.symbol_BN, torch.from_numpy(cluster_B))
