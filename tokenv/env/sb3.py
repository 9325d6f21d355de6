"""Many sequences for stable-baselines3, whose algorithms then see every pass of the model as one step of all rows.

::

    envs = SB3VecEnv(gymnasium.make_vec("tokenv.env:tokenv/Bytes-v0", num_envs=16, autoreset_mode="SameStep"))
    stable_baselines3.PPO("MultiInputPolicy", envs).learn(10_000)

Needs ``pip install tokenv[sb3]``. ``VecMonitor(envs)`` counts rewards by episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise ImportError("tokenv.env.sb3 speaks to stable-baselines3: pip install tokenv[sb3]") from error

VECTORISED_METHODS = ("action_masks", "render")  # what a vector environment answers with one answer a row


class SB3VecEnv(VecEnv):
    """A vector environment of gymnasium's as one of stable-baselines3's, with the behaviour of its ``DummyVecEnv``.

    A row that has ended begins anew in the same step: ``infos[row]`` is of the old sequence, with
    ``terminal_observation`` and ``TimeLimit.truncated``, ``reset_infos[row]`` of the new one. Rewards are float32.
    The rows are one environment: its attributes are every row's, and are set for all rows together.

    Args:
        envs: such as ``BytesVectorEnv``, also in wrappers, made with ``autoreset_mode="SameStep"``.

    Raises:
        ValueError: it was made with another mode.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"autoreset_mode = {mode}: expected {AutoresetMode.SAME_STEP}, as stable-baselines3 resets rows: "
                'gymnasium.make_vec(..., autoreset_mode="SameStep")'
            )
        self.envs = DictInfoToList(envs)
        self.spec = envs.spec
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        """Start new sequences with the seeds and options of ``seed`` and ``set_options``, which hold for this once.

        Raises:
            ValueError: the options are not the same for all rows.
        """
        if any(options != self._options[0] for options in self._options):
            raise ValueError(f"options = {self._options}: expected the same for all rows, which are one environment")
        seeds = None if None in self._seeds else self._seeds
        observation, self.reset_infos = self.envs.reset(seed=seeds, options=self._options[0] or None)
        self._reset_seeds()
        self._reset_options()
        return observation

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        """Take the actions, [B], for the next ``step_wait``."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Step all rows.

        Returns:
            Observations [B, ..], rewards float32 [B], which rows have ended, bool [B], and B infos.
        """
        observation, reward, terminated, truncated, infos = self.envs.step(self._actions)
        done = terminated | truncated
        for row, info in enumerate(infos):
            last, final = info.pop("final_obs", None), info.pop("final_info", {})
            if done[row]:
                self.reset_infos[row] = dict(info)
                info |= final | {"terminal_observation": last}
            info["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
        return observation, reward.astype(np.float32), done, infos

    def close(self) -> None:
        """Close the environment."""
        self.envs.close()

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """A picture of each row, where ``render_mode`` is ``rgb_array``."""
        return self.env_method("render")

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of the environment, once for each row asked for.

        Raises:
            AttributeError: it has none of this name.
        """
        value = getattr(self.envs.unwrapped, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the environment.

        Raises:
            ValueError: not all rows are meant.
        """
        if set(self._get_indices(indices)) != set(range(self.num_envs)):
            raise ValueError(f"indices = {indices!r}: expected None, for all rows are one environment")
        setattr(self.envs.unwrapped, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """What a method answers for each row asked for.

        Raises:
            AttributeError: it is none of ``action_masks`` and ``render``, which answer for all rows.
        """
        if method_name not in VECTORISED_METHODS:
            raise AttributeError(
                f"method {method_name!r}: expected one of {', '.join(VECTORISED_METHODS)}, of one row each"
            )
        answers = getattr(self.envs.unwrapped, method_name)(*method_args, **method_kwargs)
        return [answers[row] for row in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Whether a wrapper of gymnasium's vector environments is around this one, for each row asked for."""
        env, found = self.envs.env, False
        while isinstance(env, VectorWrapper):
            env, found = env.env, found or isinstance(env, wrapper_class)
        return [found for _ in self._get_indices(indices)]
