"""Forecasts of series: sampled continuations, or a density of every step; for one batch, or many."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenv.config.components import Components
from tokenv.config.hardware import check_forecast as check_memory
from tokenv.config.schema import Config
from tokenv.core import keys
from tokenv.core.errors import UserError, check_value
from tokenv.env.generation import generate
from tokenv.env.rollout import observe
from tokenv.evaluation.evaluator import DEFAULTS, EvalOptions, shift_noise
from tokenv.series.baseline_models import Baselines, check_season
from tokenv.series.codec import LOCATION, SCALE, VALUE, SeriesCodec
from tokenv.series.config import SAMPLES, DirectHeadConfig
from tokenv.series.contexts import Array, ContextBatch, ForecastContexts, history_steps
from tokenv.series.scores import ParametricForecast, PredictiveDistribution, SampleForecast

MAX_BATCH = 512  # continuations sampled at once


@dataclass(frozen=True)
class Forecast:
    """Forecast of what follows B histories.

    Attributes:
        distribution: distribution of the H steps which follow.
        boundary_BL: ends of patches in the histories, bool.
    """

    distribution: PredictiveDistribution
    boundary_BL: Array


@dataclass(frozen=True)
class ForecastExcerpt:
    """One forecast, as drawn and written.

    Attributes:
        name: name of the series or window.
        columns: names of its C channels.
        history_LC: known values, NaN where missing.
        boundary_L: ends of patches in the history.
        mean_HC: expected values.
        quantile_QHC: quantiles.
        point_HC: forecasts of the baselines by name.
        truth_HC: true values; None if unknown.
        date_N: dates of history and horizon; None if unknown.
    """

    name: str
    columns: list[str]
    history_LC: Array
    boundary_L: Array
    mean_HC: Array
    quantile_QHC: Array
    point_HC: dict[str, Array]
    truth_HC: Array | None
    date_N: list[Any] | None

    @property
    def dates_H(self) -> list[Any]:
        """Dates of the horizon; empty texts if they are unknown."""
        horizon = len(self.mean_HC)
        if self.date_N is None:
            return [""] * horizon
        return self.date_N[-horizon:]

    @property
    def title(self) -> str:
        """Name and dates."""
        if self.date_N is None:
            return self.name
        return f"{self.name}, {self.dates_H[0]} to {self.dates_H[-1]}"

    def as_dict(self, quantiles: Sequence[float]) -> dict[str, Any]:
        """Return what JSON stores: arrays of steps and channels [H, C]."""
        values = {
            f"{q:g}": value_HC for q, value_HC in zip(quantiles, self.quantile_QHC, strict=True)
        }
        result = {
            "series": self.name,
            "columns": self.columns,
            "mean": self.mean_HC,
            "quantiles": values,
        }
        if self.date_N is not None:
            result["date"] = [str(date) for date in self.dates_H]
        if self.truth_HC is not None:
            result["truth"] = self.truth_HC
        return result


@dataclass(frozen=True)
class ForecastBatch:
    """Forecasts of a batch, beside those of the baselines.

    Attributes:
        batch: histories, and the true values if they are known.
        forecast: the model's forecast.
        quantile_BQHC: quantiles of the model's forecast.
        point_BHC: forecasts of the baselines by name.
    """

    batch: ContextBatch
    forecast: Forecast
    quantile_BQHC: Array
    point_BHC: Mapping[str, Array]

    def excerpts(self) -> Iterator[ForecastExcerpt]:
        """Yield the forecasts one by one."""
        batch = self.batch
        mean_BHC = self.forecast.distribution.mean_BHC
        history_BLC = batch.channel_BL[..., VALUE].numpy()
        for row, name in enumerate(batch.names):
            truth_HC = None
            if batch.truth_BHC is not None:
                truth_HC = batch.truth_BHC[row]
            yield ForecastExcerpt(
                name=name,
                columns=batch.series[row].columns,
                history_LC=history_BLC[row],
                boundary_L=self.forecast.boundary_BL[row],
                mean_HC=mean_BHC[row],
                quantile_QHC=self.quantile_BQHC[row],
                point_HC={point: value_BHC[row] for point, value_BHC in self.point_BHC.items()},
                truth_HC=truth_HC,
                date_N=batch.date_BN[row],
            )


def check_horizon(model: DirectHeadConfig, horizon: int, *, direct: bool, covariates: int) -> None:
    """Check that a model can forecast so many steps.

    Args:
        model: what the model's codec says of the direct head.
        horizon: number of steps.
        direct: whether its direct head forecasts.
        covariates: number of covariates which it reads.

    Raises:
        UserError: the direct head is missing or predicts fewer steps; or not ``direct``, and the model has only its
            direct head, or reads covariates, which are unknown while it writes value by value.
    """
    if direct and model.horizon < horizon:
        head = f"reaches {model.horizon} steps" if model.horizon else "is missing"
        remedy = f"train one with codec.horizon={horizon}"
        if not model.direct:
            remedy += ", or let it write value by value (direct=False)"
        raise UserError(
            f"horizon = {horizon} with direct=True: the model's direct head {head}: {remedy}"
        )
    if model.direct and not direct:
        raise UserError(
            "direct = False: this model, with codec.direct=True, predicts its horizon at once: direct=True"
        )
    if covariates and not direct:
        raise UserError(
            f"direct = False: this model reads {covariates} covariates: expected direct=True"
        )


def check_forecast(
    config: Config,
    horizon: int,
    *,
    samples: int,
    direct: bool,
    season: int | None = None,
    held_out: bool = True,
) -> int:
    """Check that a run can make forecasts, and return the steps of history before them.

    Args:
        config: configuration of the run.
        horizon: number of steps to forecast.
        samples: see ``forecast``.
        direct: see ``forecast``.
        season: steps of a season; None if it is to be estimated.
        held_out: see ``history_steps``.

    Raises:
        UserError: see ``history_steps``, ``check_season``, ``check_horizon`` and
            ``tokenv.config.hardware.check_forecast``.
    """
    history = history_steps(config, horizon, held_out=held_out)
    check_season(season or 1, history)
    head = DirectHeadConfig.of(config.codec)
    check_horizon(head, horizon, direct=direct, covariates=len(config.data.options.covariates))
    if not direct:
        check_memory(config, samples, horizon)
    return history


def batch_size(samples: int, history: int, *, direct: bool) -> int:
    """Return how many histories of at most ``history`` steps to forecast in one batch."""
    if direct:
        return DEFAULTS.sequences_per_pass(history)
    return max(1, MAX_BATCH // samples)


@torch.no_grad()
def forecast(
    components: Components,
    batch: ContextBatch,
    horizon: int,
    options: EvalOptions = DEFAULTS,
    *,
    samples: int = 100,
    generator: torch.Generator | None = None,
    direct: bool = False,
) -> Forecast:
    """Forecast histories: sample continuations value by value, boundaries included, or predict all values at once.

    Args:
        components: language model and agent, in evaluation mode.
        batch: histories.
        horizon: number of steps H.
        options: seed, rate and, only with ``direct``, logit bias.
        samples: continuations S of every history, which is read once; ignored if ``direct``.
        generator: generator of values and boundaries, on the model's device; None for one with the options' seed.
        direct: whether to use the direct head, which gives a density of every step, without their dependence.

    Raises:
        UserError: ``samples`` below 2; see ``check_horizon``.
    """
    assert direct or not options.logit_bias
    check_value("samples", samples, SAMPLES)
    covariates = batch.symbol_BL.shape[2] - batch.channel_BL.shape[2]
    codec = components.lm.codec
    assert isinstance(codec, SeriesCodec)
    head = DirectHeadConfig(codec.horizon, codec.trailing > 0, codec.linear_path)
    check_horizon(head, horizon, direct=direct, covariates=covariates)
    generator = generator or torch.Generator(components.lm.head.weight.device).manual_seed(
        options.seed
    )
    if direct:
        return _direct_forecast(components, batch, horizon, generator, options)
    history_BL = batch.symbol_BL
    generated = generate(
        components.lm,
        components.agent,
        history_BL.to(generator.device),
        horizon,
        samples=samples,
        generator=generator,
        rate=options.rate,
    )
    length = history_BL.shape[1]
    value_BSHC = generated.symbol_BN[:, length:, :, VALUE].unflatten(0, (-1, samples)).cpu()
    frame_BC5 = batch.channel_BL[:, 0]
    value_BSHC = (
        value_BSHC * frame_BC5[:, None, None, :, SCALE] + frame_BC5[:, None, None, :, LOCATION]
    )
    boundary_BL = generated.action_BN[::samples, :length].bool()
    return Forecast(SampleForecast(value_BSHC.numpy()), boundary_BL.cpu().numpy())


def _direct_forecast(
    components: Components,
    batch: ContextBatch,
    horizon: int,
    generator: torch.Generator,
    options: EvalOptions,
) -> Forecast:
    """Predict a density of every step by the direct head; see ``forecast`` for the arguments."""
    lm = components.lm
    assert isinstance(lm.codec, SeriesCodec)
    history_BL = batch.symbol_BL
    # No boundary is decided at the last symbol, nor at those predicted at once: as many copies are appended.
    copies = lm.codec.trailing or 1
    symbol_BN = torch.cat([history_BL, *[history_BL[:, -1:]] * copies], 1).to(generator.device)
    observation = observe(lm, components.agent, symbol_BN, options.rate)[:, : history_BL.shape[1]]
    noise_BL = torch.rand(observation.shape, device=generator.device, generator=generator)
    if options.logit_bias:
        noise_BL = shift_noise(noise_BL, options.logit_bias)
    drawn = components.agent.draw(observation, noise_BL)
    y_BLD = lm.decode_hidden(
        observation[keys.ENCODING], drawn[keys.ACTION], drawn.get(keys.BOUNDARY, None)
    )
    parameters_BHP = lm.auxiliary_head(y_BLD[:, -1])[:, :horizon].double().cpu()
    linear_BHC = lm.codec.linear_forecast(lm.auxiliary_head, history_BL.to(generator.device))
    if linear_BHC is None:
        base_BHC = lm.codec.base(history_BL[:, -1:])
    else:
        base_BHC = linear_BHC[:, :horizon].double().cpu()
    location_B1C = batch.channel_BL[:, :1, :, LOCATION]
    scale_B1C = batch.channel_BL[:, :1, :, SCALE]
    distribution = ParametricForecast(
        lm.codec, parameters_BHP, location_B1C + scale_B1C * base_BHC, scale_B1C
    )
    return Forecast(distribution, drawn[keys.ACTION].bool().cpu().numpy())


def make_forecasts(
    components: Components,
    contexts: ForecastContexts,
    baselines: Baselines,
    quantiles: Sequence[float],
    options: EvalOptions = DEFAULTS,
    *,
    samples: int,
    direct: bool,
) -> Iterator[ForecastBatch]:
    """Forecast all histories, and yield the forecasts batch by batch.

    Args:
        components: language model and agent, in evaluation mode.
        contexts: histories.
        baselines: baselines by name, which forecast the same histories.
        quantiles: probabilities, ascending.
        options: see ``forecast``.
        samples: see ``forecast``.
        direct: see ``forecast``.

    Raises:
        UserError: see ``forecast``.
    """
    generator = torch.Generator(components.lm.head.weight.device).manual_seed(options.seed)
    longest = int((contexts.end_P - contexts.start_P).max(initial=1))
    for batch in contexts.batches(batch_size(samples, longest, direct=direct)):
        result = forecast(
            components,
            batch,
            contexts.horizon,
            options,
            samples=samples,
            generator=generator,
            direct=direct,
        )
        point_BHC = {name: baseline(batch) for name, baseline in baselines.items()}
        yield ForecastBatch(batch, result, result.distribution.quantile(quantiles), point_BHC)
