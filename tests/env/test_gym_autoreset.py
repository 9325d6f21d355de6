"""Vector environments in all of gymnasium's autoreset modes, compared with gymnasium's own vector environment."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from episodes import small_lm, symbols_of_row
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.testing import assert_allclose, assert_array_equal

from tokenv.data.corpus import TensorSource
from tokenv.env.gym import BytesEnv, BytesVectorEnv

LENGTH, ROWS = 7, 3
ACTIONS = np.random.default_rng(0).integers(0, 2, (3 * LENGTH, ROWS))


@pytest.fixture
def lm():
    return small_lm().double()


symbols = partial(symbols_of_row, LENGTH, ROWS)


@pytest.mark.parametrize("mode", ["SameStep", "NextStep"])
def test_going_on_is_what_gymnasium_makes_of_single_environments(lm, mode):
    ours = BytesVectorEnv(ROWS, lm, TensorSource(symbols()), autoreset_mode=mode)
    single = [lambda row=row: BytesEnv(lm, TensorSource(symbols(row))) for row in range(ROWS)]
    theirs = SyncVectorEnv(single, autoreset_mode=AutoresetMode(mode))
    assert ours.metadata["autoreset_mode"] == theirs.metadata["autoreset_mode"]
    first = ours.reset()[0]
    second = theirs.reset()[0]
    for actions in (None, *ACTIONS):
        if actions is not None:
            (first, *mine) = ours.step(actions)
            (second, *other) = theirs.step(actions)
            for a, b in zip(mine[:3], other[:3], strict=True):
                assert_allclose(a, b, rtol=1e-6, atol=1e-9)
            assert_array_equal(mine[3]["position"], other[3]["position"])
            assert ("final_obs" in mine[3]) == ("final_obs" in other[3])
        for name in first:
            assert_allclose(first[name], second[name], rtol=1e-5, atol=1e-6)


def test_disabled_waits_for_a_reset_of_all_or_some(lm):
    envs = BytesVectorEnv(ROWS, lm, TensorSource(symbols()), autoreset_mode=AutoresetMode.DISABLED)
    with pytest.raises(ResetNeeded):
        envs.reset(options={"reset_mask": np.array([True, False, False])})
    envs.reset()
    for actions in ACTIONS[:2]:
        before, *_ = envs.step(actions)
    some = np.array([False, True, False])
    now, info = envs.reset(options={"reset_mask": some})
    assert info["position"].tolist() == [2, 0, 2]
    for name in now:
        assert_array_equal(now[name][~some], before[name][~some])
    assert not now["last_actions"][1].any()
    single = BytesEnv(lm, TensorSource(symbols()[3:]))  # the fourth sequence is what row 1 begins
    alone, _ = single.reset()
    for actions in ACTIONS[: LENGTH - 3]:
        together, reward, terminated, _, info = envs.step(actions)
        alone, own, *_ = single.step(actions[1])
        assert_allclose(together["encoding"][1], alone["encoding"], rtol=1e-5, atol=1e-6)
        assert_allclose(reward[1], own, rtol=1e-6)
    assert terminated.tolist() == [True, False, True]
    with pytest.raises(ResetNeeded):
        envs.step(ACTIONS[0])
    envs.reset(options={"reset_mask": terminated})
    assert envs.step(ACTIONS[0])[4]["position"].tolist() == [1, LENGTH - 2, 1]


@pytest.mark.parametrize(
    "mask", [[True] * ROWS, np.zeros(ROWS, bool), np.ones(ROWS + 1, bool), np.ones(ROWS, int)]
)
def test_what_is_no_mask_is_refused(lm, mask):
    envs = BytesVectorEnv(ROWS, lm, TensorSource(symbols()))
    envs.reset()
    with pytest.raises(
        ValueError, match=r"reset_mask = .*: expected a bool array of 3 with at least one True"
    ):
        envs.reset(options={"reset_mask": mask})


def test_what_is_no_mode_is_refused(lm):
    with pytest.raises(
        ValueError, match=r"autoreset_mode = 'never': expected one of NextStep, SameStep, Disabled"
    ):
        BytesVectorEnv(ROWS, lm, TensorSource(symbols()), autoreset_mode="never")


def test_gymnasiums_wrappers_of_vectors_follow(lm):
    """Wrappers of observations accept no other mode."""
    envs = gymnasium.make_vec(
        "tokenv.env:tokenv/Bytes-v0",
        num_envs=ROWS,
        lm=lm,
        source=TensorSource(symbols()),
        autoreset_mode="NextStep",
    )
    flat = gymnasium.wrappers.vector.FlattenObservation(envs)
    normal = gymnasium.wrappers.vector.NormalizeObservation(flat)
    observation, _ = normal.reset()
    for actions in ACTIONS:
        observation, *_ = normal.step(actions)
    assert observation.shape == (ROWS, 16 + 8)
    assert np.isfinite(observation).all()
    assert normal.obs_rms.count > len(ACTIONS)
