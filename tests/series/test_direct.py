"""Direct forecasts only (``codec.direct``): nothing of the history is predicted, so an agent may read all of it."""

import itertools

import numpy as np
import pytest
import torch
from enumeration import flat_gradient, relative_bias
from tiny import settings
from torch.testing import assert_close

from tokenv.agents.exact_count import ConditionalBernoulli, ExactCount
from tokenv.agents.fixed import Uniform
from tokenv.agents.pretrained import PretrainedAgent
from tokenv.cli.main import run_command
from tokenv.config.components import build_components, check_components
from tokenv.config.files import resolve
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.data.corpus import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rescoring import rescore
from tokenv.env.rollout import observe, rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.estimators import recipes
from tokenv.evaluation.loaded_run import load_run
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.series.baseline_models import fit_dlinear
from tokenv.series.codec import LOCATION, SCALE, VALUE, SeriesCodec
from tokenv.series.contexts import held_out_windows
from tokenv.series.forecaster import forecast
from tokenv.series.windows import load_series, normalise_window
from tokenv.training.trainer import train

WIDTH, HISTORY, HORIZON = 8, 7, 3
LENGTH = HISTORY + HORIZON
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def make_lm(direct=True, residual=True, linear_path=0):
    sizes = {
        "width": WIDTH,
        "heads": 2,
        "down_layers": 1,
        "mid_layers": 1,
        "up_layers": 1,
        "window": 3,
    }
    codec = SeriesCodec(
        WIDTH, residual=residual, horizon=HORIZON, direct=direct, linear_path=linear_path
    )
    lm = UNet(UNetConfig(**sizes), codec).double()
    if linear_path:
        torch.nn.init.normal_(lm.auxiliary_head.linear_path)
        torch.nn.init.normal_(lm.auxiliary_head.projection.weight)
    return lm


def make_agent(rate=0.5):
    """Build an agent which draws 4 boundaries at 7 positions, the first one forced."""
    agent = ConditionalBernoulli(WIDTH, HISTORY + 1, rate, reach=2, hidden=4).double()
    torch.nn.init.normal_(agent.out.weight, std=3.0)
    return agent


def make_series(batch=2, seed=0):
    value_BNC = np.random.default_rng(seed).normal(size=(batch, LENGTH, 1)).cumsum(1)
    usual = {"mean_BC": np.zeros((batch, 1)), "std_BC": np.ones((batch, 1))}
    return torch.from_numpy(normalise_window(value_BNC, HISTORY, **usual, floor=0.1))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(3), Sampling(3, reward_only=True)])
def test_likelihoods_are_the_direct_heads_at_the_end_of_the_history(sampling):
    lm = make_lm()
    agent = make_agent()
    symbol_BN = make_series()
    td = rollout(lm, agent, symbol_BN, sampling)
    for one in [td] if sampling.num_samples is None else td:
        y_BLD = lm.decode_hidden(lm.encode(symbol_BN[:, :HISTORY]), one[keys.ACTION][:, :HISTORY])
        for h in range(HORIZON):
            target = symbol_BN[:, HISTORY + h].clone()
            target[..., 4] = symbol_BN[:, HISTORY - 1, :, VALUE]  # the last that was known
            wanted_B = lm.codec.log_prob(lm.auxiliary_head(y_BLD[:, -1])[:, h], target)
            assert_close(one[keys.LOG_LIKELIHOOD][:, HISTORY - 1 + h], wanted_B)
        assert not one[keys.LOG_LIKELIHOOD][:, : HISTORY - 1].any()
        assert not one[keys.DECISION_MASK][:, HISTORY:].any()
        assert not one[keys.ACTION][:, HISTORY:].any()
    assert keys.LOG_LIKELIHOOD_AUXILIARY not in td


@pytest.mark.parametrize("linear_path", [0, HISTORY])
@pytest.mark.parametrize("step", range(HISTORY, LENGTH))
def test_no_boundary_and_no_forecast_knows_what_is_to_come(step, linear_path):
    lm = make_lm(linear_path=linear_path)
    agent = make_agent()
    symbol_BN = make_series()
    noise = torch.rand(2, LENGTH - 1).double()
    other_BN = symbol_BN.clone()
    other_BN[:, step, :, VALUE] += 1.0
    one, other = (rollout(lm, agent, symbols, noise=noise) for symbols in (symbol_BN, other_BN))
    assert torch.equal(one[keys.ACTION], other[keys.ACTION])
    assert torch.equal(one[keys.ACTION_LOG_PROB], other[keys.ACTION_LOG_PROB])
    moved_T = (one[keys.LOG_LIKELIHOOD] != other[keys.LOG_LIKELIHOOD]).any(0)
    assert moved_T.nonzero().flatten().tolist() == [step - 1]


@pytest.mark.parametrize("residual", [False, True])
def test_a_linear_path_moves_the_densities_by_what_it_predicts(residual):
    """Check against the map written out: sums over the framed values of the history, and a constant."""
    lm = make_lm(residual=residual, linear_path=HISTORY)
    agent = make_agent()
    symbol_BN = make_series()
    td = rollout(lm, agent, symbol_BN)
    y_BLD = lm.decode_hidden(lm.encode(symbol_BN[:, :HISTORY]), td[keys.ACTION][:, :HISTORY])
    plain = SeriesCodec(WIDTH)
    for h in range(HORIZON):
        z_BL = ((symbol_BN[..., VALUE] - symbol_BN[..., LOCATION]) / symbol_BN[..., SCALE])[
            :, :HISTORY, 0
        ]
        predicted_B = (z_BL * lm.auxiliary_head.linear_path[:-1, h]).sum(
            1
        ) + lm.auxiliary_head.linear_path[-1, h]
        target = symbol_BN[:, HISTORY + h].clone()
        target[..., VALUE] -= predicted_B[:, None] * target[..., SCALE]
        wanted_B = plain.log_prob(lm.auxiliary_head(y_BLD[:, -1])[:, h], target)
        assert_close(td[keys.LOG_LIKELIHOOD][:, HISTORY - 1 + h], wanted_B, **EXACT)


def test_a_run_with_a_linear_path_begins_as_dlinear(tmp_path):
    """Hardly trained, its mean forecasts are DLinear's; a checkpoint carries the map."""
    series = {"context": 16, "count": 2, "length": 400, "dwell": 8}
    data = {
        "kind": "series",
        "source": "regimes",
        "seq_len": 24,
        "validation": 0.3,
        "options": series,
    }
    of = settings(
        data=data,
        train={"symbols": 200, "learning_rate": 1e-9, "warmup_symbols": 0},
        loss={"early": 0.0},
    )
    codec = {"name": "series", "horizon": 8, "direct": True, "linear_path": 16}
    of |= {"codec": codec, "agent": {"name": "uniform"}}
    train(resolve([], of), tmp_path / "checkpoints", lambda *_: None)
    run = load_run(str(tmp_path))
    of_run = load_series(run.config.data)
    for batch in held_out_windows(of_run, 8, 12).batches(4):
        expected_BHC = fit_dlinear(of_run, 8)(batch)
        for horizon in (8, 5):
            mean_BHC = forecast(run.components, batch, horizon, direct=True).distribution.mean_BHC
            np.testing.assert_allclose(mean_BHC, expected_BHC[:, :horizon], rtol=1e-4, atol=1e-4)


def test_the_last_value_of_the_history_moves_early_boundaries():
    lm = make_lm()
    agent = make_agent()
    symbol_BN = make_series()
    other_BN = symbol_BN.clone()
    other_BN[:, HISTORY - 1, :, VALUE] += 1.0
    one, other = (
        rollout(lm, agent, symbols, noise=torch.full((2, LENGTH - 1), 0.5))
        for symbols in (symbol_BN, other_BN)
    )
    assert (one[keys.BOUNDARY_PROB] != other[keys.BOUNDARY_PROB])[:, 1].any()


def test_what_is_observed_before_any_decision_is_what_a_rollout_decides_by():
    lm = make_lm()
    agent = make_agent()
    symbol_BN = make_series()
    noise = torch.rand(2, LENGTH - 1).double()
    td = rollout(lm, agent, symbol_BN, noise=noise)
    observation = observe(lm, agent, symbol_BN)
    assert torch.equal(observation[keys.DECISION_MASK], td[keys.DECISION_MASK])
    assert torch.equal(agent.draw(observation, noise)[keys.ACTION], td[keys.ACTION])


@pytest.mark.parametrize(
    "agent", [Uniform(0.5, HISTORY + 1), ExactCount(WIDTH, HISTORY + 1, 0.5).double()]
)
def test_exact_counts_are_those_of_the_history(agent):
    td = rollout(make_lm(), agent, make_series(), noise=torch.rand(2, LENGTH - 1).double())
    assert (td[keys.ACTION].sum(-1) == 4).all()


def test_it_is_refused_where_symbols_are_predicted_one_by_one():
    with pytest.raises(
        ValueError, match=r"ConditionalBernoulli agent reads the whole history .* would look ahead"
    ):
        rollout(make_lm(direct=False), make_agent(), make_series())
    loaded = PretrainedAgent(make_agent(), make_lm(), lambda rows: make_lm())
    with pytest.raises(
        ValueError, match=r"PretrainedAgent agent reads the whole history .* would look ahead"
    ):
        rollout(make_lm(direct=False), loaded, make_series())
    for name in ("quick", "series-synthetic", "etth1"):
        with pytest.raises(
            ValueError, match=r"would look ahead\. Expected direct forecasts, .*codec\.direct=True"
        ):
            check_components(resolve([name], {"agent": {"name": "conditional"}}))


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"codec": {"horizon": 0}}, r"codec.direct = True with codec.horizon = 0"),
        (
            {"codec": {"linear_path": 5}},
            r"codec.linear_path = 5: expected 0, or data.seq_len - codec.horizon = 168",
        ),
        (
            {"codec": {"linear_path": 168, "direct": False}},
            r"codec.linear_path = 168 without codec.direct",
        ),
        (
            {"codec": {"horizon": 30}},
            r"data.options.context = 168: expected data.seq_len - codec.horizon = 162",
        ),
    ],
)
def test_what_a_direct_model_needs_is_asked_for(updates, message):
    with pytest.raises(ValueError, match=message):
        check_components(resolve(["series-forecast"], updates))


def test_nothing_goes_step_by_step():
    lm = make_lm()
    agent = make_agent()
    symbol_BN = make_series()
    with pytest.raises(
        ValueError, match=r"last 3 symbols of a sequence at once.*nothing to step by"
    ):
        TokenizationEnv(lm, TensorSource(symbol_BN), 2).reset()
    with pytest.raises(ValueError, match=r"last 3 symbols of a sequence at once and no next one"):
        generate(lm, agent, symbol_BN, 2)
    with pytest.raises(ValueError, match=r"expected more than the 3 last ones"):
        rollout(lm, agent, symbol_BN[:, :HORIZON])
    TokenizationEnv(lm, TensorSource(symbol_BN), 2).one_pass(agent)


class World:
    """All draws of one history: 3 further boundaries at 6 positions, 20 draws."""

    def __init__(self):
        torch.manual_seed(1)
        self.lm = make_lm()
        self.agent = make_agent()
        self.symbol_BN = make_series(batch=1)
        self.inputs = [
            *self.agent.parameters(),
            *self.lm.codec.parameters(),
            *self.lm.down.parameters(),
        ]
        rows = [
            [1, *(int(i in some) for i in range(6))] for some in itertools.combinations(range(6), 3)
        ]
        # 0 forces a boundary, and 1 none
        noise = torch.nn.functional.pad(
            1 - torch.tensor(rows).double(), (0, HORIZON - 1), value=0.5
        )
        self.td = rollout(self.lm, self.agent, self.symbol_BN, noise=noise.unsqueeze(1))
        assert self.td[keys.ACTION][:, 0, :HISTORY].tolist() == rows
        self.log_prob_C = self.td[keys.ACTION_LOG_PROB].sum((1, 2))
        assert_close(self.log_prob_C.exp().sum().item(), 1.0, rtol=0, atol=1e-12)

    def true(self):
        """Return the gradient of the forecast's expected loss."""
        loss_C = -self.td[keys.LOG_LIKELIHOOD].detach().sum((1, 2))
        assert loss_C.std() > 1e-3
        return flat_gradient((self.log_prob_C.exp() * loss_C).sum(), self.inputs, retain_graph=True)

    def expected(self, estimator):
        """Of the estimator's gradient, over all combinations of its samples' draws."""
        samples = estimator.sampling.samples
        tuples = torch.cartesian_prod(*[torch.arange(len(self.log_prob_C))] * samples).view(
            -1, samples
        )
        weight = self.log_prob_C.detach()[tuples].sum(-1).exp()
        td = self.td[tuples] if estimator.sampling.num_samples else self.td[tuples[:, 0]]
        loss = estimator(td)[keys.LOSS_POLICY].flatten(1).sum(1) / samples
        return flat_gradient((weight * loss).sum(), self.inputs, retain_graph=True)


@pytest.mark.parametrize(
    ("estimator", "share"),
    [
        (recipes.naive(), 1),
        (recipes.early_exit(1.0), 1),
        (recipes.rloo(1.0, 2), 1),
        (recipes.rloo(1.0, 3, reward_only=True), 1),
        (recipes.reinpatch(1.0, 2, centred_only=True), 1 / 2),
        (recipes.reinpatch(1.0, 3, centred_only=True), 2 / 3),
    ],
)
def test_estimators_expect_the_true_gradient(estimator, share):
    """Enumerate all C(6, 3) draws of every sample; the group's mean includes the sample itself."""
    world = World()
    assert_close(world.expected(estimator), share * world.true(), **EXACT)


def test_standard_deviations_of_groups_bend_the_direction():
    world = World()
    bias = relative_bias(world.expected(recipes.reinpatch(1.0, 2)), world.true())
    assert bias > 0.1


def test_scored_again_it_is_the_same():
    lm = make_lm()
    agent = make_agent()
    td = rollout(lm, agent, make_series(), Sampling(2)).detach()
    again = rescore(lm, agent, td)
    assert_close(again[keys.ACTION_LOG_PROB], td[keys.ACTION_LOG_PROB])


def test_a_run_of_it_trains_forecasts_and_is_compared(series_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    series_settings["data"]["options"]["context"] = 24
    settings = series_settings | {
        "rate": 0.2,
        "codec": {"name": "series", "horizon": 8, "direct": True},
        "agent": {"name": "conditional"},
        "estimator": {"name": "reinpatch", "reward_only": True},
        "loss": {"rate": 0.0},
    }
    words = [
        f"{section}.{key}={value}"
        for section, of in settings.items()
        if section != "rate"
        for key, value in of.items()
    ]
    run_command("train", ["with", "rate=0.2", *words])
    result = run_command("evaluate", ["with", "run=runs/1"])["sampled"]
    assert result["boundary_rate"] == pytest.approx(5 / 24)
    assert result["boundary_f1"] > 0
    scores = run_command(
        "forecast", ["with", "run=runs/1", "horizon=8", "direct=True", "samples=4", "windows=4"]
    )
    assert scores["crps"] > 0
    with pytest.raises(ValueError, match="horizon = 6: expected 8"):
        run_command("forecast", ["with", "run=runs/1", "horizon=6", "direct=True"])
    with pytest.raises(ValueError, match="direct = False: this model"):
        run_command("forecast", ["with", "run=runs/1", "horizon=8"])
    parts = build_components(resolve([], settings))
    assert (parts.agent.num_positions, parts.agent.count) == (24, 5)
