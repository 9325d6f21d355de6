"""Gymnasium's environments of stored runs of series."""

from tokenv.library.environments import TrainedModelEnv
from tokenv.series.series_env import SeriesEnv, SeriesVectorEnv


class TrainedModelSeriesEnv(TrainedModelEnv, SeriesEnv):
    """``tokenv/Series-v0``, one series at a time."""


class TrainedModelSeriesVectorEnv(TrainedModelEnv, SeriesVectorEnv):
    """``tokenv/Series-v0``, many series in every pass."""
