"""Environments of gymnasium with a trained run have its model and text, and a small pickle."""

import io
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from numpy.testing import assert_allclose, assert_array_equal

import tokenv
from tokenv.config.files import resolve
from tokenv.core import trust
from tokenv.core.errors import MissingFileError, UserError
from tokenv.core.run_folders import write_digests
from tokenv.data.corpus import CorpusFactory, TensorSource
from tokenv.env import BYTES_ID, SERIES_ID
from tokenv.env.gym import BytesEnv, BytesVectorEnv
from tokenv.library import model_hub
from tokenv.library.environments import TrainedModelBytesEnv
from tokenv.training.trainer import train

ROOT = Path(__file__).parents[2]
LENGTH, SEED = 16, 5
ID = f"tokenv.env:{BYTES_ID}"
ACTIONS = np.random.default_rng(0).integers(0, 2, (LENGTH - 1, 2))


def by_hand(run: Path, seq_len: int | None = None) -> dict[str, Any]:
    model = tokenv.load(run)
    config = model.config.data if seq_len is None else replace(model.config.data, seq_len=seq_len)
    return {"lm": model.lm, "source": CorpusFactory(config)}


def episode(env: Any) -> list[Any]:
    """Return all observations with fixed actions, of one row or two."""
    observation, _ = env.reset(seed=SEED)
    history = [observation, env.unwrapped.origin]
    for actions in ACTIONS:
        observation, reward, *_ = env.step(actions if hasattr(env, "num_envs") else int(actions[0]))
        history += [observation, reward]
    return history


def assert_same(one: Any, other: Any) -> None:
    """Compare up to rounding: two loads of one model lie elsewhere in memory, and AVX-512 kernels sum by alignment."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_allclose(one[name], other[name], rtol=1e-5, atol=1e-5)
    elif np.issubdtype(np.asarray(one).dtype, np.number):
        assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    else:
        assert_array_equal(one, other)


def assert_same_episodes(one: Any, other: Any) -> None:
    for first, second in zip(episode(one), episode(other), strict=True):
        assert_same(first, second)


@pytest.mark.parametrize("seq_len", [None, LENGTH])
def test_the_runs_model_plays_on_its_text(tiny_run: Path, seq_len: int | None) -> None:
    env = gymnasium.make(ID, run=str(tiny_run), seq_len=seq_len, window=2)
    assert env.unwrapped.env.source.seq_len == (seq_len or 32)
    assert_same_episodes(env, BytesEnv(**by_hand(tiny_run, seq_len), window=2))
    untrained = BytesEnv(source=by_hand(tiny_run, seq_len)["source"], window=2)
    assert episode(env)[3] != episode(untrained)[3]


def test_the_runs_model_plays_all_rows(tiny_run: Path) -> None:
    envs = gymnasium.make_vec(ID, num_envs=2, run=str(tiny_run), seq_len=LENGTH)
    assert isinstance(envs, BytesVectorEnv)
    assert_same_episodes(envs, BytesVectorEnv(2, **by_hand(tiny_run, LENGTH)))


def test_text_of_ones_own_goes_before_the_runs(tiny_run: Path) -> None:
    symbol_BN = by_hand(tiny_run, LENGTH)["source"](7).next(2).symbol_BN
    env = gymnasium.make(ID, run=str(tiny_run), source=TensorSource(symbol_BN))
    assert_same_episodes(env, BytesEnv(tokenv.load(tiny_run).lm, TensorSource(symbol_BN)))


def test_a_length_needs_no_run() -> None:
    for env in (
        gymnasium.make(ID, seq_len=LENGTH),
        gymnasium.make_vec(ID, num_envs=2, seq_len=LENGTH),
    ):
        assert env.unwrapped.env.source.seq_len == LENGTH


# --- on the way to other processes ---


def test_a_spec_holds_the_runs_name(tiny_run: Path) -> None:
    env = gymnasium.make(ID, run=str(tiny_run), seq_len=LENGTH)
    stored = env.spec.to_json()
    assert json.loads(stored)["kwargs"] == {"run": str(tiny_run), "seq_len": LENGTH}
    assert_same_episodes(gymnasium.make(EnvSpec.from_json(stored)), env)
    envs = gymnasium.make_vec(ID, num_envs=2, run=str(tiny_run), seq_len=LENGTH)
    assert_same_episodes(gymnasium.make_vec(EnvSpec.from_json(envs.spec.to_json())), envs)


@pytest.mark.parametrize(
    "make", [gymnasium.make, lambda *_, **how: gymnasium.make_vec(ID, num_envs=2, **how)]
)
def test_a_pickle_holds_the_runs_name(tiny_run: Path, make: Any) -> None:
    env = make(ID, run=str(tiny_run), seq_len=LENGTH)
    before = episode(env)
    packed = pickle.dumps(env)
    assert len(packed) < 3000  # the weights alone are more than ten times that
    again = pickle.loads(packed)
    assert again.unwrapped.spec.to_json() == env.unwrapped.spec.to_json()
    with pytest.raises(gymnasium.error.ResetNeeded):
        again.unwrapped.step(ACTIONS[0])
    for first, second in zip(episode(again), before, strict=True):
        assert_same(first, second)


def test_what_was_made_by_hand_goes_into_a_pickle_whole(tiny_run: Path) -> None:
    env = BytesEnv(**by_hand(tiny_run, LENGTH))
    assert_same_episodes(pickle.loads(pickle.dumps(env)), env)
    assert len(pickle.dumps(BytesEnv())) < 500


@pytest.mark.slow
def test_another_process_opens_the_run(tiny_run: Path, tmp_path: Path) -> None:
    env = gymnasium.make(ID, run=str(tiny_run), seq_len=LENGTH)
    (tmp_path / "env.pickle").write_bytes(pickle.dumps(env))
    program = "import pickle, sys; env = pickle.load(open(sys.argv[1], 'rb')); env.reset(seed=5); "
    program += "print([env.step(int(action))[1] for action in sys.argv[2]])"
    actions = "".join(map(str, ACTIONS[:, 0]))
    command = [sys.executable, "-W", "ignore", "-c", program, tmp_path / "env.pickle", actions]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == pytest.approx(episode(env)[3::2], rel=1e-5)


def assert_rewards(rewards: np.ndarray, run: Path, seeds: list[int]) -> None:
    """Return those of rows [T, B] with the actions above, each in a process of its own with its own seed."""
    for row, seed in enumerate(seeds):
        env = BytesEnv(**by_hand(run, LENGTH))
        env.reset(seed=seed)
        expected = [env.step(int(action))[1] for action in ACTIONS[:, row]]
        assert rewards[:, row].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_gymnasiums_processes_open_the_run(tiny_run: Path) -> None:
    envs = gymnasium.make_vec(
        ID, num_envs=2, vectorization_mode="async", run=str(tiny_run), seq_len=LENGTH
    )
    try:
        envs.reset(seed=SEED)
        rewards = np.stack([envs.step(actions)[1] for actions in ACTIONS])
    finally:
        envs.close()
    assert_rewards(rewards, tiny_run, [SEED, SEED + 1])


@pytest.mark.slow
def test_stable_baselines3s_processes_open_the_run(tiny_run: Path) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    make = gymnasium.envs.registration.make
    envs = vec_env.SubprocVecEnv([lambda: make(ID, run=str(tiny_run), seq_len=LENGTH)] * 2)
    try:
        envs.seed(SEED)
        envs.reset()
        rewards = np.stack([envs.step(actions)[1] for actions in ACTIONS])
    finally:
        envs.close()
    assert_rewards(rewards, tiny_run, [SEED, SEED + 1])


@pytest.mark.slow
# TorchRL's
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
def test_torchrls_processes_open_the_run(tiny_run: Path) -> None:
    from torchrl.envs import GymEnv, ParallelEnv

    envs = ParallelEnv(
        2, lambda: GymEnv(ID, run=str(tiny_run), seq_len=LENGTH, categorical_action_encoding=True)
    )
    try:
        envs.set_seed(SEED)
        td = envs.reset()
        rewards = []
        for actions in ACTIONS:
            td = envs.step(td.set("action", torch.as_tensor(actions)))
            rewards.append(td["next", "reward"].squeeze(-1).numpy())
            td = td["next"].clone()
    finally:
        envs.close()
    assert not np.allclose(np.stack(rewards)[:, 0], np.stack(rewards)[:, 1])


# --- what cannot be ---


def test_what_does_not_fit_is_one_message(
    tiny_run: Path, series_settings: dict[str, Any], tmp_path: Path
) -> None:
    lm = tokenv.load(tiny_run).lm
    with pytest.raises(UserError, match="beside a model lm: expected one of them"):
        gymnasium.make(ID, run=str(tiny_run), lm=lm)
    source = TensorSource(torch.zeros(2, LENGTH, dtype=torch.long))
    for more in ({}, {"run": str(tiny_run)}):
        with pytest.raises(ValueError, match="seq_len = 8 beside a source"):
            gymnasium.make(ID, source=source, seq_len=8, **more)
    with pytest.raises(MissingFileError, match="no complete checkpoint"):
        gymnasium.make(ID, run=str(tmp_path / "runs" / "9"))
    with pytest.raises(
        UserError, match=rf"is a model of text: expected one of series; {BYTES_ID} takes it"
    ):
        gymnasium.make(SERIES_ID, run=str(tiny_run))
    train(
        resolve([], series_settings | {"train": {"symbols": 256, "batch_size": 4}}),
        tmp_path / "checkpoints",
        print,
    )
    with pytest.raises(
        UserError, match=rf"is a model of series: expected one of text; {SERIES_ID} takes it"
    ):
        gymnasium.make(ID, run=str(tmp_path))
    env = gymnasium.make(SERIES_ID, run=str(tmp_path), seq_len=24, disable_env_checker=True)
    env.reset(seed=0)
    assert env.unwrapped.env.source.seq_len == 24
    assert np.isfinite(env.step(1)[1])


def test_code_that_a_run_names_needs_the_users_word(
    tiny_run: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    saved = tokenv.load(tiny_run).save_pretrained(tmp_path / "mine")
    state = json.loads((saved / "state.json").read_text())
    state["config"]["agent"] = {"name": "their_player:Theirs", "window": 2}
    (saved / "state.json").write_text(json.dumps(state))
    write_digests(saved, model_hub.SAVED)
    (tmp_path / "their_player.py").write_text(
        "from tokenv.agents.learned import Learned as Theirs\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="trust_code=their_player:Theirs"):
        TrainedModelBytesEnv(run=str(saved))
    env = TrainedModelBytesEnv(run=str(saved), trust_code="their_player:Theirs", seq_len=LENGTH)
    packed = io.BytesIO(pickle.dumps(env))
    assert_same_episodes(pickle.load(packed), env)  # the word was the user's, and goes along
    assert trust.granted() == []
