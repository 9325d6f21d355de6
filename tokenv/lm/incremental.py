"""Decoding one symbol at a time: caches, and the two halves of a step.

A byte-level layer remembers its window in a ring, a token-level layer all tokens so far, the pooling what it needs
(``lm.pooling.Stepper``). Token-level layers work where a token ends, and there alone: the fewer tokens, the less
time and memory. Every row of the batch has its own position, so that rows can start anew at different times.
Equal to the one-pass model (tested).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.lm.encoder import Encoder
from tokenv.lm.unet import UNet

FIRST_SLOTS = 64  # tokens that there is room for at the start; doubled whenever they are not enough


class _Cache:
    """Keys and values of some layers, [layers, B, H, size, d]; a slot of every row is written at a step."""

    def __init__(
        self, layers: int, batch: int, size: int, model: Encoder, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (layers, batch, model.config.heads, size, model.config.head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.softcap = model.config.attention_softcap

    @property
    def size(self) -> int:
        """Slots of a row."""
        return self.keys.shape[3]

    def grow(self, size: int) -> None:
        """Have so many slots."""
        more = (0, 0, 0, size - self.size)
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows, side by side."""
        self.keys, self.values = (store.repeat_interleave(times, 1) for store in (self.keys, self.values))

    def attend(
        self, layer: int, slot_R: Tensor, visible_RS: Tensor, write_R: Tensor | None = None, rows: Tensor | None = None
    ) -> "_CachedAttention":
        return _CachedAttention(self, layer, slot_R, visible_RS, write_R, rows)


class _CachedAttention:
    """Write this step's key and value, then attend to the visible ones of the first S slots.

    Args:
        cache: of the layers.
        layer: which one.
        slot_R: to be written.
        visible_RS: what is attended to.
        write_R: False where memory stays as it is; None writes everywhere.
        rows: the R rows of the batch that are at work; None for all.
    """

    def __init__(
        self,
        cache: _Cache,
        layer: int,
        slot_R: Tensor,
        visible_RS: Tensor,
        write_R: Tensor | None,
        rows: Tensor | None,
    ) -> None:
        self.cache, self.layer, self.slot_R, self.write_R = cache, layer, slot_R, write_R
        self.visible_RS, self.rows = visible_RS, rows

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        used = self.visible_RS.shape[1]
        rows = torch.arange(q.shape[0], device=q.device) if self.rows is None else self.rows
        seen = []
        for store, new in ((self.cache.keys, k[:, :, 0]), (self.cache.values, v[:, :, 0])):
            if self.write_R is not None:
                new = torch.where(self.write_R[:, None, None], new, store[self.layer, rows, :, self.slot_R])
            store[self.layer, rows, :, self.slot_R] = new
            of_layer = store[self.layer, :, :, :used]
            seen.append(of_layer if self.rows is None else of_layer[rows])
        k, v = seen
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = self.cache.softcap * torch.tanh(scores / self.cache.softcap)
        return scores.masked_fill(~self.visible_RS[:, None, None], -math.inf).softmax(-1) @ v


class CachedLayers:
    """Byte-level layers, one position at a time.

    Args:
        model: the layers' model; parameters are used, never trained.
        layers: some of its layers.
        batch: rows B.
        window: positions remembered, at most the model's.
    """

    def __init__(self, model: Encoder, layers: nn.ModuleList, batch: int, window: int) -> None:
        parameter = next(layers.parameters())
        self.model, self.layers, self.window = model, layers, window
        self.cache = _Cache(len(layers), batch, window, model, parameter.device, model.compute_dtype or parameter.dtype)

    @torch.no_grad()
    def step(self, x_BD: Tensor, position_B: Tensor, rows_B: Tensor) -> Tensor:
        """The next position of each row: [B, D] -> [B, D].

        A row's positions must come in order, from 0 on; 0 at any time starts it anew.

        Args:
            x_BD: the stream.
            position_B: of each row.
            rows_B: rows whose keys and values are remembered; the others' memory stays as it is.
        """
        slot_B = position_B % self.window
        visible_BS = torch.arange(self.window, device=x_BD.device) <= position_B[:, None]
        rotary, y = self.model.rotary(position_B[:, None], x_BD.dtype), x_BD.unsqueeze(1)
        for index, layer in enumerate(self.layers):
            y = layer(y, rotary, self.cache.attend(index, slot_B, visible_BS, rows_B))
        return y[:, 0]


class EncoderStepper:
    """An encoder, one symbol at a time.

    Args:
        encoder: parameters are used, never trained.
        batch: rows B.
    """

    def __init__(self, encoder: Encoder, batch: int) -> None:
        self._encoder = encoder
        self._down = CachedLayers(encoder, encoder.down, batch, encoder.config.window)

    @torch.no_grad()
    def read(self, symbol_B: Tensor, position_B: Tensor) -> Tensor:
        """X_i of each row, [B, D]; positions as in ``Layers.step``."""
        everyone = torch.ones_like(position_B, dtype=torch.bool)
        return self._down.step(self._encoder.embed(symbol_B), position_B, everyone)

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows, side by side."""
        self._down.cache.repeat(times)


class Decoder:
    """A batch of sequences in the middle of being read or written.

    One step of one row is ``x = encode(symbol)`` (the agent now decides), then ``parameters = decode(action)``.

    Args:
        lm: the model; parameters are used, never trained.
        batch: rows B.
        max_symbols: longest sequence; memory grows with the tokens of it that are there.

    Attributes:
        x_BD: X_i of each row, as the last ``encode`` computed it.
    """

    def __init__(self, lm: UNet, batch: int, max_symbols: int) -> None:
        parameter = lm.head.weight
        device, dtype = parameter.device, lm.compute_dtype or parameter.dtype
        config = lm.config
        self.lm, self.max_symbols, self.dtype = lm, max_symbols, dtype
        window = min(config.window, max_symbols)
        self.down, self.up = CachedLayers(lm, lm.down, batch, window), CachedLayers(lm, lm.up, batch, window)
        self.pooling = lm.pooling.stepper(batch, device, dtype)
        self._leading = int(self.pooling.leading() is not None)  # tokens before the first boundary
        self._most = max_symbols + self._leading
        self.tokens = _Cache(config.mid_layers, batch, min(self._most, FIRST_SLOTS), lm, device, dtype)
        self.position_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.count_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.x_BD = torch.zeros(batch, config.width, dtype=dtype, device=device)
        self._boundaries = 0  # no row holds more than this
        # On a GPU further rows cost nothing, and compiled layers keep their shapes.
        self._all_rows = device.type == "cuda"
        self._lead(torch.ones_like(self.position_B, dtype=torch.bool))

    def reset(self, rows_B: Tensor) -> None:
        """Start the rows anew where True. Old keys need no wiping: a position hides what lies after it."""
        self.position_B.masked_fill_(rows_B, 0)
        self.count_B.masked_fill_(rows_B, 0)
        self.pooling.reset(rows_B)
        self._lead(rows_B)
        if bool(rows_B.all()):
            self._boundaries = 0

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows, side by side, that have all read the same so far."""
        for cache in (self.down.cache, self.up.cache, self.tokens):
            cache.repeat(times)
        self.pooling.repeat(times)
        self.position_B = self.position_B.repeat_interleave(times)
        self.count_B = self.count_B.repeat_interleave(times)
        self.x_BD = self.x_BD.repeat_interleave(times, 0)

    @torch.no_grad()
    def encode(self, symbol_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Read the next symbol of each row.

        Args:
            symbol_B: [B, *symbol_shape].
            rows_B: rows that are really at this half of a step; the others' state stays as it is.

        Returns:
            X_i of each row, [B, D], which ``decode`` reads; rows that are left out keep the one they had.
        """
        rows_B = torch.ones_like(self.position_B, dtype=torch.bool) if rows_B is None else rows_B
        x_BD = self.down.step(self.lm.embed(symbol_B), self.position_B, rows_B)
        self.x_BD = torch.where(rows_B[:, None], x_BD, self.x_BD)
        return self.x_BD

    @torch.no_grad()
    def decode(self, action_B: Tensor, boundary_prob_B: Tensor | None = None) -> Tensor:
        """Finish the step that ``encode`` began: draw the boundary or not, and predict.

        Args:
            action_B: 1 where a token ends; must be 1 at a row's first symbol.
            boundary_prob_B: boundary probabilities, read by ``smooth`` only; None if the one-pass model gets none.

        Returns:
            Parameters of p(x_{i+1} | x_<=i, a_<=i), [B, P].
        """
        boundary_B, x_BD = action_B.bool(), self.x_BD
        token_BD = self.pooling.token(x_BD)
        rows = boundary_B.nonzero().flatten()
        if len(rows):
            self._boundaries = min(self._boundaries + 1, self.max_symbols)
            token_BD = self._tokens_of(rows, token_BD, self.position_B, self.count_B + self._leading)
        self.count_B = self.count_B + boundary_B
        everyone = torch.ones_like(boundary_B)
        y_BD = self.pooling.read(x_BD, token_BD, boundary_B, boundary_prob_B)
        y_BD = self.up.step(y_BD, self.position_B, everyone)
        self.position_B = self.position_B + 1
        return self.lm.head(self.lm.norm(y_BD))

    @torch.no_grad()
    def _lead(self, rows_B: Tensor) -> None:
        """Write the token before the first byte, where the pooling has one, into the rows that start anew.

        Nothing overwrites it, but the parameters may have been trained since the last time.
        """
        token_BD, rows = self.pooling.leading(), rows_B.nonzero().flatten()
        if token_BD is not None and len(rows):
            nothing_B = torch.zeros_like(self.position_B)
            self._tokens_of(rows, token_BD, nothing_B - 1, nothing_B)

    def _tokens_of(self, rows: Tensor, token_BD: Tensor, position_B: Tensor, slot_B: Tensor) -> Tensor:
        """What the token-level layers make of the new tokens of some rows; the others' are what they were: [B, D]."""
        used = self._boundaries + self._leading
        if used > self.tokens.size:
            self.tokens.grow(min(self._most, max(used, 2 * self.tokens.size)))
        everyone = self._all_rows or len(rows) == len(token_BD)
        each = (token_BD, position_B, slot_B)
        token, position, slot = each if everyone else (of[rows] for of in each)
        write = None
        if len(rows) < len(token):
            write = torch.zeros_like(slot, dtype=torch.bool).index_fill(0, rows, True)
        visible = torch.arange(used, device=slot.device) <= slot[:, None]
        rotary, y = self.lm.rotary(position[:, None], token.dtype), token.unsqueeze(1)
        for index, layer in enumerate(self.lm.mid):
            y = layer(y, rotary, self.tokens.attend(index, slot, visible, write, None if everyone else rows))
        return y[:, 0] if everyone else token_BD.index_copy(0, rows, y[:, 0].to(token_BD.dtype))
