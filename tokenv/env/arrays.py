"""``TokenizationEnv`` with NumPy arrays and rendering: the common part of both gymnasium environments."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.utils import EzPickle
from PIL import Image, ImageDraw, ImageFont
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.sequences import SourceOrFactory
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.unet import UNet

RENDER_MODES = ("ansi", "rgb_array")
MARK = "│"
STEPS = "▁▂▃▄▅▆▇█"
COLUMNS = 64
CELL_WIDTH = 10
CELL_HEIGHT = 20
MARGIN = 8
PAPER = (255, 255, 255)
INK = (20, 20, 20)
BOUNDARY = (200, 30, 30)
UNREAD = (235, 235, 235)
Array: TypeAlias = np.ndarray[Any, Any]
Observation: TypeAlias = dict[str, Array]


class PicklableEnv(EzPickle):
    """Environment which is pickled by its constructor's arguments and its spec, and must be reset after unpickling."""

    spec: Any

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"spec": self.spec}

    def __setstate__(self, d: dict[str, Any]) -> None:
        super().__setstate__(d)
        self.spec = d["spec"]


class ArrayAdapter:
    """Adapter of a ``TokenizationEnv`` to arrays: seeds, spaces, actions, observations and pictures."""

    def __init__(
        self,
        lm: UNet,
        source: SourceOrFactory,
        batch_size: int,
        window: int,
        render_mode: str | None,
    ) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise ValueError(
                f"render_mode = {render_mode!r}: expected one of {', '.join(RENDER_MODES)}, or None"
            )
        self.env = TokenizationEnv(lm, source, batch_size, window=window)
        self.render_mode = render_mode
        self._actions: list[list[int]] = [[] for _ in range(batch_size)]
        observed: dict[str, spaces.Space[Any]] = {
            keys.ENCODING: spaces.Box(-np.inf, np.inf, (self.env.lm.config.width,), np.float32)
        }
        if window:  # a Box, as wrappers which stack or normalise observations require
            observed[keys.LAST_ACTIONS] = spaces.Box(0, 1, (window,), np.float32)
        self.observation_space = spaces.Dict(observed)
        self.action_space = spaces.Discrete(2)

    def reset(self, seed: int | None) -> TensorDictBase:
        """Start new sequences in all rows, with this seed if there is one."""
        if seed is not None:
            self.env.set_seed(int(seed))
        self._actions = [[] for _ in self._actions]
        return self.env.reset()

    def act(
        self, root: TensorDictBase | None, action: Any, space: spaces.Space[Any]
    ) -> TensorDictBase:
        """Set a client's action in the TensorDict which is to be stepped."""
        if root is None or ended(root):
            raise ResetNeeded(
                "the sequence has ended, or none has begun: expected reset() before step()"
            )
        array = np.asarray(action)
        # Clients with one environment often pass an array of one action.
        value = array
        if array.size == 1 and self.env.batch_size[0] == 1:
            value = array.reshape(space.shape)
        if not np.issubdtype(array.dtype, np.integer) or not space.contains(value):
            raise ValueError(
                f"action = {action!r}: expected 0 or 1 for each sequence, an element of {space}"
            )
        action = torch.as_tensor(value, dtype=torch.int64, device=self.env.device)
        action_B = action.reshape(self.env.batch_size)
        for row, one_action in enumerate(action_B.tolist()):
            # The first symbol always ends a token.
            self._actions[row].append(int(one_action or not self._actions[row]))
        return root.set(keys.ACTION, action_B)

    def clear_rows(self, rows: Iterable[int]) -> None:
        """Clear the actions of rows in which new sequences have begun."""
        for row in rows:
            self._actions[row] = []

    def masks(self, root: TensorDictBase | None) -> Array:
        """Return which actions are available, bool [B, 2]: at the first symbol only 1."""
        if root is None:
            raise ResetNeeded("no sequence has begun: expected reset() before action_masks()")
        first_B = (root[keys.POSITION] == 0).cpu().numpy()
        return np.stack([~first_B, np.ones_like(first_B)], -1)

    def render(self) -> list[Any]:
        """Render each row in the mode ``render_mode``."""
        if self.render_mode is None:
            raise ValueError(
                "render_mode is None: expected it of gymnasium.make(..., render_mode=...)"
            )
        rendered: list[Any] = []
        for row, action in enumerate(self._actions):
            symbol_N = self.env.symbols_so_far(row).cpu()
            if self.render_mode == "ansi":
                rendered.append(as_text(symbol_N, action))
            else:
                rendered.append(as_image(symbol_N, action, self.env.source.seq_len))
        return rendered

    def observation(self, tensordict: TensorDictBase) -> Observation:
        """Return arrays [B, ..] with the keys and dtypes of the observation space."""
        observation = {}
        for key, space in self.observation_space.items():
            array = tensordict[key].float().cpu().numpy()
            observation[key] = array.astype(space.dtype)
        return observation


def ended(root: TensorDictBase) -> bool:
    """Return whether the sequence of any row has ended."""
    return bool(root.get("done", torch.zeros(1)).any())


def levels(symbol_NC: Tensor) -> list[int]:
    """Return the levels of a series, 0 to 7 between the least and the largest value of its first channel."""
    value_N = symbol_NC[:, 0, 0].double().nan_to_num()
    low = value_N.min()
    high = value_N.max()
    share_N = (value_N - low) / (high - low).clamp(min=1e-12)
    level_N = share_N * (len(STEPS) - 1)
    return level_N.round().int().tolist()


def as_text(symbol_N: Tensor, action: Sequence[int]) -> str:
    """Render a sequence as one line with a mark after each symbol which ends a token.

    Args:
        symbol_N: symbols so far, bytes [N] or of series [N, C, ..].
        action: 1 where a token ends, for the first of the symbols.
    """
    ends = [i + 1 for i, is_end in enumerate(action) if is_end]
    places = pairwise([0, *ends, len(symbol_N)])
    pieces = [slice(start, end) for start, end in places]
    if symbol_N.ndim > 1:
        steps = "".join(STEPS[level] for level in levels(symbol_N))
        return MARK.join(steps[piece] for piece in pieces)
    data = bytes(symbol_N.clamp(0, 255).tolist())
    return MARK.join(_printable(data[piece]) for piece in pieces)


def _printable(data: bytes) -> str:
    text = data.decode(errors="backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def as_image(symbol_N: Tensor, action: Sequence[int], length: int) -> np.ndarray:
    """Render a sequence as a picture with a cell for each of ``length`` symbols, uint8 [height, width, 3]."""
    rows = -(-length // COLUMNS)
    size = (min(length, COLUMNS) * CELL_WIDTH + 2 * MARGIN, rows * CELL_HEIGHT + 2 * MARGIN)
    picture = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(14)
    if symbol_N.ndim > 1:
        heights = levels(symbol_N)
    else:
        heights = None
    for i in range(length):
        x = MARGIN + i % COLUMNS * CELL_WIDTH
        y = MARGIN + i // COLUMNS * CELL_HEIGHT
        if i >= len(symbol_N):
            draw.rectangle((x, y, x + CELL_WIDTH - 1, y + CELL_HEIGHT - 1), fill=UNREAD)
        elif heights is not None:
            top = y + CELL_HEIGHT - 2 - 2 * heights[i]
            draw.rectangle((x + 1, top, x + CELL_WIDTH - 3, y + CELL_HEIGHT - 2), fill=INK)
        else:
            byte = int(symbol_N[i])
            char = chr(byte) if 32 <= byte < 127 else "·"
            draw.text((x + 1, y), char, fill=INK, font=font)
        if i < len(action) and action[i]:
            draw.line(
                (x + CELL_WIDTH - 1, y, x + CELL_WIDTH - 1, y + CELL_HEIGHT - 1),
                fill=BOUNDARY,
                width=2,
            )
    return np.asarray(picture)
