"""Covariates: read by the model up to the step to which they are known, and never predicted."""

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import settings
from torch.testing import assert_close

import tokenv
from tokenv.cli.main import run_command
from tokenv.config.components import check_components
from tokenv.config.files import resolve
from tokenv.core.errors import UserError
from tokenv.series.codec import SeriesCodec
from tokenv.series.config import SeriesConfig
from tokenv.series.tables import Recording
from tokenv.series.windows import SplitBorders, covariate_symbols, series_of
from tokenv.training.trainer import train

HORIZON = 3
COVARIATES = {"past_covariates": ["wind"], "future_covariates": ["plan"], "future_steps": HORIZON}


def demand(steps=600, seed=0, name="a", first="2024-01-01"):
    """Return a series which follows a plan at once and the wind of the day before."""
    generator = np.random.default_rng(seed)
    plan = generator.choice([-1.0, 1.0], steps)
    wind = generator.normal(size=steps)
    y = 3 * plan + np.roll(wind, 1) + 0.1 * generator.normal(size=steps)
    ds = pd.date_range(first, periods=steps, freq="D")
    return pd.DataFrame({"unique_id": name, "ds": ds, "y": y, "wind": wind, "plan": 10 + 5 * plan})


def run(folder, frame, **series):
    frame.to_csv(folder / "demand.csv", index=False)
    horizon = HORIZON
    symbols = 90_000
    data = {
        "kind": "series",
        "source": str(folder / "demand.csv"),
        "seq_len": 12 + horizon,
        "validation": 0.1,
    }
    data["options"] = {"context": 12, "test": 0.1, **series}
    codec = {"name": "series", "horizon": horizon, "direct": True}
    once = {"every_symbols": symbols}
    steps = {"symbols": symbols, "batch_size": 32}
    steps |= {"optimizer": "muon", "learning_rate": 0.03}
    of = settings(train=steps, validation=once, checkpoint=once)
    of |= {"data": data, "codec": codec, "agent": {"name": "uniform"}}
    train(resolve([], of), folder / "checkpoints", lambda *_: None)
    return tokenv.load(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    frame = pd.concat([demand(), demand(400, 1, "b", "2023-03-05")])
    return run(tmp_path_factory.mktemp("covariates"), frame, **COVARIATES)


def test_a_model_which_knows_the_plan_forecasts_better_than_any_without_it(model):
    windows = model.cross_validation(demand(300, 5), HORIZON, n_windows=40)
    # The plan, drawn anew at every step, explains 3.0; the wind 1.0 of the first step.
    assert (windows["tokenv"] - windows["y"]).std(ddof=0) < 1.3


def test_rows_of_the_future_come_in_their_own_frame_or_at_the_end(model):
    full = [demand(80, 5), demand(50, 6, "b")]
    past = pd.concat([frame[:-HORIZON] for frame in full])
    future = pd.concat([frame[-HORIZON:] for frame in full])[["unique_id", "ds", "plan"]]
    forecasts = model.forecast(past, HORIZON, X_df=future)
    assert forecasts["ds"].tolist() == future["ds"].tolist()
    pd.testing.assert_frame_equal(forecasts, model.forecast(pd.concat([past, future]), HORIZON))
    other = model.forecast(past, HORIZON, X_df=future.assign(plan=20 - future["plan"]))
    turned = -np.sign(future["plan"] - 10).to_numpy()
    assert (turned * (other["tokenv"] - forecasts["tokenv"]) > 0).mean() > 0.7
    assert (other["tokenv"] - forecasts["tokenv"]).abs().mean() > 2
    known = model.cross_validation(full[0], HORIZON, n_windows=1)
    np.testing.assert_allclose(known["tokenv"], forecasts["tokenv"][:HORIZON], rtol=1e-5)


def test_past_covariates_of_the_future_are_not_read(model):
    frame = demand(60)
    changed = frame.copy()
    changed.loc[57:, "wind"] = 99.0
    mean, other = (model.cross_validation(each, HORIZON)["tokenv"] for each in (frame, changed))
    pd.testing.assert_series_equal(mean, other)
    changed.loc[56, "wind"] = 99.0
    assert (model.cross_validation(changed, HORIZON)["tokenv"] != mean).any()


def test_a_static_covariate_is_a_column_with_one_value_in_each_series(model):
    series = pd.concat([demand(60, 5), demand(60, 5, "b")]).drop(columns="wind")

    def forecast(**wind):
        static = pd.DataFrame({"unique_id": wind.keys(), "wind": wind.values()})
        windows = model.cross_validation(series.merge(static, on="unique_id"), HORIZON)
        return windows["tokenv"].to_numpy().reshape(2, HORIZON)

    forecasts = forecast(a=-1.0, b=1.0)
    assert (np.abs(forecasts[0] - forecasts[1]) > 0.01).any()
    np.testing.assert_allclose(forecast(a=1.0, b=-1.0), forecasts[::-1], rtol=1e-4)


def test_the_plan_is_standardised_as_in_training(model):
    codec = model.lm.codec
    plan = pd.concat([demand()[HORIZON : 480 + HORIZON], demand(400, 1)[HORIZON : 320 + HORIZON]])[
        "plan"
    ]
    assert_close(codec.covariate_mean[1].item(), plan.mean())
    assert_close(codec.covariate_std[1].item(), plan.std(ddof=0))


@given(
    st.integers(1, 12), st.integers(0, 6), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2)
)
def test_symbols_hold_what_is_known(length, further, steps, past, future):
    if past + future == 0:
        return
    covariate_MK = np.random.default_rng(0).normal(size=(length + further, past + future))
    names = [f"{k}" for k in range(past + future)]
    config = SeriesConfig(
        past_covariates=names[:past],
        future_covariates=names[past:],
        future_steps=steps if future else 0,
    )
    recording = Recording("x", ["y"], np.ones((length, 1)), covariate_MK=covariate_MK)
    symbol_LK5 = covariate_symbols(recording, config)
    for i in range(length):
        for k in range(past + future):
            row = i if k < past else min(i + config.future_steps, length + further - 1)
            assert symbol_LK5[i, k, 0] == covariate_MK[row, k]
            assert symbol_LK5[i, k, 1:4].tolist() == [0, 1, 0]
    (series,) = series_of(recording, SplitBorders(length, length, length), config)
    assert series.covariate_LK.tobytes() == symbol_LK5.tobytes()


def test_likelihoods_do_not_depend_on_the_covariates_of_a_target():
    torch.manual_seed(0)
    codec = SeriesCodec(8, channels=2, covariates=1, residual=True).double()
    symbol = torch.rand(5, 3, 5, dtype=torch.float64) + 0.5
    parameters = torch.randn(5, codec.num_parameters, dtype=torch.float64)
    changed = symbol.clone()
    changed[:, 2] = torch.nan
    assert_close(
        codec.log_prob(parameters, symbol), codec.log_prob(parameters, changed), rtol=0, atol=0
    )
    assert codec.loss_mask(changed).tolist() == [2] * 5
    assert (codec.embed(symbol) != codec.embed(changed)).any(-1).all()
    drawn = codec.sample(parameters, after=symbol)
    assert drawn.shape == symbol.shape
    assert drawn[:, 2, 0].isnan().all()


@pytest.mark.parametrize(
    ("series", "horizon", "message"),
    [
        (
            {"past_covariates": ["wind"]},
            0,
            "codec.horizon = 0: expected at least 1 with covariates",
        ),
        (
            {"future_covariates": ["plan"]},
            3,
            "data.options.future_steps = 0: expected 3, which is codec.horizon",
        ),
        (
            {"past_covariates": ["wind"], "future_steps": 3},
            3,
            "data.options.future_steps = 3: expected 0",
        ),
        (
            {"past_covariates": "plan", "future_covariates": "plan", "future_steps": 3},
            3,
            "'plan' is a column of an",
        ),
        ({"past_covariates": ["date"]}, 3, "'date' is a column of another kind"),
        ({"past_covariates": 5}, 3, "data.options.past_covariates = 5: expected texts"),
    ],
)
def test_wrong_keys_are_named(series, horizon, message):
    data = {
        "kind": "series",
        "source": "x.csv",
        "seq_len": 15,
        "options": {"context": 12, **series},
    }
    with pytest.raises(UserError, match=message):
        check_components(
            resolve([], {"data": data, "codec": {"name": "series", "horizon": horizon}})
        )


def test_what_is_missing_is_named(model, tmp_path):
    frame = demand(60)
    with pytest.raises(
        UserError, match="a knows plan for 0 rows after the last value: expected the 3 of horizon"
    ):
        model.forecast(frame, HORIZON)
    with pytest.raises(
        UserError, match=r"X_df has the columns ds: expected those of .* \['plan'\]"
    ):
        model.forecast(frame, HORIZON, X_df=frame[["ds"]])
    with pytest.raises(
        UserError, match=r"no column .wind., which data\.options\.past_covariates names"
    ):
        model.forecast(frame.drop(columns="wind"), HORIZON)
    with pytest.raises(UserError, match="direct = False: this model"):
        model.forecast(frame, HORIZON, direct=False)


def test_the_command_reads_the_last_rows_of_a_file_as_the_future(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    frame = demand(80).drop(columns="unique_id").rename(columns={"ds": "date"})
    frame.loc[80 - HORIZON :, ["y", "wind"]] = np.nan
    frame.to_csv("own.csv", index=False)
    data = ["data.source=own.csv", "data.kind=series", "data.seq_len=15", "codec.name=series"]
    data += [
        "data.options.context=12",
        "codec.horizon=3",
        "codec.direct=True",
        "agent.name=uniform",
        "model.width=16",
    ]
    data += [
        "data.options.past_covariates=wind",
        "data.options.future_covariates=plan",
        "data.options.future_steps=3",
    ]
    run_command("train", ["with", *data, "train.symbols=960", "data.validation=0.2"])
    run_command(
        "forecast", ["with", "run=runs/1", "csv=own.csv", "horizon=3", "direct=True", "out=mine"]
    )
    assert pd.read_csv("mine.csv")["date"].str[:10].tolist() == [
        "2024-03-18",
        "2024-03-19",
        "2024-03-20",
    ]
