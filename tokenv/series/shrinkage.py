"""The callback ``shrink``: a model adds to its linear path only as much as validation windows confirm."""

from functools import partial
from typing import Any

import numpy as np
import torch

from tokenv.config.components import Components
from tokenv.core.callbacks import Callback
from tokenv.core.errors import UserError
from tokenv.evaluation.evaluator import eval_mode
from tokenv.lm.unet import UNet
from tokenv.series.codec import SeriesCodec
from tokenv.series.contexts import held_out_windows
from tokenv.series.densities import Gaussian, StudentT
from tokenv.series.forecaster import make_forecasts
from tokenv.series.scores import ParametricForecast
from tokenv.series.windows import SeriesData

SHRINKAGE_WINDOWS = 1024  # validation windows, evenly over all


class Shrink(Callback):
    """Multiply what a model adds to its linear path by a factor, after training; see ``fit_shrinkage``.

    The factor is logged as ``validation/shrinkage``; docs/ett.md shows its effect.
    """

    def check(self, config: Any, codec: Any) -> None:
        """Raise an error unless the model has a linear path, and one location of its densities to be shrunk."""
        if not getattr(codec, "linear_path", 0):
            raise UserError(
                "callbacks = shrink: expected codec.linear_path above 0, towards which it shrinks"
            )
        if not isinstance(codec.density, Gaussian | StudentT):
            raise UserError(
                "callbacks = shrink: expected codec.density = gaussian or student_t, which have one location that can "
                "be shrunk towards the linear path"
            )
        if config.freeze_lm:
            raise UserError(
                "callbacks = shrink: expected freeze_lm=False, because it changes the model"
            )
        if config.hardware.fsdp_size > 1:
            raise UserError(
                "callbacks = shrink: expected hardware.fsdp_size=1, because it changes a whole parameter"
            )

    def on_train_end(self, trainer: Any) -> None:
        """Fit the factor on the first process, and apply it on all."""
        trainer.metrics.flush()
        factor = trainer.ranks.from_rank0(
            partial(fit_shrinkage, trainer.components, trainer.corpus.dataset)
        )
        shrink_correction(trainer.components.lm, factor)
        trainer.state.record("validation", {"shrinkage": factor}, trainer.log)


def fit_shrinkage(components: Components, data: SeriesData) -> float:
    """Return the factor of a model's correction of its linear path which suits validation windows best.

    A model with ``codec.linear_path`` forecasts ``f + c``, where f is the linear map of the history. The factor is
    ``argmin_w sum (y - f - w c)^2 = sum c (y - f) / sum c^2`` over standardised values, limited to [0, 1]: a stacked
    regression (Breiman 1996, Machine Learning 24) of the two forecasts f and f + c.

    Args:
        components: language model and agent; they keep their mode.
        data: data of the run.

    Raises:
        UserError: the validation steps are too few for a window.
    """
    codec = components.lm.codec
    assert isinstance(codec, SeriesCodec)
    contexts = held_out_windows(data, codec.horizon, SHRINKAGE_WINDOWS, side="validation")
    product = square = 0.0
    with eval_mode(components):
        for each in make_forecasts(components, contexts, {}, (), samples=2, direct=True):
            distribution = each.forecast.distribution
            assert isinstance(distribution, ParametricForecast)
            batch = each.batch
            assert batch.truth_BHC is not None
            base_BHC = batch.standardise(distribution.location_BHC.numpy())
            correction_BHC = batch.standardise(distribution.mean_BHC) - base_BHC
            rest_BHC = batch.standardise(batch.truth_BHC) - base_BHC
            known_BHC = ~np.isnan(rest_BHC)
            product += float((correction_BHC * rest_BHC)[known_BHC].sum())
            square += float(np.square(correction_BHC)[known_BHC].sum())
    if not square:
        return 1.0
    return min(max(product / square, 0.0), 1.0)


@torch.no_grad()
def shrink_correction(lm: UNet, factor: float) -> None:
    """Multiply a model's correction of its linear path by ``factor``; the densities keep their scale and shape."""
    codec = lm.codec
    assert isinstance(codec, SeriesCodec)
    sizes = (codec.horizon, codec.channels, codec.density.num_parameters, -1)
    lm.auxiliary_head.projection.weight.view(sizes)[:, :, 0].mul_(factor)
