"""Forecasts of random histories, which ``tokenv bench`` times."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tokenv.config.components import Components, build_components
from tokenv.config.hardware import resolve_device
from tokenv.config.schema import Config
from tokenv.series.config import DirectHeadConfig
from tokenv.series.contexts import ContextBatch, last_windows
from tokenv.series.forecaster import batch_size, check_forecast, forecast
from tokenv.series.tables import Recording

QUANTILES = (0.1, 0.5, 0.9)


def prepare_forecasts(
    config: Config, horizon: int, samples: Sequence[int]
) -> tuple[str, dict[str, tuple[int, Callable[[], None]]]]:
    """Build a model, and batches of the size which ``tokenv forecast`` uses; see ``DataKind.forecast_work``.

    Args:
        config: configuration of a run of series.
        horizon: number of steps to forecast.
        samples: numbers of continuations per forecast, of a model which does not forecast with its direct head alone.

    Returns:
        What is forecast, in words; and by number of samples, or ``direct``, the number of forecasts in a batch and a
        function which makes them.

    Raises:
        UserError: the horizon does not fit the configuration, or the samples do not fit into memory.
    """
    head = DirectHeadConfig.of(config.codec)
    history = 0
    for count in samples:
        history = check_forecast(config, horizon, samples=count, direct=head.direct)
    components = build_components(config, resolve_device(config.hardware.device))
    components.train(False)
    ways = {}
    if not head.direct:
        ways = {f"{count}": count for count in samples}
    if head.horizon >= horizon:
        ways["direct"] = 0
    batches: dict[str, tuple[int, Callable[[], None]]] = {}
    for name, count in ways.items():
        size = batch_size(count, history, direct=not count)
        batch = _random_histories(config, history, horizon, size)
        batches[name] = (size, partial(_forecast, components, batch, horizon, count))
    return f"{horizon} steps after {history}", batches


def _random_histories(config: Config, length: int, horizon: int, count: int) -> ContextBatch:
    channels = config.data.options.channels
    generator = torch.Generator().manual_seed(config.seed)
    value_BLC = torch.randn(
        count, length, channels, generator=generator, dtype=torch.float64
    ).numpy()
    columns = [f"{channel}" for channel in range(channels)]
    recordings = [Recording(f"{row}", columns, value_LC) for row, value_LC in enumerate(value_BLC)]
    return next(last_windows(recordings, config, horizon).batches(count))


def _forecast(components: Components, batch: ContextBatch, horizon: int, samples: int) -> None:
    """Forecast with quantiles; by the direct head if there are no samples."""
    result = forecast(components, batch, horizon, samples=samples or 2, direct=not samples)
    result.distribution.quantile(QUANTILES)
