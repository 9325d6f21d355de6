"""Series in environment, training and evaluation: stepping equals one pass, and everything is causal."""

import json
import math
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from episodes import Noise, Scripted, random_noise
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from tensordict.nn import TensorDictSequential
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

import tokenv.env.gym
from tokenv.agents.heuristic import Entropy
from tokenv.agents.learned import Learned
from tokenv.cli.main import run_command
from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.config.schema import Config
from tokenv.core import checkpoints, keys
from tokenv.core.contracts import Sampling
from tokenv.data.corpus import TensorSource
from tokenv.env.gym import SERIES_ID
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.evaluation.evaluator import EvalOptions, boundary_scores, evaluate
from tokenv.evaluation.run_state import Evaluation
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.series.codec import DENSITIES, SeriesCodec
from tokenv.series.windows import normalise_window
from tokenv.training.trainer import train

WIDTH, CONTEXT = 16, 3
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}

unbounded = pytest.mark.filterwarnings(
    r"ignore:.*A Box observation space (minimum|maximum) value is -?infinity:UserWarning"
)


def make_lm(channels=1, density="student_t", residual=False, horizon=0):
    sizes = {
        "width": WIDTH,
        "heads": 2,
        "down_layers": 1,
        "mid_layers": 2,
        "up_layers": 1,
        "window": 4,
    }
    codec = SeriesCodec(WIDTH, channels, density, residual=residual, horizon=horizon)
    return UNet(UNetConfig(**sizes), codec).double()


def framed(value_BNC):
    batch, _, channels = value_BNC.shape
    usual = {"mean_BC": np.zeros((batch, channels)), "std_BC": np.ones((batch, channels))}
    return torch.from_numpy(
        normalise_window(np.asarray(value_BNC, dtype=np.float64), CONTEXT, **usual, floor=0.1)
    )


def random_values(batch, length, channels=1, missing=0.2, seed=0):
    generator = np.random.default_rng(seed)
    value_BNC = 50 + 7 * generator.normal(size=(batch, length, channels)).cumsum(1)
    value_BNC[generator.random(value_BNC.shape) < missing] = np.nan
    return value_BNC


def make_env(symbol_BN, lm, **options):
    return TokenizationEnv(lm, TensorSource(symbol_BN), len(symbol_BN), **options)


def step_through(env, agent, noise_BT):
    return env.rollout(noise_BT.shape[1], TensorDictSequential(Noise(noise_BT), agent)).detach()


def make_learned():
    agent = Learned(WIDTH, window=2, scale=1.0).double()
    with torch.no_grad():
        agent.projection.weight.normal_(std=3 / WIDTH)
    return agent


# --- environment ---


@pytest.mark.parametrize("density", DENSITIES)
@settings(max_examples=6)
@given(
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(5, 20),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)
def test_stepping_equals_one_pass(density, seed, batch, length, channels, missing, residual):
    torch.manual_seed(seed)
    lm = make_lm(channels, density, residual)
    agent = make_learned()
    noise_BT = random_noise(batch, length - 1)
    env = make_env(framed(random_values(batch, length, channels, missing, seed)), lm)
    stepped = step_through(env, agent, noise_BT)
    env.source.position = 0
    one_pass = env.one_pass(agent, noise=noise_BT).detach()
    assert set(stepped.keys(True, True)) == set(one_pass.keys(True, True))
    for key in stepped.keys(True, True):
        assert_close(stepped[key], one_pass[key], **TOLERANCE)
        if key not in (keys.SYMBOL, ("next", keys.SYMBOL)):
            assert stepped[key].isfinite().all(), key
    assert not stepped[keys.REWARD][:, : CONTEXT - 1].any()


@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_torchrls_specs_hold(missing):
    env = make_env(
        framed(random_values(3, 9, 2, missing)), make_lm(2), optional_keys=["early_entropy"]
    )
    check_env_specs(env)
    assert env.one_pass(Scripted())[keys.REWARD].isfinite().all()


@settings(max_examples=25)
@given(
    st.integers(0, 1000),
    st.integers(CONTEXT, 15),
    st.sampled_from(["larger", "missing"]),
    st.booleans(),
)
def test_a_value_moves_nothing_before_it(seed, t, change, residual):
    """Beyond the context, a value x_t changes no action and encoding before t and no earlier likelihood."""
    torch.manual_seed(seed)
    lm = make_lm(residual=residual)
    agent = make_learned()
    noise_BT = random_noise(1, 15)
    value_BNC = random_values(1, 16, missing=0.0, seed=seed)
    changed_BNC = value_BNC.copy()
    changed_BNC[0, t] = np.nan if change == "missing" else changed_BNC[0, t] + 30
    before, after = (
        rollout(lm, agent, framed(v), noise=noise_BT).detach() for v in (value_BNC, changed_BNC)
    )
    for key in (keys.ACTION, keys.ENCODING, keys.BOUNDARY_PROB):
        assert torch.equal(before[key][:, :t], after[key][:, :t]), key
    for key in (keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY, keys.REWARD):
        assert torch.equal(before[key][:, : t - 1], after[key][:, : t - 1]), key
    assert not torch.equal(before[keys.LOG_LIKELIHOOD], after[keys.LOG_LIKELIHOOD])


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_are_finite_whatever_is_missing(residual):
    lm = make_lm(2, residual=residual, horizon=3)
    agent = make_learned()
    value_BNC = random_values(3, 12, 2, missing=0.4)
    value_BNC[1] = np.nan
    td = rollout(lm, agent, framed(value_BNC), generator=torch.Generator().manual_seed(0))
    learned = (
        keys.LOG_LIKELIHOOD,
        keys.LOG_LIKELIHOOD_EARLY,
        keys.ACTION_LOG_PROB,
        keys.LOG_LIKELIHOOD_AUXILIARY,
    )
    sum(td[key].sum() for key in learned).backward()
    for module in (lm, agent):
        assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)
    assert not td[keys.LOG_LIKELIHOOD][1].any()


@settings(max_examples=10)
@given(st.integers(0, 1000), st.integers(1, 6), st.booleans(), st.sampled_from([None, 2]))
def test_the_direct_head_predicts_what_comes(seed, horizon, residual, samples):
    """Compare with the codec's density of single values, position by position."""
    torch.manual_seed(seed)
    lm = make_lm(residual=residual, horizon=horizon)
    agent = make_learned()
    symbol_BN = framed(random_values(2, 8, seed=seed))
    td = rollout(lm, agent, symbol_BN, Sampling(samples, reward_only=samples is not None))
    first = td if samples is None else td[0]
    y_BTD = lm.decode_hidden(lm.encode(symbol_BN)[:, :-1], first[keys.ACTION])
    for i in range(7):
        total_B = torch.zeros(2, dtype=torch.float64)
        count_B = torch.zeros(2, dtype=torch.long)
        if i + horizon < 8:
            parameters_BHP = lm.auxiliary_head(y_BTD[:, i])
            for h in range(horizon):
                target = symbol_BN[:, i + 1 + h].clone()
                target[..., 4] = torch.where(
                    symbol_BN[:, i, :, 0].isnan(), symbol_BN[:, i, :, 4], symbol_BN[:, i, :, 0]
                )
                total_B += lm.codec.log_prob(parameters_BHP[:, h], target)
                count_B += lm.codec.loss_mask(target)
        assert_close(first[keys.LOG_LIKELIHOOD_AUXILIARY][:, i], total_B)
        assert torch.equal(first[keys.AUXILIARY_COUNT][:, i], count_B)
    if samples is not None:
        assert not td[keys.AUXILIARY_COUNT][1:].any()


def test_a_direct_head_changes_nothing_else():
    """A direct head does not change the other initial parameters, and too short sequences do not use it."""
    torch.manual_seed(0)
    plain = make_lm()
    torch.manual_seed(0)
    more = make_lm(horizon=4)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, more.state_dict()[name]), name
    assert keys.LOG_LIKELIHOOD_AUXILIARY not in rollout(
        more, make_learned(), framed(random_values(1, 4))
    )


def test_agents_that_read_the_early_entropy_work():
    lm = make_lm(density="logistic_mixture")
    agent = Entropy(mode="monotonic").eval()
    env = make_env(framed(random_values(2, 10)), lm, optional_keys=["early_entropy"])
    noise_BT = random_noise(2, 9)
    stepped = step_through(env, agent, noise_BT)
    env.source.position = 0
    assert torch.equal(stepped[keys.ACTION], env.one_pass(agent, noise=noise_BT)[keys.ACTION])


# --- gymnasium ---


@unbounded
def test_gymnasiums_checker_passes():
    env = gymnasium.make(SERIES_ID)
    check_env(env.unwrapped)
    assert env.unwrapped.env.source.seq_len == 128
    assert isinstance(env.unwrapped.env.lm.codec, SeriesCodec)


def test_both_faces_are_the_same_everywhere():
    envs, again = (gymnasium.make_vec(f"tokenv.env.gym:{SERIES_ID}", num_envs=2) for _ in range(2))
    first = envs.reset(seed=5)
    second = again.reset(seed=5)
    assert_array_equal(first[0]["encoding"], second[0]["encoding"])
    single = gymnasium.make(SERIES_ID)
    observation, _ = single.reset(seed=5)
    assert single.unwrapped.origin == envs.origin[0] == again.origin[0]
    assert single.unwrapped.origin.startswith("regimes ")
    assert_allclose(observation["encoding"], first[0]["encoding"][0], rtol=1e-4, atol=1e-5)
    rewards = [envs.step(np.array([i % 2, 0]))[1] for i in range(60)]
    mine = [single.step(i % 2)[1] for i in range(60)]
    assert_allclose(np.array(rewards)[:, 0], mine, rtol=1e-3, atol=1e-4)
    assert not np.array(rewards)[:31].any()  # the default context
    assert np.array(rewards)[31:].all()


def test_registering_again_changes_nothing():
    spec = gymnasium.registry[SERIES_ID]
    tokenv.env.gym.register()
    assert gymnasium.registry[SERIES_ID] is spec


# --- boundary scores with a tolerance ---


def most_pairs(drawn, gold, tolerance):
    """Enumerate all boundaries."""
    if not drawn or not gold:
        return 0
    rest = most_pairs(drawn[1:], gold, tolerance)
    near = [g for g in gold if abs(g - drawn[0]) <= tolerance]
    return max(
        [rest, *(1 + most_pairs(drawn[1:], [h for h in gold if h != g], tolerance) for g in near)]
    )


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=11), st.integers(0, 3)
)
def test_matching_finds_as_many_pairs_as_there_can_be(columns, tolerance):
    drawn, gold = torch.tensor(columns).T
    scores = boundary_scores(drawn[None], gold[None], tolerance)
    hits = most_pairs(
        drawn.nonzero().flatten().tolist(), gold.nonzero().flatten().tolist(), tolerance
    )
    assert scores["boundary_precision"] == pytest.approx(hits / max(drawn.sum().item(), 1))
    assert scores["boundary_recall"] == pytest.approx(hits / max(gold.sum().item(), 1))


def test_rows_are_matched_apart():
    drawn = torch.eye(2, dtype=torch.bool)
    gold = torch.eye(2, dtype=torch.bool).flip(0)
    assert boundary_scores(drawn, gold, 1)["boundary_f1"] == 1
    drawn = torch.tensor([[True], [False]])
    gold = torch.tensor([[False], [True]])
    assert boundary_scores(drawn, gold, 1)["boundary_f1"] == 0


# --- training and evaluation ---


def run(settings, folder, **options):
    return train(resolve([], settings), folder, lambda *_: None, **options)


def test_training_speaks_of_nats_per_value(series_settings, tmp_path):
    series_settings["train"] |= {"symbols": 10_000, "learning_rate": 1e-2}
    last, history = run(series_settings, tmp_path)
    nats = history["train/nats_per_value"][1]
    assert sum(nats[-5:]) < sum(nats[:5]) - 1
    assert last.unit == "nats_per_value"
    assert last.metrics()["nats_per_value"] == history["validation/nats_per_value"][1][-1]
    assert {"nats_per_value_early", "boundary_f1", "standard_error"} <= set(last.metrics())
    assert not any("byte" in name for name in history if not name.endswith("_per_second"))
    assert Evaluation.from_metrics(last.metrics(), "nats_per_value") == last
    scores = [
        json.loads((path / "state.json").read_text())
        for path in checkpoints.list_complete(tmp_path)
    ]
    assert [score["nats_per_value"] for score in scores[-1:]] == [last.loss]


def test_resuming_equals_never_having_stopped(series_settings, tmp_path):
    last, whole = run(series_settings, tmp_path / "whole")
    saved = checkpoints.list_complete(tmp_path / "whole")
    assert len(saved) >= 2
    resumed_last, resumed = run(
        series_settings, tmp_path / "resumed", resume=checkpoints.load(saved[0])
    )
    assert resumed_last == last
    for name in whole.keys() - {"train/symbols_per_second"}:
        assert resumed[name] == whole[name], name


@pytest.mark.parametrize("estimator", ["rloo", "reinpatch", "straight"])
def test_other_estimators_train_on_series(series_settings, tmp_path, estimator):
    series_settings |= {"estimator": {"name": estimator}}
    series_settings["train"] |= {"symbols": 1024, "warmup_symbols": 0}
    last, _ = run(series_settings, tmp_path)
    assert math.isfinite(last.loss)


def test_averages_are_over_values_that_count(series_settings):
    """Missing values and contexts have no weight; the mean over windows is not the mean over values."""
    config = resolve([], series_settings)
    parts = build_components(config)
    parts.train(False)  # the policy has another soft-cap in training
    value_BNC = random_values(5, 32, missing=0.0)
    value_BNC[2:, 10:] = np.nan
    symbol_BN = framed(value_BNC)
    batch = TensorSource(symbol_BN).next(5)
    result = evaluate(parts, batch, EvalOptions(2))
    generator = torch.Generator().manual_seed(0)
    total = 0.0
    for rows in (slice(0, 2), slice(2, 4), slice(4, 5)):
        with torch.no_grad():
            td = rollout(parts.lm, parts.agent, symbol_BN[rows], generator=generator)
        total -= td[keys.LOG_LIKELIHOOD].double().sum().item()
    loss_mask = 2 * (32 - CONTEXT) + 3 * (10 - CONTEXT)
    assert result.loss == pytest.approx(total / loss_mask, rel=1e-6)
    assert result.standard_error > 0


def test_files_train_jointly_and_apart(series_settings, tmp_path):
    value = random_values(1, 300, 2, missing=0.1)[0]
    lines = [f"{i},{a},{b}" for i, (a, b) in enumerate(value)]
    (tmp_path / "x.csv").write_text("\n".join(["date,a,b", *lines]))
    for joint in (True, False):
        series = {"context": 4, "columns": ["a", "b"], "joint": joint}
        series_settings["data"] |= {"source": str(tmp_path / "x.csv"), "options": series}
        last, history = run(series_settings, tmp_path / str(joint))
        assert math.isfinite(last.loss)
        assert last.boundary_f1 is None
        assert "validation/boundary_f1" not in history


def words(settings):
    flat = []
    for section, values in settings.items():
        texts = {
            k: v if isinstance(v, str) else json.dumps(v).replace(chr(34), chr(39))
            for k, v in values.items()
        }
        flat += [f"{section}.{key}={text}" for key, text in texts.items()]
    return flat


@pytest.fixture
def trained(series_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run_command("train", ["with", *words(series_settings)])
    assert result["nats_per_value"] > 0
    return Path("runs/1")


def test_commands_show_series_or_say_that_they_do_not(trained, capsys):
    assert (trained / "patches.png").read_bytes().startswith(b"\x89PNG")
    assert not (trained / "segments.html").exists()
    printed = (trained / "cout.txt").read_text()
    assert "nats per value" in printed
    assert "within 2 steps" in printed
    assert "bits" not in printed
    results = run_command("evaluate", ["with", f"run={trained}", "data.options.tolerance=0"])
    assert results["sampled"]["nats_per_value"] > 0
    test = run_command("evaluate", ["with", f"run={trained}", "split=test"])
    assert test["sampled"]["nats_per_value"] != results["sampled"]["nats_per_value"]
    with pytest.raises(ValueError, match="split = 'tset': expected validation or test"):
        run_command("evaluate", ["with", f"run={trained}", "split=tset"])
    for command, words in {"segment": ["text=ab"], "variance": []}.items():
        with pytest.raises(ValueError, match=r"data.kind = 'series': expected text"):
            run_command(command, ["with", f"run={trained}", *words])


# --- configuration ---


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (
            {"codec": {"name": "bytes"}},
            r"codec.name = 'bytes': expected a codec for data.kind=series",
        ),
        (
            {"codec": {"name": "series", "densty": 1}},
            r"codec.densty is no option of codec 'series'.*'density'",
        ),
        ({"codec": {"name": "sereis"}}, r"codec.name = 'sereis' is unknown: did you mean 'series'"),
        ({"codec": {"horizon": -1}}, r"codec.horizon = -1: expected 0 or more"),
        ({"codec": {"horizon": 32}}, r"codec.horizon = 32: expected at most data.seq_len - 1 = 31"),
        ({"codec": {"density": "cauchy"}}, r"codec.density = 'cauchy'"),
        (
            {"data": {"options": {"contxt": 3}}},
            r"data.options.contxt is no option of .*: did you mean 'context'",
        ),
        (
            {"data": {"options": {"context": "long"}}},
            r"data.options.context = 'long': expected a whole number",
        ),
    ],
)
def test_bad_configurations_are_named(series_settings, updates, message):
    base = resolve([], series_settings).as_dict()
    with pytest.raises(ValueError, match=message):
        build_components(resolve([], updates, base), torch.device("meta"))


def test_text_with_a_codec_of_series_is_refused():
    with pytest.raises(
        ValueError, match=r"codec.name = 'series': expected a codec for data.kind=text"
    ):
        resolve(["quick"], {"codec": {"name": "series"}})


def test_configurations_of_before_are_those_of_bytes():
    old = Config().as_dict()
    del old["codec"], old["data"]["kind"], old["data"]["options"]
    assert resolve([], {}, base=old) == Config()


def test_the_named_configuration_trains_on_series():
    config = resolve(["series-synthetic"], {})
    assert (config.data.kind, config.codec["name"]) == ("series", "series")
