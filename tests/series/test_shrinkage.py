"""``callbacks=[shrink]``: a model adds to its linear path only as much as validation windows confirm."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize_scalar
from tiny import settings

from tokenv.config.components import check_components
from tokenv.config.files import resolve
from tokenv.evaluation.loaded_run import load_run
from tokenv.series.baseline_models import fit_dlinear
from tokenv.series.contexts import held_out_windows
from tokenv.series.forecaster import forecast
from tokenv.series.shrinkage import fit_shrinkage, shrink_correction
from tokenv.series.windows import load_series
from tokenv.training.trainer import train

HISTORY, HORIZON = 12, 4
LOGGED = "validation/shrinkage"
SHRINK = [{"name": "shrink"}]


def of_run(folder, callbacks, **steps):
    """Configure a short run on two noisy series with gaps, which the model learns too closely."""
    generator = np.random.default_rng(0)
    season = np.sin(np.arange(700) / 3)
    value_LC = np.stack([season, np.roll(season, 2) ** 3], 1) + 0.3 * generator.normal(
        size=(700, 2)
    )
    value_LC[generator.random(value_LC.shape) < 0.02] = np.nan
    pd.DataFrame(value_LC, columns=["a", "b"]).to_csv(folder / "waves.csv", index=False)
    data = {
        "kind": "series",
        "source": str(folder / "waves.csv"),
        "seq_len": HISTORY + HORIZON,
        "validation": 0.2,
    }
    data["options"] = {"context": HISTORY, "test": 0.1, "date": None, "columns": ["a", "b"]}
    once = {
        "symbols": 10_000,
        "batch_size": 16,
        "learning_rate": 0.02,
    }
    codec = {"name": "series", "horizon": HORIZON, "direct": True, "linear_path": HISTORY}
    of = settings(data=data, train=once | steps) | {"callbacks": callbacks}
    return resolve([], of | {"codec": codec, "agent": {"name": "uniform"}})


def trained(folder, callbacks=SHRINK, **steps):
    _, history = train(of_run(folder, callbacks, **steps), folder / "checkpoints", lambda *_: None)
    return load_run(str(folder), "latest"), history


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("shrunk")), trained(
        tmp_path_factory.mktemp("whole"), callbacks=[]
    )


def window_errors(run, factor):
    """Return the mean squared error on validation windows of DLinear plus ``factor`` times the model's correction."""
    data = load_series(run.config.data)
    squares = []
    dlinear = fit_dlinear(data, HORIZON)
    for batch in held_out_windows(data, HORIZON, side="validation").batches(50):
        base_BHC = dlinear(batch)
        mean_BHC = forecast(run.components, batch, HORIZON, direct=True).distribution.mean_BHC
        std_BC = np.stack([series.std_C for series in batch.series])
        squares.append(
            ((base_BHC + factor * (mean_BHC - base_BHC) - batch.truth_BHC) / std_BC[:, None]) ** 2
        )
    return np.nanmean(np.concatenate(squares))


def test_the_factor_minimises_the_error_on_validation_windows(runs):
    (_, history), (whole, unshrunk) = runs
    best = minimize_scalar(
        lambda factor: window_errors(whole, factor), bounds=(0, 1), method="bounded"
    )
    assert 0.05 < best.x < 0.95  # neither bound, which the next test is for
    (factor,) = history[LOGGED][1]
    assert factor == pytest.approx(best.x, abs=2e-3)
    assert LOGGED not in unshrunk


def test_means_are_shrunk_and_nothing_else(runs):
    (shrunk, history), (whole, _) = runs
    (factor,) = history[LOGGED][1]
    own, other = (run.components.state_dict() for run in (shrunk, whole))
    assert {name for name in own if not torch.equal(own[name], other[name])} == {
        "lm.auxiliary_head.projection.weight"
    }
    data = load_series(whole.config.data)
    batch = next(held_out_windows(data, HORIZON, 20).batches(20))
    base_BHC = fit_dlinear(data, HORIZON)(batch)
    after, before = (
        forecast(run.components, batch, HORIZON, direct=True).distribution
        for run in (shrunk, whole)
    )
    np.testing.assert_allclose(
        after.mean_BHC, base_BHC + factor * (before.mean_BHC - base_BHC), rtol=1e-4, atol=1e-4
    )
    width, width_before = (np.diff(each.quantile([0.1, 0.9]), axis=1) for each in (after, before))
    np.testing.assert_allclose(width, width_before, rtol=1e-5)


@pytest.mark.parametrize(
    ("times", "expected"), [(0.8, 1 / 0.8), (3.0, 1 / 3), (0.05, None), (-1.0, 0.0)]
)
def test_a_scaled_correction_has_the_inverse_factor_between_0_and_1(runs, times, expected):
    (_, history), (whole, _) = runs
    weight = whole.components.lm.auxiliary_head.projection.weight
    stored = weight.detach().clone()
    try:
        shrink_correction(whole.components.lm, times)
        factor = fit_shrinkage(whole.components, load_series(whole.config.data))
    finally:
        weight.data.copy_(stored)
    expected_factor = 1.0 if expected is None else expected * history[LOGGED][1][0]
    assert factor == pytest.approx(expected_factor, rel=1e-3)


def test_an_untrained_correction_is_left_as_it_is(tmp_path):
    run, history = trained(tmp_path, symbols=64, learning_rate=1e-30)
    assert (
        not run.components.lm.auxiliary_head.projection.weight.view(HORIZON, 3, -1)[:, 0]
        .abs()
        .max()
        > 1e-20
    )
    assert 0 <= history[LOGGED][1][0] <= 1


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"codec": {"linear_path": 0}}, "callbacks = shrink: expected codec.linear_path"),
        ({"hardware": {"fsdp_size": 2}}, "callbacks = shrink: expected hardware.fsdp_size=1"),
        (
            {"codec": {"density": "bins"}},
            "callbacks = shrink: expected codec.density = gaussian or student_t",
        ),
    ],
)
def test_what_shrinkage_needs_is_asked_for(tmp_path, updates, message):
    of = of_run(tmp_path, SHRINK).as_dict()
    for section, values in updates.items():
        of[section] |= values
    with pytest.raises(ValueError, match=message):
        train(resolve([], of), tmp_path / "checkpoints", lambda *_: None)


def test_a_frozen_model_is_not_shrunk(tmp_path):
    with pytest.raises(ValueError, match=r"callbacks = shrink: expected freeze_lm=False"):
        check_components(replace(of_run(tmp_path, SHRINK), freeze_lm=True, init_from="runs/1"))
