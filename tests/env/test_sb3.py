"""A library that knows nothing of tokenv trains on it."""

import gymnasium
import pytest
import stable_baselines3
import torch

import tokenv.env.gym


@pytest.mark.slow
def test_ppo_learns_without_any_change():
    env = gymnasium.make(tokenv.env.gym.BYTES_ID)
    ppo = stable_baselines3.PPO("MultiInputPolicy", env, n_steps=127, batch_size=127, n_epochs=2, seed=0, device="cpu")
    before = [p.detach().clone() for p in ppo.policy.parameters()]
    ppo.learn(total_timesteps=3 * 127)
    assert ppo.num_timesteps == 3 * 127
    assert any(not torch.equal(old, new) for old, new in zip(before, ppo.policy.parameters(), strict=True))
    assert all(p.isfinite().all() for p in ppo.policy.parameters())
    episodes = [episode["l"] for episode in ppo.ep_info_buffer]
    assert episodes == [127] * 3
    action, _ = ppo.predict(env.reset(seed=1)[0])
    assert action in env.action_space
