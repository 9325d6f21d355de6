"""The gymnasium environments satisfy gymnasium's checks, and agree with the TorchRL environment."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from episodes import seeded_source, small_lm
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.testing import assert_allclose, assert_array_equal

import tokenv.env.gym
from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.data.corpus import TensorSource
from tokenv.env.gym import BYTES_ID, BytesEnv, BytesVectorEnv
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

LENGTH = 9
STEPS = LENGTH - 1
# Two steps in float32: batched matrix products may round otherwise than single ones.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}

unbounded = pytest.mark.filterwarnings(
    r"ignore:.*A Box observation space (minimum|maximum) value is -?infinity:UserWarning"
)


@pytest.fixture
def symbol_BN():
    return torch.randint(256, (6, LENGTH))


@pytest.fixture
def lm():
    return small_lm()


seeded = partial(seeded_source, LENGTH)


def random_actions(*shape):
    return np.random.default_rng(0).integers(0, 2, shape)


# --- one sequence ---


@unbounded
@pytest.mark.parametrize("window", [0, 3])
def test_gymnasiums_checker_passes(lm, window):
    check_env(gymnasium.make(BYTES_ID, lm=lm, source=seeded, window=window).unwrapped)


@unbounded
def test_gymnasiums_checker_passes_on_the_defaults():
    env = gymnasium.make(BYTES_ID)
    check_env(env.unwrapped)
    assert env.observation_space["encoding"].shape == (32,)
    assert env.observation_space["last_actions"].shape == (8,)
    assert env.unwrapped.env.source.seq_len == 128


def test_defaults_are_the_same_everywhere():
    """The id has a version: its environment must not depend on the caller."""
    first = gymnasium.make(BYTES_ID)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    second = gymnasium.make(f"tokenv.env.gym:{BYTES_ID}")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_array_equal(first.reset(seed=5)[0]["encoding"], second.reset(seed=5)[0]["encoding"])
    assert first.unwrapped.origin == second.unwrapped.origin
    origin = first.unwrapped.origin
    first.reset(seed=6)
    assert first.unwrapped.origin != origin


def test_an_episode_is_the_torchrl_environments(lm, symbol_BN):
    agent = Learned(16, window=3)
    expected = TokenizationEnv(lm, TensorSource(symbol_BN), 1, window=3).one_pass(agent).detach()[0]
    env = gymnasium.make(BYTES_ID, lm=lm, source=TensorSource(symbol_BN), window=3)
    observation, info = env.reset()
    for i in range(STEPS):
        assert observation in env.observation_space
        assert info == {"position": i}
        assert env.unwrapped.origin == "sequence 0"
        assert_allclose(observation["encoding"], expected[keys.ENCODING][i], **TOLERANCE)
        assert_array_equal(observation["last_actions"], expected[keys.LAST_ACTIONS][i])
        observation, reward, terminated, truncated, info = env.step(expected[keys.ACTION][i].item())
        assert type(reward) is float
        assert_allclose(reward, expected[keys.REWARD][i].item(), **TOLERANCE)
        assert terminated is (i == STEPS - 1)
        assert truncated is False
    assert observation in env.observation_space
    assert_allclose(observation["encoding"], expected["next", keys.ENCODING][-1], **TOLERANCE)
    assert env.reset()[1] == {"position": 0}
    assert env.unwrapped.origin == "sequence 1"


def test_a_given_source_goes_on_whatever_the_seed(lm, symbol_BN):
    env = BytesEnv(lm, TensorSource(symbol_BN))
    assert [env.reset(seed=7) and env.origin for _ in range(2)] == ["sequence 0", "sequence 1"]


def test_a_function_of_the_seed_is_called(lm):
    env = BytesEnv(lm, seeded)
    for seed in (3, 4, 3):
        env.reset(seed=seed)
        env.reset()  # goes on
        assert torch.equal(env.env._symbol_BN[0], seeded(seed).symbol_BN[1])


def test_other_precisions_become_float32(symbol_BN):
    config = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1)
    for lm in (UNet(config).double(), UNet(config, compute_dtype=torch.bfloat16)):
        env = BytesEnv(lm, TensorSource(symbol_BN))
        observation, _ = env.reset()
        assert observation in env.observation_space
        assert observation["encoding"].dtype == np.float32
        assert env.step(1)[0] in env.observation_space


def test_errors_say_what_was_expected(lm, symbol_BN):
    env = BytesEnv(lm, TensorSource(symbol_BN))
    env.reset()
    with pytest.raises(ValueError, match="action = 2: expected 0 or 1"):
        env.step(2)
    envs = BytesVectorEnv(2, lm, TensorSource(symbol_BN))
    envs.reset()
    with pytest.raises(ValueError, match="expected 0 or 1 for each sequence"):
        envs.step(np.array([1]))
    with pytest.raises(ValueError, match="window = -1"):
        BytesEnv(lm, TensorSource(symbol_BN), window=-1)
    with pytest.raises(ValueError, match="batch_size = 0"):
        BytesVectorEnv(0, lm, TensorSource(symbol_BN))


# --- many sequences ---


def assert_same(actual, expected, what):
    """Compare the nested dictionaries, lists and arrays which vector environments return."""
    if isinstance(expected, dict):
        assert set(actual) == set(expected), what
        for key in expected:
            assert_same(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, tuple) or (
        isinstance(expected, np.ndarray) and expected.dtype == object
    ):
        assert type(actual) is type(expected), what
        assert_same(dict(enumerate(actual)), dict(enumerate(expected)), what)
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
        assert_allclose(actual, expected, **TOLERANCE, err_msg=what)
    else:
        assert actual == expected, what


def test_the_vector_environment_is_single_ones_side_by_side(lm, symbol_BN):
    """The same as gymnasium's own vector environment of three single ones, info and automatic resets included."""

    def row(b):
        return lambda: BytesEnv(lm, TensorSource(symbol_BN[b::3]), window=3)

    theirs = SyncVectorEnv([row(b) for b in range(3)], autoreset_mode=AutoresetMode.SAME_STEP)
    options = {
        "lm": lm,
        "source": TensorSource(symbol_BN),
        "window": 3,
        "autoreset_mode": "SameStep",
    }
    ours = gymnasium.make_vec(BYTES_ID, num_envs=3, **options)
    assert isinstance(ours, BytesVectorEnv)
    assert ours.num_envs == 3
    for name in (
        "observation_space",
        "action_space",
        "single_observation_space",
        "single_action_space",
    ):
        assert getattr(ours, name) == getattr(theirs, name)

    for answers in zip(ours.reset(), theirs.reset(), strict=True):
        assert_same(*answers, "reset")
    # Two episodes and the beginning of a third, which starts from the first sequences again.
    for i, actions in enumerate(random_actions(2 * STEPS + 3, 3)):
        mine = ours.step(actions)
        other = theirs.step(actions)
        assert mine[0] in ours.observation_space
        for name, a, b in zip(
            ("observation", "reward", "terminated", "truncated"), mine, other, strict=False
        ):
            assert_same(a, b, f"{name} at step {i}")
        assert_same(mine[4], other[4], f"info at step {i}")


def test_the_default_mode_is_gymnasiums():
    ours = gymnasium.make_vec(BYTES_ID, num_envs=1)
    theirs = gymnasium.make_vec("CartPole-v1", num_envs=1)
    assert (
        ours.metadata["autoreset_mode"]
        is theirs.metadata["autoreset_mode"]
        is AutoresetMode.NEXT_STEP
    )


def test_sequences_that_end_start_anew_in_the_same_step(lm, symbol_BN):
    envs = BytesVectorEnv(3, lm, TensorSource(symbol_BN), autoreset_mode=AutoresetMode.SAME_STEP)
    envs.reset()
    for i, actions in enumerate(random_actions(STEPS, 3)):
        observation, _, terminated, truncated, info = envs.step(actions)
        assert terminated.tolist() == [i == STEPS - 1] * 3
        assert not truncated.any()
        assert ("final_obs" in info) is (i == STEPS - 1)
    assert info["position"].tolist() == [0, 0, 0]
    assert envs.origin == ["sequence 3", "sequence 4", "sequence 5"]
    assert not observation["last_actions"].any()
    assert info["final_info"]["position"].tolist() == [STEPS] * 3
    assert info["final_obs"][1] in envs.single_observation_space
    assert info["final_obs"][1]["last_actions"][0] == actions[1]


def test_all_rows_go_through_the_model_together(lm, symbol_BN, monkeypatch):
    envs = gymnasium.make_vec(BYTES_ID, num_envs=5, lm=lm, source=TensorSource(symbol_BN))
    rows = []
    early_exit = lm.early_exit

    def counting(x):
        rows.append(len(x))
        return early_exit(x)

    monkeypatch.setattr(lm, "early_exit", counting)
    envs.reset()
    envs.step(random_actions(5))
    assert rows == [5]


def test_vector_defaults_and_seeds():
    first, second = (gymnasium.make_vec(BYTES_ID, num_envs=2) for _ in range(2))
    for _ in range(2):  # a reset without a seed goes on where the seeded one began
        assert_same(first.reset(seed=5), second.reset(seed=5), "seeded")
        assert_same(first.reset(), second.reset(), "going on")
    origin = first.reset(seed=5) and first.origin
    first.reset(seed=6)
    assert first.origin != origin
    (observation, _) = first.reset(seed=5)
    single = gymnasium.make(BYTES_ID).reset(seed=5)[0]
    assert_allclose(observation["encoding"][0], single["encoding"], **TOLERANCE)


def test_statistics_wrapper_of_gymnasium_works(lm, symbol_BN):
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        BytesVectorEnv(3, lm, TensorSource(symbol_BN))
    )
    envs.reset()
    total = 0
    for actions in random_actions(STEPS, 3):
        _, reward, _, _, info = envs.step(actions)
        total = total + reward
    assert_allclose(info["episode"]["r"], total, rtol=1e-6)
    assert info["episode"]["l"].tolist() == [STEPS] * 3


# --- registration ---


def test_a_misspelt_id_gets_a_suggestion():
    with pytest.raises(gymnasium.error.NameNotFound, match="Did you mean: `Bytes`"):
        gymnasium.make("tokenv/Bites-v0")


def test_registering_again_changes_nothing():
    spec = gymnasium.registry[BYTES_ID]
    tokenv.env.gym.register()
    assert gymnasium.registry[BYTES_ID] is spec
