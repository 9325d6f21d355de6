"""Clients of gymnasium: registration, seeds, unusual arrays, rendering, misuse."""

import os
import pickle
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from episodes import seeded_source, small_lm
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import RecordVideo, RenderCollection

from tokenv.core import keys
from tokenv.data.config import DataConfig
from tokenv.data.corpus import CorpusFactory, TensorSource
from tokenv.env import BYTES_ID, SERIES_ID
from tokenv.env.arrays import as_image, as_text
from tokenv.env.gym import BytesEnv, BytesVectorEnv
from tokenv.env.stepping import TokenizationEnv
from tokenv.series.series_env import SeriesEnv, SeriesVectorEnv

ROOT = Path(__file__).parents[2]
LENGTH = 9


@pytest.fixture
def lm():
    return small_lm()


@pytest.fixture
def symbol_BN():
    return torch.randint(256, (6, LENGTH))


seeded = partial(seeded_source, LENGTH)


# --- finding it ---


@pytest.mark.parametrize(
    "program", ["import tokenv.env", "gymnasium.make_vec and __import__('tokenv.env')"]
)
def test_registering_loads_nothing_heavy(program):
    code = f"import sys, gymnasium; {program}; assert {BYTES_ID!r} in gymnasium.registry; "
    code += "assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_an_id_names_its_module(lm, symbol_BN):
    env = gymnasium.make(f"tokenv.env:{BYTES_ID}", lm=lm, source=TensorSource(symbol_BN))
    env.reset()
    assert env.unwrapped.origin == "sequence 0"


# --- seeds reach the data ---


def text_of(env):
    return env.reset()[keys.SYMBOL].clone(), env._symbol_BN.clone()


def test_a_seed_opens_the_source(lm):
    env = TokenizationEnv(lm, seeded, 2)
    for seed in (3, 4, 3):
        env.set_seed(seed)
        assert torch.equal(text_of(env)[1], seeded(seed).symbol_BN[:2])
        assert torch.equal(text_of(env)[1], seeded(seed).symbol_BN[2:4])  # and goes on


def test_a_source_that_is_given_goes_on_whatever_the_seed(lm, symbol_BN):
    """As in training, where every step seeds the noise."""
    env = TokenizationEnv(lm, TensorSource(symbol_BN), 2)
    env.set_seed(3)
    text_of(env)
    env.set_seed(3)
    assert torch.equal(text_of(env)[1], symbol_BN[2:4])


def test_without_a_seed_every_environment_reads_something_else(lm):
    first, second = (text_of(TokenizationEnv(lm, seeded, 2))[1] for _ in range(2))
    assert not torch.equal(first, second)


def test_sources_of_two_lengths_are_refused(lm):
    env = TokenizationEnv(
        lm, lambda seed: TensorSource(torch.zeros(2, 5 + seed % 2, dtype=torch.long)), 1
    )
    other = 2 if env.source.seq_len == 6 else 1
    with pytest.raises(ValueError, match="a source of"):
        env.set_seed(other)


OPENER = CorpusFactory(
    DataConfig(source="words", seq_len=LENGTH, words_documents=20, lexicon_size=20, validation=0.1)
)


def make_env():
    torch.manual_seed(0)
    lm = small_lm()
    return TokenizationEnv(lm, OPENER, 2)


def test_an_opener_is_small_and_reads_once(monkeypatch):
    opener = pickle.loads(pickle.dumps(OPENER))
    assert len(pickle.dumps(OPENER)) < 2000
    first = opener(3).next(4)
    monkeypatch.setattr("tokenv.data.corpus._read_corpus", lambda *_: pytest.fail("read again"))
    assert torch.equal(OPENER(3).next(4).symbol_BN, first.symbol_BN)
    assert not torch.equal(OPENER(4).next(4).symbol_BN, first.symbol_BN)


def assert_workers_read_different_text(make):
    from torchrl.envs import EnvBase

    env: EnvBase = make()
    try:
        texts = []
        for seed in (5, 5, 6):
            env.set_seed(seed)
            td = env.rollout(LENGTH - 1, break_when_any_done=False)
            texts.append(
                td[keys.SYMBOL].flatten(0, -2) if td[keys.SYMBOL].ndim > 2 else td[keys.SYMBOL]
            )
            first, second = td[keys.SYMBOL]  # of two workers
            assert not torch.equal(first, second)
        assert torch.equal(texts[0], texts[1])
        assert not torch.equal(texts[0], texts[2])
    finally:
        env.close()


torchrls_own = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)


@torchrls_own
def test_workers_of_a_serial_env_read_different_text():
    from torchrl.envs import SerialEnv

    assert_workers_read_different_text(lambda: SerialEnv(2, make_env))


@pytest.mark.slow
@torchrls_own
def test_workers_of_a_parallel_env_read_different_text():
    from torchrl.envs import ParallelEnv

    assert_workers_read_different_text(lambda: ParallelEnv(2, make_env))


@pytest.mark.slow
@torchrls_own
def test_workers_of_a_collector_read_different_text():
    from torchrl.collectors import MultiSyncCollector

    frames = 2 * 2 * (LENGTH - 1)
    collector = MultiSyncCollector(
        [make_env, make_env], None, frames_per_batch=frames, total_frames=frames
    )
    try:
        collector.set_seed(5)
        (td,) = [td.clone() for td in collector]
    finally:
        collector.shutdown()
    symbol = td[keys.SYMBOL].reshape(2, -1)
    assert not torch.equal(symbol[0], symbol[1])


def test_several_seeds_make_one(lm):
    envs = BytesVectorEnv(3, lm, seeded)
    first, again, other = (
        envs.reset(seed=seeds)[0]["encoding"] for seeds in ([1, 2, 3], [1, 2, 3], [1, 2, 4])
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(
        envs.reset(seed=7)[0]["encoding"], envs.reset(seed=np.int64(7))[0]["encoding"]
    )
    envs.reset(seed=[None, None, None])


# --- actions ---


@pytest.mark.parametrize(
    "action", [1, np.int64(1), np.array(1), np.array([1]), np.array([[1]]), torch.tensor([1]), [1]]
)
def test_one_action_comes_in_many_shapes(action, lm, symbol_BN):
    env, plain = (BytesEnv(lm, TensorSource(symbol_BN)) for _ in range(2))
    for each in (env, plain):
        each.reset()
        each.step(1)
    assert env.step(action)[1] == plain.step(1)[1]


@pytest.mark.parametrize(
    "action", [2, -1, 0.5, np.array([0, 1]), np.array([2]), "1", None, [], True]
)
def test_what_is_no_action_is_refused(action, lm, symbol_BN):
    env = BytesEnv(lm, TensorSource(symbol_BN))
    env.reset()
    with pytest.raises(ValueError, match="expected 0 or 1 for each sequence"):
        env.step(action)


def test_a_step_before_the_reset_or_after_the_end_is_one_message(lm, symbol_BN):
    env = BytesEnv(lm, TensorSource(symbol_BN))
    for ask in (lambda: env.step(1), env.action_masks):
        with pytest.raises(ResetNeeded, match=r"expected reset\(\) before"):
            ask()
    with pytest.raises(ResetNeeded, match=r"expected reset\(\) before"):
        BytesVectorEnv(2, lm, TensorSource(symbol_BN)).step(np.array([1, 1]))
    env.reset()
    while not env.step(1)[2]:
        pass
    for _ in range(2):
        with pytest.raises(ResetNeeded, match="the sequence has ended"):
            env.step(1)
    env.reset()
    env.step(1)
    stepped = TokenizationEnv(lm, TensorSource(symbol_BN), 1)
    td = stepped.rollout(LENGTH - 1)[:, -1]["next"]
    with pytest.raises(ValueError, match="a sequence has ended: expected a reset"):
        stepped.step(td.set(keys.ACTION, torch.tensor([1])))


def test_masks_say_where_an_action_has_an_effect(lm, symbol_BN):
    env = BytesEnv(lm, TensorSource(symbol_BN))
    env.reset()
    assert env.action_masks().tolist() == [False, True]
    rewards = []
    for action in (0, 1):  # at the first symbol both are 1
        other = BytesEnv(lm, TensorSource(symbol_BN))
        other.reset()
        rewards.append(other.step(action)[1])
    assert rewards[0] == rewards[1]
    env.step(1)
    assert env.action_masks().tolist() == [True, True]
    envs = BytesVectorEnv(3, lm, TensorSource(symbol_BN))
    envs.reset()
    assert envs.action_masks().tolist() == [[False, True]] * 3
    assert gymnasium.make(BYTES_ID, lm=lm, source=seeded).get_wrapper_attr("action_masks")


# --- looking at it ---


def test_the_text_so_far_is_shown(lm):
    text = b"a fox\n\xc3\xa4\xff"
    env = gymnasium.make(
        BYTES_ID,
        lm=lm,
        source=TensorSource(torch.tensor([list(text)])),
        render_mode="ansi",
        disable_env_checker=True,
    )
    env.reset()
    assert env.render() == "a"
    shown = [env.step(action) and env.render() for action in (0, 1, 0, 0, 1, 0, 0, 0)]
    assert shown[0] == "a│ "
    assert shown[1] == "a│ │f"
    assert shown[4] == "a│ │fox│\\n"
    assert shown[-1] == "a│ │fox│\\nä\\xff"


def test_pictures_are_all_of_one_size(lm, symbol_BN):
    env = RenderCollection(
        gymnasium.make(BYTES_ID, lm=lm, source=TensorSource(symbol_BN), render_mode="rgb_array"),
        pop_frames=False,
    )
    env.reset()
    while not env.step(1)[2]:
        pass
    frames = env.render()
    assert len(frames) == LENGTH
    assert {frame.shape for frame in frames} == {frames[0].shape}
    assert frames[0].dtype == np.uint8
    assert all(not np.array_equal(one, other) for one, other in pairwise(frames))


def test_gymnasium_records_a_video(lm, symbol_BN, tmp_path):
    pytest.importorskip("moviepy", reason="needs gymnasium[other]")
    env = gymnasium.make(BYTES_ID, lm=lm, source=TensorSource(symbol_BN), render_mode="rgb_array")
    env = RecordVideo(env, str(tmp_path / "videos"))
    env.reset()
    while not env.step(1)[2]:
        pass
    env.close()
    (video,) = (tmp_path / "videos").glob("*.mp4")
    assert video.stat().st_size > 1000


def test_rows_are_shown_one_by_one(lm, symbol_BN):
    source = TensorSource(torch.full((4, LENGTH), ord("x")))
    envs = BytesVectorEnv(2, lm, source, render_mode="ansi", autoreset_mode="SameStep")
    envs.reset()
    assert envs.render() == ("x", "x")
    envs.step(np.array([1, 1]))
    envs.step(np.array([0, 1]))
    assert envs.render() == ("x│xx", "x│x│x")
    for _ in range(LENGTH - 3):
        envs.step(np.array([1, 1]))
    assert envs.render() == ("x", "x")  # new sequences
    pictures = BytesVectorEnv(2, lm, TensorSource(symbol_BN), render_mode="rgb_array")
    pictures.reset()
    assert len(pictures.render()) == 2


def test_a_series_is_shown_by_its_heights():
    env = SeriesEnv(render_mode="ansi")
    env.reset(seed=0)
    for action in (1, 0, 1):
        env.step(action)
    shown = env.render()
    assert len(shown.replace("│", "")) == 4
    assert shown.count("│") == 2
    assert set(shown) <= set("│▁▂▃▄▅▆▇█")
    envs = SeriesVectorEnv(2, render_mode="rgb_array")
    envs.reset(seed=0)
    assert envs.render()[0].ndim == 3
    assert (
        gymnasium.make(SERIES_ID, render_mode="rgb_array", disable_env_checker=True).render_mode
        == "rgb_array"
    )


def test_boundaries_are_drawn_where_they_are():
    symbol_N = torch.tensor(list(b"abc"))
    assert as_text(symbol_N, [1, 0]) == "a│bc"
    with_one, without = (as_image(symbol_N, drawn, 100) for drawn in ([1, 0], [0, 0]))
    rows, columns = np.nonzero((with_one != without).any(-1))
    assert columns.min() > 8
    assert columns.max() < 8 + 2 * 10
    assert rows.max() < 8 + 20


def test_another_mode_is_refused(lm, symbol_BN):
    with pytest.raises(ValueError, match="render_mode = 'human': expected one of ansi, rgb_array"):
        BytesEnv(lm, TensorSource(symbol_BN), render_mode="human")
    env = BytesEnv(lm, TensorSource(symbol_BN))
    env.reset()
    with pytest.raises(ValueError, match="render_mode is None"):
        env.render()
