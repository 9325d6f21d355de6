"""The same environment as gymnasium, for everything that speaks gymnasium and not TorchRL.

Importing this module registers it::

    import gymnasium, tokenv.env.gym

    env = gymnasium.make("tokenv/Bytes-v0")  # one sequence at a time
    envs = gymnasium.make_vec("tokenv/Bytes-v0", num_envs=16)  # 16 sequences in every pass of one model

``gymnasium.make("tokenv.env.gym:tokenv/Bytes-v0")`` imports it by itself. Both take the arguments of ``BytesEnv``.
``tokenv/Series-v0`` is the same with a model and a source of real-valued series as defaults.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase

from tokenv import keys
from tokenv.data.config import DataConfig
from tokenv.data.corpus import Corpus, load_corpus
from tokenv.data.source import Source
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.codecs.series import SeriesCodec
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

BYTES_ID = "tokenv/Bytes-v0"
SERIES_ID = "tokenv/Series-v0"

Array: TypeAlias = np.ndarray[Any, Any]
Observation: TypeAlias = dict[str, Array]
SourceOrOpener: TypeAlias = Source | Callable[[int], Source]


_SIZE = UNetConfig(width=32, heads=2, down_layers=1, mid_layers=1, up_layers=1)


def default_lm() -> UNet:
    """A small untrained model, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return UNet(_SIZE)


def default_series_lm() -> UNet:
    """A small untrained model of univariate series with Student-t densities, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return UNet(_SIZE, SeriesCodec(_SIZE.width))


@functools.cache
def _python_corpus() -> Corpus:
    return load_corpus(DataConfig(source="python", seq_len=128))


def default_source(seed: int) -> Source:
    """Training sequences of 128 bytes from the built-in ``python`` corpus, in the order of ``seed``."""
    return _python_corpus().train(seed=seed)


@functools.cache
def _regimes_corpus() -> Corpus:
    return load_corpus(DataConfig(kind="series", source="regimes", seq_len=128, validation=0.1))


def default_series_source(seed: int) -> Source:
    """Training windows of 128 steps of the synthetic ``regimes`` series, in the order of ``seed``."""
    return _regimes_corpus().train(seed=seed)


class _Sequences:
    """What both faces share: a TokenizationEnv, its seeds, its spaces, and the translation into arrays."""

    def __init__(self, lm: UNet, given: SourceOrOpener, batch_size: int, window: int) -> None:
        self.open: Callable[[int], Source] | None = None
        if callable(given):
            self.open = given
            given = given(int(np.random.default_rng().integers(2**31)))
        self.env = TokenizationEnv(lm, given, batch_size, window=window)
        observed: dict[str, spaces.Space[Any]] = {
            keys.ENCODING: spaces.Box(-np.inf, np.inf, (self.env.lm.config.width,), np.float32)
        }
        if window:  # gymnasium has no empty MultiBinary
            observed[keys.LAST_ACTIONS] = spaces.MultiBinary(window)
        self.observation_space = spaces.Dict(observed)
        self.action_space = spaces.Discrete(2)

    def reset(self, seed: int | None) -> TensorDictBase:
        if seed is not None and self.open is not None:
            self.env.source = self.open(seed)
        return self.env.reset()

    def act(self, root: TensorDictBase, action: Any, space: spaces.Space[Any]) -> TensorDictBase:
        """Put an action from outside into the TensorDict that is to be stepped."""
        if not space.contains(action):
            raise ValueError(f"action = {action!r}: expected 0 or 1 for each sequence, an element of {space}")
        action_B = torch.as_tensor(action, dtype=torch.int64, device=self.env.device)
        return root.set(keys.ACTION, action_B.reshape(self.env.batch_size))

    def observation(self, tensordict: TensorDictBase) -> Observation:
        """Arrays [B, ..] of the observation space's keys and dtypes."""
        return {
            key: tensordict[key].float().cpu().numpy().astype(space.dtype)
            for key, space in self.observation_space.items()
        }


class BytesEnv(gymnasium.Env[Any, np.int64]):
    """A sequence whose token boundaries are the actions: ``TokenizationEnv`` with one row.

    Observation: a dict of ``encoding`` X_i, float32 [D], and ``last_actions`` a_{i-1}, ..., a_{i-w}, int8 [w] (left
    out where w = 0). Action: 1 where symbol i ends a token, else 0; at the first symbol it counts as 1 whatever it
    is. Reward: ``log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)`` in nats. An episode terminates with
    its sequence, after seq_len - 1 steps, and is never truncated. ``info`` holds ``position`` i and ``origin``.

    Args:
        lm: the model; by default ``default_lm()``, small and untrained.
        source: where sequences come from; or a function from a seed to that, which ``reset(seed=...)`` then calls,
            such as ``lambda seed: corpus.train(seed=seed)``. By default ``default_source``.
        window: earlier actions w in the observation.

    Raises:
        ValueError: a negative ``window``.
    """

    metadata: dict[str, Any] = {"render_modes": []}
    default_lm = staticmethod(default_lm)
    default_source = staticmethod(default_source)

    def __init__(self, lm: UNet | None = None, source: SourceOrOpener | None = None, window: int = 8) -> None:
        self._sequences = _Sequences(lm or self.default_lm(), source or self.default_source, 1, window)
        self.env = self._sequences.env
        self.observation_space = self._sequences.observation_space
        self.action_space = self._sequences.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the next sequence.

        Args:
            seed: opens the source anew where the environment was given a function of the seed or nothing; a source
                that was given as such goes on as it is, and decides alone what comes next.
            options: unused.

        Returns:
            The observation at the first symbol, and ``info``.
        """
        super().reset(seed=seed)
        self._root = self._sequences.reset(seed)
        return self._observe(self._root)

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Close a token, or not, and read the next symbol.

        Args:
            action: 0 or 1.

        Returns:
            Observation at the next symbol, reward in nats, whether the sequence ended, False, and ``info``.

        Raises:
            ValueError: the action is neither 0 nor 1.
        """
        self._root = self.env.step(self._sequences.act(self._root, action, self.action_space))["next"]
        observation, info = self._observe(self._root)
        return observation, self._root["reward"].item(), self._root["terminated"].item(), False, info

    def _observe(self, tensordict: TensorDictBase) -> tuple[Observation, dict[str, Any]]:
        observation_B = self._sequences.observation(tensordict)
        info = {"position": tensordict[keys.POSITION].item(), "origin": self.env.origin[0]}
        return {key: x_B[0] for key, x_B in observation_B.items()}, info


class BytesVectorEnv(VectorEnv[Any, Array, Array]):
    """B sequences whose token boundaries are the actions: ``TokenizationEnv``, one model pass for all rows.

    Observation, action and reward are those of ``BytesEnv`` with a leading B. Where sequences end, the same step
    starts new ones (``AutoresetMode.SAME_STEP``): it returns their first observation, and the last one of the old
    as ``info["final_obs"]``, with ``info["final_info"]``.

    Args:
        num_envs: sequences B.
        lm: as for ``BytesEnv``.
        source: as for ``BytesEnv``; all rows draw from this one.
        window: as for ``BytesEnv``.

    Raises:
        ValueError: ``num_envs`` below 1 or a negative ``window``.
    """

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}
    default_lm = staticmethod(default_lm)
    default_source = staticmethod(default_source)

    def __init__(
        self,
        num_envs: int = 1,
        lm: UNet | None = None,
        source: SourceOrOpener | None = None,
        window: int = 8,
    ) -> None:
        self._sequences = _Sequences(lm or self.default_lm(), source or self.default_source, num_envs, window)
        self.env = self._sequences.env
        self.num_envs = num_envs
        self.single_observation_space = self._sequences.observation_space
        self.single_action_space = self._sequences.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the next B sequences.

        Args:
            seed: as for ``BytesEnv.reset``; one seed for all rows.
            options: unused.

        Returns:
            Observations at the first symbols [B, ..], and ``info``.
        """
        super().reset(seed=seed)
        self._root = self._sequences.reset(seed)
        infos: dict[str, Any] = {}
        for row, info in enumerate(self._infos(self._root, self.env.origin)):
            infos = self._add_info(infos, info, row)
        return self._sequences.observation(self._root), infos

    def step(self, actions: Array) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """Close a token, or not, in each row and read the next symbols.

        Args:
            actions: 0 or 1, [B].

        Returns:
            Observations [B, ..], rewards in nats, float64 [B], which sequences ended, bool [B], False [B], ``info``.

        Raises:
            ValueError: the actions are not B numbers 0 or 1.
        """
        origin = list(self.env.origin)  # of the sequences that this step may end
        stepped, self._root = self.env.step_and_maybe_reset(self._sequences.act(self._root, actions, self.action_space))
        following = stepped["next"]
        terminated = following["terminated"].squeeze(-1).cpu().numpy()
        infos: dict[str, Any] = {}
        for row, info in enumerate(self._infos(self._root, self.env.origin)):
            infos = self._add_info(infos, info, row)
        if terminated.any():
            final_B, last = self._sequences.observation(following), self._infos(following, origin)
            for row in terminated.nonzero()[0]:
                final_obs = {key: x_B[row] for key, x_B in final_B.items()}
                infos = self._add_info(infos, {"final_obs": final_obs, "final_info": last[row]}, row)
        reward = following["reward"].squeeze(-1).double().cpu().numpy()
        return self._sequences.observation(self._root), reward, terminated, np.zeros_like(terminated), infos

    @staticmethod
    def _infos(tensordict: TensorDictBase, origin: list[str]) -> list[dict[str, Any]]:
        positions = tensordict[keys.POSITION].tolist()
        return [{"position": i, "origin": name} for i, name in zip(positions, origin, strict=True)]


class SeriesEnv(BytesEnv):
    """A series whose patch boundaries are the actions: ``BytesEnv`` with other defaults.

    Rewards are 0 in a sequence's context and where a value is missing. A model needs
    ``tokenv.lm.codecs.series.SeriesCodec`` and a source its symbols.
    """

    default_lm = staticmethod(default_series_lm)
    default_source = staticmethod(default_series_source)


class SeriesVectorEnv(BytesVectorEnv):
    """B series whose patch boundaries are the actions: ``BytesVectorEnv`` with the defaults of ``SeriesEnv``."""

    default_lm = staticmethod(default_series_lm)
    default_source = staticmethod(default_series_source)


def register() -> None:
    """Make the ids known to gymnasium; importing this module does it. A second call does nothing."""
    for name, kind in ((BYTES_ID, "Bytes"), (SERIES_ID, "Series")):
        if name not in gymnasium.registry:
            gymnasium.register(
                id=name,
                entry_point=f"tokenv.env.gym:{kind}Env",
                vector_entry_point=f"tokenv.env.gym:{kind}VectorEnv",
            )


register()
