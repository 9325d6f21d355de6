"""Decoding one symbol at a time: caches, and the two halves of a step.

A byte-level layer remembers its window in a ring, a token-level layer all tokens so far, the pooling what it needs
(``lm.pooling.Stepper``). Every row of the batch has its own position, so that rows can start anew at different times.
Equal to the one-pass model (tested).
"""

import math

import torch
from torch import Tensor, nn

from tokenv.lm.encoder import Encoder
from tokenv.lm.unet import UNet


class _Cache:
    """Keys and values of some layers, [layers, B, H, size, d]; slot ``index`` of every row is written at a step."""

    def __init__(
        self, layers: int, batch: int, size: int, model: Encoder, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (layers, batch, model.config.heads, size, model.config.head_size)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.softcap = model.config.attention_softcap

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows, side by side."""
        self.keys, self.values = (store.repeat_interleave(times, 1) for store in (self.keys, self.values))

    def attend(self, layer: int, slot_B: Tensor, visible_BS: Tensor, write_B: Tensor, used: int) -> "_Attend":
        return _Attend(self, layer, slot_B, visible_BS, write_B, used)


class _Attend:
    """Write this step's key and value, then attend to the visible slots."""

    def __init__(
        self, cache: _Cache, layer: int, slot_B: Tensor, visible_BS: Tensor, write_B: Tensor, used: int
    ) -> None:
        self.cache, self.layer, self.slot_B, self.write_B = cache, layer, slot_B, write_B
        self.visible_BS, self.used = visible_BS[:, :used], used

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = torch.arange(q.shape[0], device=q.device)
        write = self.write_B[:, None, None]
        for store, new in ((self.cache.keys, k), (self.cache.values, v)):
            old = store[self.layer, rows, :, self.slot_B]
            store[self.layer, rows, :, self.slot_B] = torch.where(write, new[:, :, 0], old)
        k, v = self.cache.keys[self.layer, :, :, : self.used], self.cache.values[self.layer, :, :, : self.used]
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = self.cache.softcap * torch.tanh(scores / self.cache.softcap)
        return scores.masked_fill(~self.visible_BS[:, None, None], -math.inf).softmax(-1) @ v


class Layers:
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
            y = layer(y, rotary, self.cache.attend(index, slot_B, visible_BS, rows_B, self.window))
        return y[:, 0]


class Reader:
    """An encoder, one symbol at a time.

    Args:
        encoder: parameters are used, never trained.
        batch: rows B.
    """

    def __init__(self, encoder: Encoder, batch: int) -> None:
        self._encoder = encoder
        self._down = Layers(encoder, encoder.down, batch, encoder.config.window)

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

    One step of one row is ``x = encode(symbol)`` (the agent now decides), then ``parameters = decode(x, action)``.

    Args:
        lm: the model; parameters are used, never trained.
        batch: rows B.
        max_symbols: longest sequence; memory grows with it at token level only.
    """

    def __init__(self, lm: UNet, batch: int, max_symbols: int) -> None:
        parameter = lm.head.weight
        device, dtype = parameter.device, lm.compute_dtype or parameter.dtype
        config = lm.config
        self.lm, self.max_symbols, self.dtype = lm, max_symbols, dtype
        window = min(config.window, max_symbols)
        self.down, self.up = Layers(lm, lm.down, batch, window), Layers(lm, lm.up, batch, window)
        self.pooling = lm.pooling.stepper(batch, device, dtype)
        self._leading = int(self.pooling.leading() is not None)  # tokens before the first boundary
        self.tokens = _Cache(config.mid_layers, batch, max_symbols + self._leading, lm, device, dtype)
        self.position_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.count_B = torch.zeros(batch, dtype=torch.long, device=device)
        self._steps = 0  # no row holds more boundaries than this; known without asking the device
        self._lead(torch.ones_like(self.position_B, dtype=torch.bool))

    def reset(self, rows_B: Tensor) -> None:
        """Start the rows anew where True. Old keys need no wiping: a position hides what lies after it."""
        self.position_B.masked_fill_(rows_B, 0)
        self.count_B.masked_fill_(rows_B, 0)
        self.pooling.reset(rows_B)
        self._lead(rows_B)
        if bool(rows_B.all()):
            self._steps = 0

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows, side by side, that have all read the same so far."""
        for cache in (self.down.cache, self.up.cache, self.tokens):
            cache.repeat(times)
        self.pooling.repeat(times)
        self.position_B = self.position_B.repeat_interleave(times)
        self.count_B = self.count_B.repeat_interleave(times)

    @torch.no_grad()
    def encode(self, symbol_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Read the next symbol of each row.

        Args:
            symbol_B: [B, *symbol_shape].
            rows_B: rows that are really at this half of a step; the others' state stays as it is.

        Returns:
            X_i of each row, [B, D]; meaningless in rows that are left out.
        """
        rows_B = torch.ones_like(self.position_B, dtype=torch.bool) if rows_B is None else rows_B
        return self.down.step(self.lm.embed(symbol_B), self.position_B, rows_B)

    @torch.no_grad()
    def decode(self, x_BD: Tensor, action_B: Tensor, boundary_prob_B: Tensor | None = None) -> Tensor:
        """Finish the step: draw the boundary or not, and predict.

        Args:
            x_BD: what ``encode`` gave.
            action_B: 1 where a token ends; must be 1 at a row's first symbol.
            boundary_prob_B: boundary probabilities, read by ``smooth`` only; None if the one-pass model gets none.

        Returns:
            Parameters of p(x_{i+1} | x_<=i, a_<=i), [B, P].
        """
        boundary_B = action_B.bool()
        self._steps = min(self._steps + 1, self.max_symbols)
        slot_B = self.count_B + self._leading
        token_BD = self._token_layers(
            self.pooling.token(x_BD), self.position_B, slot_B, boundary_B, self._steps + self._leading
        )
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
        token_BD = self.pooling.leading()
        if token_BD is not None:
            nothing_B = torch.zeros_like(self.position_B)
            self._token_layers(token_BD, nothing_B - 1, nothing_B, rows_B, 1)

    def _token_layers(self, token_BD: Tensor, position_B: Tensor, slot_B: Tensor, write_B: Tensor, used: int) -> Tensor:
        visible_BS = torch.arange(self.max_symbols + self._leading, device=token_BD.device) <= slot_B[:, None]
        rotary, y = self.lm.rotary(position_B[:, None], token_BD.dtype), token_BD.unsqueeze(1)
        for index, layer in enumerate(self.lm.mid):
            y = layer(y, rotary, self.tokens.attend(index, slot_B, visible_BS, write_B, used))
        return y[:, 0]
