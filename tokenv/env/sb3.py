"""A vector environment for stable-baselines3, in which one pass of the model is one step of all rows.

::

    envs = SB3VecEnv(gymnasium.make_vec("tokenv.env:tokenv/Bytes-v0", num_envs=16, autoreset_mode="SameStep"))
    stable_baselines3.PPO("MultiInputPolicy", envs).learn(10_000)

Needs ``pip install tokenv[sb3]``. ``VecMonitor(envs)`` counts rewards by episode.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import DictInfoToList

try:
    from stable_baselines3.common.vec_env import VecEnv
except ImportError as error:
    raise ImportError(
        "tokenv.env.sb3 requires stable-baselines3: pip install tokenv[sb3]"
    ) from error

# methods of a vector environment which return one value for each row
VECTORISED_METHODS = ("action_masks", "render")


class SB3VecEnv(VecEnv):
    """A vector environment of gymnasium's as one of stable-baselines3's, with the behaviour of its ``DummyVecEnv``.

    A row which has ended starts anew in the same step: ``infos[row]`` is of the old sequence, with
    ``terminal_observation`` and ``TimeLimit.truncated``, ``reset_infos[row]`` of the new one. Rewards are float32.
    All rows are one environment: they share its attributes, which are set for all rows together.

    Args:
        envs: vector environment such as ``BytesVectorEnv``, also in wrappers, with ``autoreset_mode="SameStep"``.

    Raises:
        ValueError: it has another mode.
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
        """Start new sequences with the seeds and options of ``seed`` and ``set_options``, which are used only once.

        Raises:
            ValueError: the options are not the same for all rows.
        """
        if any(options != self._options[0] for options in self._options):
            raise ValueError(
                f"options = {self._options}: expected the same for all rows, which are one environment"
            )
        if None in self._seeds:
            seeds = None
        else:
            seeds = self._seeds
        observation, self.reset_infos = self.envs.reset(
            seed=seeds, options=self._options[0] or None
        )
        self._reset_seeds()
        self._reset_options()
        return observation

    def step_async(self, actions: np.ndarray[Any, Any]) -> None:
        """Store the actions, [B], for the next ``step_wait``."""
        self._actions = actions

    def step_wait(
        self,
    ) -> tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any], list[dict[str, Any]]]:
        """Step all rows.

        Returns:
            Observations [B, ..], rewards float32 [B], which rows have ended, bool [B], and B infos.
        """
        observation, reward, terminated, truncated, infos = self.envs.step(self._actions)
        done = terminated | truncated
        for row, info in enumerate(infos):
            last = info.pop("final_obs", None)
            final = info.pop("final_info", {})
            if done[row]:
                self.reset_infos[row] = dict(info)
                info |= final | {"terminal_observation": last}
            info["TimeLimit.truncated"] = bool(truncated[row] and not terminated[row])
        return observation, reward.astype(np.float32), done, infos

    def close(self) -> None:
        """Close the environment."""
        self.envs.close()

    def get_images(self) -> Sequence[np.ndarray[Any, Any] | None]:
        """Render a picture of each row, if ``render_mode`` is ``rgb_array``."""
        return self.env_method("render")

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Return an attribute of the environment, once for each requested row.

        Raises:
            AttributeError: the environment has no attribute of this name.
        """
        value = getattr(self.envs.unwrapped, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of the environment.

        Raises:
            ValueError: ``indices`` are not all rows.
        """
        if set(self._get_indices(indices)) != set(range(self.num_envs)):
            raise ValueError(
                f"indices = {indices!r}: expected None, for all rows are one environment"
            )
        setattr(self.envs.unwrapped, attr_name, value)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: Any = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method, and return its value for each requested row.

        Raises:
            AttributeError: the method is neither ``action_masks`` nor ``render``, which return a value for each row.
        """
        if method_name not in VECTORISED_METHODS:
            raise AttributeError(
                f"method {method_name!r}: expected one of {', '.join(VECTORISED_METHODS)}, which return a value per row"
            )
        values = getattr(self.envs.unwrapped, method_name)(*method_args, **method_kwargs)
        return [values[row] for row in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        """Return for each requested row whether the environment has this gymnasium vector wrapper."""
        env = self.envs.env
        is_wrapped = False
        while isinstance(env, VectorWrapper):
            env, is_wrapped = env.env, is_wrapped or isinstance(env, wrapper_class)
        return [is_wrapped for _ in self._get_indices(indices)]
