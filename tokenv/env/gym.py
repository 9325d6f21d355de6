"""The environment as gymnasium environments, for clients of gymnasium.

Importing ``tokenv.env`` registers their ids, and loads no model::

    import gymnasium, tokenv.env

    env = gymnasium.make("tokenv/Bytes-v0")  # one sequence at a time
    envs = gymnasium.make_vec("tokenv/Bytes-v0", num_envs=16)  # 16 sequences in every pass of one model

``gymnasium.make("tokenv.env:tokenv/Bytes-v0")`` imports the package, too. Both have the arguments of ``BytesEnv``, and
``run="runs/7"``: see ``tokenv.library.environments``. ``tokenv/Series-v0`` is the same with a model and a source of
real-valued series as defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDictBase

from tokenv.core import keys
from tokenv.core.sequences import SourceOrFactory
from tokenv.data.config import DataConfig
from tokenv.data.corpus import CorpusFactory
from tokenv.env import BYTES_ID, SERIES_ID, register
from tokenv.env.arrays import RENDER_MODES, Array, ArrayAdapter, Observation, PicklableEnv, ended
from tokenv.lm.codecs.base import ByteCodec, Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

__all__ = ["BYTES_ID", "SERIES_ID", "BytesEnv", "BytesVectorEnv", "register"]

_SIZE = UNetConfig(width=32, heads=2, down_layers=1, mid_layers=1, up_layers=1)


def untrained_lm(make_codec: Callable[[int], Codec]) -> UNet:
    """Build a small untrained model with fixed weights and the codec which ``make_codec`` builds from the width."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return UNet(_SIZE, make_codec(_SIZE.width))


# Training sequences of 128 bytes from the built-in ``python`` corpus.
default_source = CorpusFactory(DataConfig(source="python", seq_len=128))


def source_or(
    source: SourceOrFactory | None, default: CorpusFactory, seq_len: int | None
) -> SourceOrFactory:
    """Return the source; if it is None the default, with sequences of ``seq_len`` symbols unless that is None, too.

    Raises:
        ValueError: neither source nor ``seq_len`` is None.
    """
    if source is None:
        if seq_len is None:
            return default
        return CorpusFactory(replace(default.config, seq_len=seq_len))
    if seq_len is not None:
        raise ValueError(
            f"seq_len = {seq_len} beside a source, which has a length of its own: leave one of them out"
        )
    return source


class BytesEnv(PicklableEnv, gymnasium.Env[Any, np.int64]):
    """A sequence whose token boundaries are the actions: ``TokenizationEnv`` with one row.

    Observation: a dict of ``encoding`` X_i, float32 [D], and ``last_actions`` a_{i-1}, ..., a_{i-w}, 0 or 1, float32
    [w] (left out where w = 0). Action: 1 where symbol i ends a token, else 0; at the first symbol it counts as 1
    in any case. Reward: ``log p(x_{i+1} | x_<=i, a_<=i) - log p_early(x_{i+1} | x_<=i)`` in nats. An episode
    terminates with its sequence, after seq_len - 1 steps, and is never truncated. ``info`` holds ``position`` i, a
    number, as TorchRL requires; the origin of the sequence, such as a file name, is the attribute ``origin``.

    Args:
        lm: model; by default a small untrained one with fixed weights.
        source: source of sequences; or a function from a seed to a source, which ``reset(seed=...)`` then calls, such
            as ``lambda seed: corpus.train(seed=seed)``. By default ``default_source``.
        window: earlier actions w in the observation.
        render_mode: ``ansi``, the text so far with its boundaries, or ``rgb_array``, a picture of it.
        seq_len: symbols of a sequence, if ``source`` is None; 128 by default.

    Raises:
        ValueError: a negative ``window``, an unknown ``render_mode``, or both a ``source`` and ``seq_len``.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 8}
    make_codec: Callable[[int], Codec] = ByteCodec
    default_source = default_source

    def __init__(
        self,
        lm: UNet | None = None,
        source: SourceOrFactory | None = None,
        window: int = 8,
        render_mode: str | None = None,
        seq_len: int | None = None,
    ) -> None:
        PicklableEnv.__init__(self, lm, source, window, render_mode, seq_len)
        source = source_or(source, self.default_source, seq_len)
        self._adapter = ArrayAdapter(
            lm or untrained_lm(self.make_codec),
            source,
            1,
            window,
            render_mode,
        )
        self.env = self._adapter.env
        self.render_mode = render_mode
        self._root: TensorDictBase | None = None
        self.observation_space = self._adapter.observation_space
        self.action_space = self._adapter.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the next sequence.

        Args:
            seed: seed with which the source is opened, if ``source`` is a function of the seed or the default; it has
                no effect on a source which was passed itself.
            options: unused.

        Returns:
            The observation at the first symbol, and ``info``.
        """
        super().reset(seed=seed)
        self._root = self._adapter.reset(seed)
        return self._observe(self._root)

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """End a token, or not, and read the next symbol.

        Args:
            action: 0 or 1; also as an array of one.

        Returns:
            Observation at the next symbol, reward in nats, whether the sequence ended, False, and ``info``.

        Raises:
            ResetNeeded: the sequence has ended, or ``reset`` was never called.
            ValueError: the action is neither 0 nor 1.
        """
        acted = self._adapter.act(self._root, action, self.action_space)
        self._root = self.env.step(acted)["next"]
        observation, info = self._observe(self._root)
        reward = self._root["reward"].item()
        terminated = self._root["terminated"].item()
        return observation, reward, terminated, False, info

    @property
    def origin(self) -> str:
        """Origin of the sequence, such as a file name."""
        return self.env.origin[0]

    def action_masks(self) -> Array:
        """Return which actions are available, bool [2]: at the first symbol, which always ends a token, only 1."""
        masks: Array = self._adapter.masks(self._root)[0]
        return masks

    def render(self) -> Any:
        """Render the text so far with its boundaries: str, or uint8 [height, width, 3]."""
        return self._adapter.render()[0]

    def _observe(self, tensordict: TensorDictBase) -> tuple[Observation, dict[str, Any]]:
        observation_B = self._adapter.observation(tensordict)
        observation = {key: x_B[0] for key, x_B in observation_B.items()}
        return observation, {"position": tensordict[keys.POSITION].item()}


class BytesVectorEnv(PicklableEnv, VectorEnv[Any, Array, Array]):
    """B sequences whose token boundaries are the actions: ``TokenizationEnv``, one model pass for all rows.

    Observation, action and reward are those of ``BytesEnv`` with a leading B. All rows have the same length, so without
    partial resets they end together. How new ones are started is gymnasium's ``AutoresetMode``:

    - ``NEXT_STEP``, the default: by the next step, whatever the actions, with reward 0;
    - ``SAME_STEP``: by the same step, which returns their first observation, and the last one of the old sequences as
      ``info["final_obs"]``, with ``info["final_info"]``;
    - ``DISABLED``: by ``reset``, in all rows or, with ``options={"reset_mask": bool [B]}``, in some.

    Args:
        num_envs: sequences B.
        lm: as for ``BytesEnv``.
        source: as for ``BytesEnv``; common to all rows.
        window: as for ``BytesEnv``.
        render_mode: as for ``BytesEnv``.
        autoreset_mode: one of ``AutoresetMode``, or its value: ``NextStep``, ``SameStep`` or ``Disabled``.
        seq_len: as for ``BytesEnv``.

    Raises:
        ValueError: ``num_envs`` below 1, an unknown ``autoreset_mode``, or an argument which ``BytesEnv`` rejects.
    """

    metadata: dict[str, Any] = {"render_modes": list(RENDER_MODES), "render_fps": 8}
    make_codec: Callable[[int], Codec] = ByteCodec
    default_source = default_source

    def __init__(
        self,
        num_envs: int = 1,
        lm: UNet | None = None,
        source: SourceOrFactory | None = None,
        window: int = 8,
        render_mode: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        seq_len: int | None = None,
    ) -> None:
        PicklableEnv.__init__(
            self,
            num_envs,
            lm,
            source,
            window,
            render_mode,
            autoreset_mode,
            seq_len,
        )
        known = [mode.value for mode in AutoresetMode]
        if not isinstance(autoreset_mode, AutoresetMode) and autoreset_mode not in known:
            raise ValueError(
                f"autoreset_mode = {autoreset_mode!r}: expected one of {', '.join(known)}"
            )
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        source = source_or(source, self.default_source, seq_len)
        self._adapter = ArrayAdapter(
            lm or untrained_lm(self.make_codec),
            source,
            num_envs,
            window,
            render_mode,
        )
        self.env = self._adapter.env
        self.render_mode = render_mode
        self._root: TensorDictBase | None = None
        self.num_envs = num_envs
        self.single_observation_space = self._adapter.observation_space
        self.single_action_space = self._adapter.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start the next B sequences.

        Args:
            seed: as for ``BytesEnv.reset``; several seeds are combined into one, for the source of all rows.
            options: ``reset_mask``, bool [B]: rows to start anew while the others stay unchanged.

        Returns:
            Observations [B, ..], at the first symbols of the rows which were reset, and ``info``.

        Raises:
            ValueError: ``reset_mask`` is not a bool array of B with at least one True.
        """
        if options and options.get("reset_mask") is not None:
            return self._reset_some(options["reset_mask"])
        if isinstance(seed, Sequence):
            seeds = [each for each in seed if each is not None]
            if seeds:
                seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
            else:
                seed = None
        own_seed = None if seed is None else int(seed)
        super().reset(seed=own_seed)
        self._root = self._adapter.reset(seed)
        return self._observe_all()

    def _reset_some(self, mask: Any) -> tuple[Observation, dict[str, Any]]:
        is_mask = isinstance(mask, np.ndarray) and mask.dtype == np.bool_
        if not is_mask or mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"reset_mask = {mask!r}: expected a bool array of {self.num_envs} with at least one True"
            )
        if self._root is None:
            raise ResetNeeded("no sequence has begun: expected a reset() of all rows first")
        rows_B1 = torch.as_tensor(mask, device=self.env.device).unsqueeze(-1)
        self._adapter.clear_rows(mask.nonzero()[0])
        asked = self._root.clone(recurse=False).set("_reset", rows_B1)
        new = self.env.reset(asked)
        known = new.select(*self._root.keys(True, True), strict=False)
        self._root = torch.where(rows_B1.squeeze(-1), known, self._root)
        return self._observe_all()

    def _observe_all(self) -> tuple[Observation, dict[str, Any]]:
        """Return observations and ``info`` of all rows."""
        assert self._root is not None
        infos: dict[str, Any] = {}
        for row, info in enumerate(self._infos(self._root)):
            infos = self._add_info(infos, info, row)
        return self._adapter.observation(self._root), infos

    def step(self, actions: Array) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """End a token, or not, in each row and read the next symbols.

        Args:
            actions: 0 or 1, [B].

        Returns:
            Observations [B, ..], rewards in nats, float64 [B], which sequences ended, bool [B], False [B], ``info``.

        Raises:
            ResetNeeded: ``reset`` was never called.
            ValueError: the actions are not B numbers 0 or 1.
        """
        if (
            self.autoreset_mode == AutoresetMode.NEXT_STEP
            and self._root is not None
            and ended(self._root)
        ):
            observation, infos = self.reset()
            zeros = np.zeros(self.num_envs)
            return observation, zeros, zeros.astype(bool), zeros.astype(bool), infos
        acted = self._adapter.act(self._root, actions, self.action_space)
        following = self.env.step(acted)["next"]
        final = {}
        self._root = following
        terminated = following["terminated"].squeeze(-1).cpu().numpy()
        if terminated.any() and self.autoreset_mode == AutoresetMode.SAME_STEP:
            final_B = self._adapter.observation(following)
            last = self._infos(following)
            for row in terminated.nonzero()[0]:
                observed = {key: x_B[row] for key, x_B in final_B.items()}
                final[row] = {"final_obs": observed, "final_info": last[row]}
            self._reset_some(terminated)
        observation, infos = self._observe_all()
        for row, info in final.items():
            infos = self._add_info(infos, info, row)
        reward = following["reward"].squeeze(-1).double().cpu().numpy()
        return observation, reward, terminated, np.zeros_like(terminated), infos

    @property
    def origin(self) -> list[str]:
        """Origins of the sequences, one for each row; see ``BytesEnv.origin``."""
        return self.env.origin

    def action_masks(self) -> Array:
        """Return which actions are available, bool [B, 2]; see ``BytesEnv.action_masks``."""
        return self._adapter.masks(self._root)

    def render(self) -> tuple[Any, ...]:
        """Render each row; see ``BytesEnv.render``."""
        return tuple(self._adapter.render())

    @staticmethod
    def _infos(tensordict: TensorDictBase) -> list[dict[str, Any]]:
        return [{"position": i} for i in tensordict[keys.POSITION].tolist()]
