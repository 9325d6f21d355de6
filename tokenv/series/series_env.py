"""The environment of series for clients of gymnasium: ``tokenv/Series-v0``."""

from tokenv.data.config import DataConfig
from tokenv.data.corpus import CorpusFactory
from tokenv.env.gym import BytesEnv, BytesVectorEnv
from tokenv.series.codec import SeriesCodec

# Windows of 128 steps of synthetic series.
default_series_source = CorpusFactory(
    DataConfig(kind="series", source="regimes", seq_len=128, validation=0.1)
)


class SeriesEnv(BytesEnv):
    """A series whose patch boundaries are the actions: ``BytesEnv`` with other defaults.

    The default model, of univariate series, has Student-t densities. Rewards are 0 in a sequence's context and where a
    value is missing. Models must have a ``tokenv.series.codec.SeriesCodec``, and sources its symbols.
    """

    make_codec = SeriesCodec
    default_source = default_series_source


class SeriesVectorEnv(BytesVectorEnv):
    """B series whose patch boundaries are the actions: ``BytesVectorEnv`` with the defaults of ``SeriesEnv``."""

    make_codec = SeriesCodec
    default_source = default_series_source
