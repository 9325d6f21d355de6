"""A ``TokenizationEnv`` in arrays: what gymnasium's environments of one sequence and of many share."""

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import EzPickle
from tensordict import TensorDictBase

from tokenv.core import keys
from tokenv.core.sequences import SourceOrFactory
from tokenv.env.render import as_image, as_text
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.unet import UNet

RENDER_MODES = ("ansi", "rgb_array")
Array: TypeAlias = np.ndarray[Any, Any]
Observation: TypeAlias = dict[str, Array]


class PicklableEnv(EzPickle):
    """Goes into a pickle by its constructor's arguments and its spec; what comes out has not been reset yet."""

    spec: Any

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"spec": self.spec}

    def __setstate__(self, d: dict[str, Any]) -> None:
        super().__setstate__(d)
        self.spec = d["spec"]


class ArrayAdapter:
    """What both faces share: a TokenizationEnv, its seeds, spaces and pictures, and the translation into arrays."""

    def __init__(
        self, lm: UNet, source: SourceOrFactory, batch_size: int, window: int, render_mode: str | None
    ) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(f"render_mode = {render_mode!r}: expected one of {', '.join(RENDER_MODES)}, or None")
        self.env = TokenizationEnv(lm, source, batch_size, window=window)
        self.render_mode = render_mode
        self._drawn: list[list[int]] = [[] for _ in range(batch_size)]
        observed: dict[str, spaces.Space[Any]] = {
            keys.ENCODING: spaces.Box(-np.inf, np.inf, (self.env.lm.config.width,), np.float32)
        }
        if window:  # a Box, for wrappers that stack or normalise observations take nothing else
            observed[keys.LAST_ACTIONS] = spaces.Box(0, 1, (window,), np.float32)
        self.observation_space = spaces.Dict(observed)
        self.action_space = spaces.Discrete(2)

    def reset(self, seed: int | None) -> TensorDictBase:
        """New sequences in all rows, of this seed where there is one."""
        if seed is not None:
            self.env.set_seed(int(seed))
        self._drawn = [[] for _ in self._drawn]
        return self.env.reset()

    def act(self, root: TensorDictBase | None, action: Any, space: spaces.Space[Any]) -> TensorDictBase:
        """Put an action from outside into the TensorDict that is to be stepped."""
        if root is None or ended(root):
            raise ResetNeeded("the sequence has ended, or none has begun: expected reset() before step()")
        array = np.asarray(action)
        # What gives one action often gives it as an array of one.
        given = array.reshape(space.shape) if array.size == 1 and self.env.batch_size[0] == 1 else array
        if not np.issubdtype(array.dtype, np.integer) or not space.contains(given):
            raise ValueError(f"action = {action!r}: expected 0 or 1 for each sequence, an element of {space}")
        action_B = torch.as_tensor(given, dtype=torch.int64, device=self.env.device).reshape(self.env.batch_size)
        for row, drawn in enumerate(action_B.tolist()):
            self._drawn[row].append(drawn if self._drawn[row] else 1)  # the first symbol is a token, whatever they say
        return root.set(keys.ACTION, action_B)

    def clear_rows(self, rows: Iterable[int]) -> None:
        """New sequences have begun in these rows."""
        for row in rows:
            self._drawn[row] = []

    def masks(self, root: TensorDictBase | None) -> Array:
        """Which actions have an effect of their own, bool [B, 2]: at the first symbol only 1."""
        if root is None:
            raise ResetNeeded("no sequence has begun: expected reset() before action_masks()")
        first_B = (root[keys.POSITION] == 0).cpu().numpy()
        return np.stack([~first_B, np.ones_like(first_B)], -1)

    def render(self) -> list[Any]:
        """What each row looks like, in the mode that was asked for."""
        if self.render_mode is None:
            raise ValueError("render_mode is None: expected it of gymnasium.make(..., render_mode=...)")
        rows = [(self.env.symbols_so_far(row).cpu(), drawn) for row, drawn in enumerate(self._drawn)]
        if self.render_mode == "ansi":
            return [as_text(symbol_N, drawn) for symbol_N, drawn in rows]
        return [as_image(symbol_N, drawn, self.env.source.seq_len) for symbol_N, drawn in rows]

    def observation(self, tensordict: TensorDictBase) -> Observation:
        """Arrays [B, ..] of the observation space's keys and dtypes."""
        return {
            key: tensordict[key].float().cpu().numpy().astype(space.dtype)
            for key, space in self.observation_space.items()
        }


def ended(root: TensorDictBase) -> bool:
    """Whether a row's sequence has."""
    return bool(root.get("done", torch.zeros(1)).any())
