"""Measure the steps per second of stable-baselines3's PPO: one sequence at a time, and many rows at once.

python examples/sb3_steps.py [STEPS]     (needs tokenv[sb3])
"""

import sys
import time

import gymnasium
from stable_baselines3 import PPO

import tokenv.env  # noqa: F401  (names the environments)
from tokenv.env.sb3 import SB3VecEnv

ROWS, STEPS_OF_AN_UPDATE = 16, 512


def steps_a_second(env: gymnasium.Env | SB3VecEnv, rows: int, steps: int) -> float:
    """Return steps per second of collecting and learning, after a first update."""
    model = PPO("MultiInputPolicy", env, n_steps=STEPS_OF_AN_UPDATE // rows, n_epochs=2, seed=0)
    model.learn(STEPS_OF_AN_UPDATE)
    start, before = time.perf_counter(), model.num_timesteps
    model.learn(steps, reset_num_timesteps=False)
    return (model.num_timesteps - before) / (time.perf_counter() - start)


def main(steps: int = 4096) -> None:
    """Print the speed of both environments."""
    one = steps_a_second(gymnasium.make("tokenv/Bytes-v0"), 1, steps)
    envs = gymnasium.make_vec("tokenv/Bytes-v0", num_envs=ROWS, autoreset_mode="SameStep")
    many = steps_a_second(SB3VecEnv(envs), ROWS, steps)
    print(
        f"one sequence: {one:.0f} steps a second; {ROWS} rows: {many:.0f}, {many / one:.1f} times as many"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
