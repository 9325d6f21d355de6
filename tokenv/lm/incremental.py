"""Incremental decoding, one symbol at a time: caches, and the two halves of a step.

A byte-level layer stores its window in a ring buffer, a token-level layer all tokens so far, the chunking its
``Stepper``. Token-level layers are computed only where a token ends: time and memory are proportional to the tokens.
Every row of the batch has its own position, so that rows can start anew at different times. The result is that of the
one-pass model (tested).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.core.devices import is_accelerator
from tokenv.lm.attention import AttentionFn
from tokenv.lm.unet import Encoder, UNet

INITIAL_SLOTS = 64  # tokens in the first cache, which is doubled whenever it is full


class _Cache:
    """Keys and values of some layers, [layers, B, H, size, d]; each step writes one slot of every row."""

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
        """Enlarge the cache to ``size`` slots."""
        more = (0, 0, 0, size - self.size)
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        self.keys, self.values = (store.repeat_interleave(times, 1) for store in (self.keys, self.values))

    def attention(
        self, layer: int, slot_R: Tensor, visible_RS: Tensor, write_R: Tensor | None = None, rows: Tensor | None = None
    ) -> AttentionFn:
        """Return attention which writes this step's key and value, and attends to visible ones of the first S slots.

        Args:
            layer: index of the layer.
            slot_R: slots to write.
            visible_RS: slots to attend to.
            write_R: False where the cache stays unchanged; None writes everywhere.
            rows: the R rows of the batch which are computed; None for all.
        """

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            used = visible_RS.shape[1]
            row_R = torch.arange(q.shape[0], device=q.device) if rows is None else rows
            cached = []
            for store, new in ((self.keys, k[:, :, 0]), (self.values, v[:, :, 0])):
                if write_R is not None:
                    new = torch.where(write_R[:, None, None], new, store[layer, row_R, :, slot_R])
                store[layer, row_R, :, slot_R] = new
                slots = store[layer, :, :, :used]
                cached.append(slots if rows is None else slots[row_R])
            k, v = cached
            scores = self.softcap * torch.tanh(q @ k.mT / math.sqrt(q.shape[-1]) / self.softcap)
            return scores.masked_fill(~visible_RS[:, None, None], -math.inf).softmax(-1) @ v

        return attend


class CachedLayers:
    """Byte-level layers, one position at a time.

    Args:
        model: model of the layers; parameters are used, never trained.
        layers: some of its layers.
        batch: rows B.
        window: positions which are stored, at most the model's window.
    """

    def __init__(self, model: Encoder, layers: nn.ModuleList, batch: int, window: int) -> None:
        parameter = next(layers.parameters())
        self.model, self.layers, self.window = model, layers, window
        self.cache = _Cache(len(layers), batch, window, model, parameter.device, model.compute_dtype or parameter.dtype)

    @torch.no_grad()
    def step(self, x_BD: Tensor, position_B: Tensor, rows_B: Tensor) -> Tensor:
        """Compute the next position of each row: [B, D] -> [B, D].

        The positions of a row must come in order, from 0 on; 0 at any time starts it anew.

        Args:
            x_BD: input of the layers.
            position_B: position of each row.
            rows_B: rows whose keys and values are stored; the cache of the others stays unchanged.
        """
        slot_B = position_B % self.window
        visible_BS = torch.arange(self.window, device=x_BD.device) <= position_B[:, None]
        rotary, y = self.model.rotary(position_B[:, None], x_BD.dtype), x_BD.unsqueeze(1)
        for index, layer in enumerate(self.layers):
            y = layer(y, rotary, self.cache.attention(index, slot_B, visible_BS, rows_B))
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
        """Return X_i of each row, [B, D]; positions as in ``CachedLayers.step``."""
        every_row_B = torch.ones_like(position_B, dtype=torch.bool)
        return self._down.step(self._encoder.embed(symbol_B), position_B, every_row_B)

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        self._down.cache.repeat(times)


class Decoder:
    """Incremental decoder of a batch of sequences.

    One step of one row is ``x = encode(symbol)``, the agent's decision, and ``parameters = decode(action)``.

    Args:
        lm: model; parameters are used, never trained.
        batch: rows B.
        max_symbols: longest sequence; memory grows with the tokens so far.

    Attributes:
        x_BD: X_i of each row, from the last ``encode``.
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
        self._max_tokens = max_symbols + self._leading
        self.tokens = _Cache(config.mid_layers, batch, min(self._max_tokens, INITIAL_SLOTS), lm, device, dtype)
        self.position_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.count_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.x_BD = torch.zeros(batch, config.width, dtype=dtype, device=device)
        self._boundaries = 0  # upper bound of the boundaries in a row
        # On an accelerator additional rows cost nothing, and compiled layers keep their shapes.
        self._all_rows = is_accelerator(device)
        self._write_leading_tokens(torch.ones_like(self.position_B, dtype=torch.bool))

    def reset(self, rows_B: Tensor) -> None:
        """Start the rows which are True anew. Old keys stay in the caches, where the positions mask them."""
        self.position_B.masked_fill_(rows_B, 0)
        self.count_B.masked_fill_(rows_B, 0)
        self.pooling.reset(rows_B)
        self._write_leading_tokens(rows_B)
        if bool(rows_B.all()):
            self._boundaries = 0

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
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
            rows_B: rows which read a symbol; the state of the others stays unchanged.

        Returns:
            X_i of each row, [B, D], which ``decode`` reads; that of the other rows is unchanged.
        """
        rows_B = torch.ones_like(self.position_B, dtype=torch.bool) if rows_B is None else rows_B
        x_BD = self.down.step(self.lm.embed(symbol_B), self.position_B, rows_B)
        self.x_BD = torch.where(rows_B[:, None], x_BD, self.x_BD)
        return self.x_BD

    @torch.no_grad()
    def decode(self, action_B: Tensor, boundary_prob_B: Tensor | None = None) -> Tensor:
        """Finish the step which ``encode`` began: end a token or not, and predict.

        Args:
            action_B: 1 where a token ends; must be 1 at a row's first symbol.
            boundary_prob_B: boundary probabilities, read by ``smooth`` only; None if the one-pass model reads none.

        Returns:
            Parameters of p(x_{i+1} | x_<=i, a_<=i), [B, P].
        """
        boundary_B, x_BD = action_B.bool(), self.x_BD
        token_BD = self.pooling.token(x_BD)
        rows = boundary_B.nonzero().flatten()
        if len(rows):
            self._boundaries = min(self._boundaries + 1, self.max_symbols)
            token_BD = self._apply_token_layers(rows, token_BD, self.position_B, self.count_B + self._leading)
        self.count_B = self.count_B + boundary_B
        y_BD = self.pooling.read(x_BD, token_BD, boundary_B, boundary_prob_B)
        y_BD = self.up.step(y_BD, self.position_B, torch.ones_like(boundary_B))
        self.position_B = self.position_B + 1
        return self.lm.head(self.lm.norm(y_BD))

    @torch.no_grad()
    def _write_leading_tokens(self, rows_B: Tensor) -> None:
        """Write the token before the first byte, if the chunking has one, into the rows which start anew.

        It is never overwritten, but the parameters may have been trained since the last call.
        """
        token_BD = self.pooling.leading()
        if token_BD is not None and len(rows := rows_B.nonzero().flatten()):
            zero_B = torch.zeros_like(self.position_B)
            self._apply_token_layers(rows, token_BD, zero_B - 1, zero_B)

    def _apply_token_layers(self, rows: Tensor, token_BD: Tensor, position_B: Tensor, slot_B: Tensor) -> Tensor:
        """Apply the token-level layers to the new tokens of some rows; those of other rows are unchanged: [B, D]."""
        used = self._boundaries + self._leading
        if used > self.tokens.size:
            self.tokens.grow(min(self._max_tokens, max(used, 2 * self.tokens.size)))
        all_rows = self._all_rows or len(rows) == len(token_BD)
        inputs = (token_BD, position_B, slot_B)
        token, position, slot = inputs if all_rows else (x[rows] for x in inputs)
        write = None
        if len(rows) < len(token):
            write = torch.zeros_like(slot, dtype=torch.bool).index_fill(0, rows, True)
        visible = torch.arange(used, device=slot.device) <= slot[:, None]
        rotary, y = self.lm.rotary(position[:, None], token.dtype), token.unsqueeze(1)
        for index, layer in enumerate(self.lm.mid):
            y = layer(y, rotary, self.tokens.attention(index, slot, visible, write, None if all_rows else rows))
        return y[:, 0] if all_rows else token_BD.index_copy(0, rows, y[:, 0].to(token_BD.dtype))
