"""stable-baselines3 and sb3-contrib train on the environment: one sequence, or many in every pass."""

import re
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from episodes import seeded_source, small_lm, symbols_of_row
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics, RecordVideo
from numpy.testing import assert_allclose, assert_array_equal

import tokenv.env.gym
from tokenv.data.corpus import TensorSource
from tokenv.env.gym import BytesEnv, BytesVectorEnv

stable_baselines3 = pytest.importorskip("stable_baselines3", reason="needs tokenv[sb3]")
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.monitor import Monitor  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    DummyVecEnv,
    VecEnvWrapper,
    VecFrameStack,
    VecMonitor,
    VecNormalize,
)

from tokenv.env.sb3 import SB3VecEnv  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"
LENGTH, ROWS = 9, 3
STEPS = LENGTH - 1
ACTIONS = np.random.default_rng(0).integers(0, 2, (2 * STEPS + 3, ROWS))


@pytest.fixture
def lm():
    return small_lm().double()


symbols = partial(symbols_of_row, LENGTH, ROWS)


seeded = partial(seeded_source, LENGTH)


def many(lm, source, **options):
    return BytesVectorEnv(ROWS, lm, source, autoreset_mode=AutoresetMode.SAME_STEP, **options)


# --- the adapter ---


def assert_same_observations(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_rows_are_stable_baselines3s_own_of_single_environments(lm):
    """Compare two episodes and the beginning of a third, with the infos of ends and resets."""
    ours = SB3VecEnv(many(lm, TensorSource(symbols()), window=3))
    theirs = DummyVecEnv(
        [lambda row=row: BytesEnv(lm, TensorSource(symbols(row)), window=3) for row in range(ROWS)]
    )
    assert (ours.num_envs, ours.action_space) == (theirs.num_envs, theirs.action_space)
    assert ours.observation_space == theirs.observation_space
    assert_same_observations(ours.reset(), theirs.reset())
    ends = 0
    for actions in ACTIONS:
        (mine, reward, done, infos) = ours.step(actions)
        (yours, *other, their_infos) = theirs.step(actions)
        assert_same_observations(mine, yours)
        assert (reward.dtype, done.dtype) == (other[0].dtype, other[1].dtype)
        assert_allclose(reward, other[0], rtol=1e-5)
        assert_array_equal(done, other[1])
        for row in range(ROWS):
            last, other_last = (
                info[row].pop("terminal_observation", None) for info in (infos, their_infos)
            )
            assert (last is None) == (other_last is None) == (not done[row])
            if last is not None:
                assert_same_observations(last, other_last)
                assert last in ours.observation_space
                ends += 1
            assert infos[row] == their_infos[row]
            assert infos[row]["TimeLimit.truncated"] is False
            assert ours.reset_infos[row] == theirs.reset_infos[row] == {"position": 0}
    assert ends == 2 * ROWS


def test_what_is_returned_stays_as_it_is(lm):
    envs = SB3VecEnv(many(lm, TensorSource(symbols())))
    kept = [envs.reset(), *(envs.step(actions) for actions in ACTIONS[:2])]
    copies = [kept[0]["encoding"].copy(), *(step[1].copy() for step in kept[1:])]
    envs.step(ACTIONS[2])
    assert_array_equal(kept[0]["encoding"], copies[0])
    for step, copy in zip(kept[1:], copies[1:], strict=True):
        assert_array_equal(step[1], copy)


def test_episodes_that_are_cut_short_say_so(lm):
    class Short(gymnasium.vector.VectorWrapper):
        def step(self, actions):
            observation, reward, terminated, _, infos = self.env.step(actions)
            return observation, reward, np.zeros_like(terminated), terminated, infos

    envs = SB3VecEnv(Short(many(lm, TensorSource(symbols()))))
    envs.reset()
    for actions in ACTIONS[:STEPS]:
        _, _, done, infos = envs.step(actions)
    assert done.all()
    assert all(info["TimeLimit.truncated"] is True for info in infos)


def test_seeds_hold_for_one_reset(lm):
    envs = SB3VecEnv(many(lm, seeded))
    texts = []
    for seed in (3, None, 3, 4):
        if seed is not None:
            assert envs.seed(seed) == [seed + row for row in range(ROWS)]
        texts.append(envs.reset()["encoding"])
    assert_array_equal(texts[0], texts[2])
    assert not np.array_equal(texts[0], texts[1])
    assert not np.array_equal(texts[0], texts[3])


def test_rows_are_asked_and_set_as_one(lm):
    envs = SB3VecEnv(RecordEpisodeStatistics(many(lm, TensorSource(symbols()), render_mode="ansi")))
    envs.reset()
    assert [masks.tolist() for masks in envs.env_method("action_masks")] == [[False, True]] * ROWS
    envs.step(ACTIONS[0])
    assert [masks.tolist() for masks in envs.env_method("action_masks", indices=[0, 2])] == [
        [True, True]
    ] * 2
    assert len(envs.env_method("render", indices=1)) == 1
    assert envs.get_attr("render_mode") == ["ansi"] * ROWS
    assert envs.get_attr("num_envs", indices=[1]) == [ROWS]
    assert envs.has_attr("action_masks")
    assert not envs.has_attr("wings")
    envs.set_attr("wings", 2)
    assert envs.get_attr("wings") == [2] * ROWS
    assert envs.env_is_wrapped(RecordEpisodeStatistics) == [True] * ROWS
    assert (
        envs.env_is_wrapped(RecordVideo, indices=0)
        == envs.env_is_wrapped(Monitor, indices=0)
        == [False]
    )
    with pytest.raises(ValueError, match=r"indices = 0: expected None"):
        envs.set_attr("wings", 3, indices=0)
    with pytest.raises(AttributeError, match="'reset': expected one of action_masks, render"):
        envs.env_method("reset")
    envs.set_options([{"a": 1}, {}, {}])
    with pytest.raises(ValueError, match="expected the same for all rows"):
        envs.reset()
    envs.set_options({"a": 1})
    envs.reset()
    envs.close()


def test_pictures_of_the_rows_are_tiles(lm):
    envs = SB3VecEnv(many(lm, TensorSource(symbols()), render_mode="rgb_array"))
    envs.reset()
    first = envs.get_images()[0]
    assert envs.render().shape == (2 * first.shape[0], 2 * first.shape[1], 3)


def test_another_way_to_go_on_is_refused(lm):
    with pytest.raises(ValueError, match=r"expected AutoresetMode\.SAME_STEP"):
        SB3VecEnv(BytesVectorEnv(ROWS, lm, TensorSource(symbols())))


def test_stable_baselines3s_wrappers_take_every_observation(lm):
    envs = VecFrameStack(VecNormalize(SB3VecEnv(many(lm, TensorSource(symbols())))), 2)
    envs.reset()
    for actions in ACTIONS:
        observation, reward, *_ = envs.step(actions)
        assert all(np.isfinite(x).all() for x in (reward, *observation.values()))
    assert {name: x.shape for name, x in observation.items()} == {
        "encoding": (ROWS, 32),
        "last_actions": (ROWS, 16),
    }


# --- algorithms ---


class Noted(VecEnvWrapper):
    """Record actions and results."""

    def __init__(self, venv):
        super().__init__(venv)
        self.actions = []
        self.rewards = []

    def reset(self):
        return self.venv.reset()

    def step_async(self, actions):
        self.actions.append(actions.copy())
        super().step_async(actions)

    def step_wait(self):
        answer = self.venv.step_wait()
        self.rewards.append(answer[1].copy())
        return answer


ALGORITHMS = {
    "PPO": {"n_steps": 16, "batch_size": 24, "n_epochs": 2},
    "A2C": {"n_steps": 8},
    "DQN": {
        "learning_starts": 20,
        "train_freq": 2,
        "batch_size": 16,
        "buffer_size": 200,
        "target_update_interval": 40,
    },
    "RecurrentPPO": {"n_steps": 16, "batch_size": 24, "n_epochs": 2},
    "MaskablePPO": {"n_steps": 16, "batch_size": 24, "n_epochs": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_learn_on_many_rows(name, lm):
    library = stable_baselines3
    if not hasattr(library, name):
        library = pytest.importorskip("sb3_contrib", reason="needs tokenv[sb3]")
    envs = Noted(SB3VecEnv(many(lm, seeded)))
    policy = "MultiInputLstmPolicy" if name == "RecurrentPPO" else "MultiInputPolicy"
    model = getattr(library, name)(
        policy, VecMonitor(envs), seed=1, device="cpu", **ALGORITHMS[name]
    )
    before = [p.detach().clone() for p in model.policy.parameters()]
    model.learn(total_timesteps=300)
    assert model.num_timesteps >= 300
    assert any(
        not torch.equal(old, new)
        for old, new in zip(before, model.policy.parameters(), strict=True)
    )
    assert all(p.isfinite().all() for p in model.policy.parameters())
    assert {episode["l"] for episode in model.ep_info_buffer} == {STEPS}
    # The plain environment gives the same for the same.
    plain = many(lm, seeded)
    plain.reset(seed=[1 + row for row in range(ROWS)])
    rewards = [plain.step(actions)[1] for actions in envs.actions]
    assert len(rewards) * ROWS == model.num_timesteps
    assert_allclose(envs.rewards, rewards, rtol=1e-5)
    if name == "MaskablePPO":  # the first symbol's action is never 0
        assert np.stack(envs.actions)[::STEPS].all()
    mean, _ = evaluate_policy(model, VecMonitor(SB3VecEnv(many(lm, seeded))), n_eval_episodes=ROWS)
    assert np.isfinite(mean)


@pytest.mark.slow
def test_ppo_learns_without_any_change():
    env = gymnasium.make(tokenv.env.gym.BYTES_ID)
    ppo = stable_baselines3.PPO(
        "MultiInputPolicy", env, n_steps=127, batch_size=127, n_epochs=2, seed=0, device="cpu"
    )
    before = [p.detach().clone() for p in ppo.policy.parameters()]
    ppo.learn(total_timesteps=3 * 127)
    assert ppo.num_timesteps == 3 * 127
    assert any(
        not torch.equal(old, new) for old, new in zip(before, ppo.policy.parameters(), strict=True)
    )
    assert all(p.isfinite().all() for p in ppo.policy.parameters())
    episodes = [episode["l"] for episode in ppo.ep_info_buffer]
    assert episodes == [127] * 3
    action, _ = ppo.predict(env.reset(seed=1)[0])
    assert action in env.action_space


@pytest.mark.slow
def test_the_documents_lines_run():
    """Run code blocks which need an extra, and which the test of all other blocks leaves out."""
    (block,) = re.findall(
        r"```python\n(from stable_baselines3 .*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    exec(block.replace('run="runs/1"', "seq_len=16").replace("10_000", "256"), {})
