"""Incremental decoding, one symbol at a time: caches, and the two halves of a step.

A byte-level layer stores its window in a ring buffer, a token-level layer all tokens so far, the chunking its
``Stepper``. Token-level layers are computed only where a token ends: time and memory are proportional to the tokens.
Every row of the batch has its own position, so that rows can start anew at different times. The result is that of the
one-pass model (tested).

A step has few numbers and many operations, each of which costs numpy a third of what it costs torch. So the layers
compute in numpy on a CPU, and by the same code in torch elsewhere; always in float32 or finer, in which rounding hardly
depends on the number of rows.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.core.devices import shares_memory_with_numpy
from tokenv.lm.layers import EPSILON
from tokenv.lm.unet import Encoder, UNet

INITIAL_SLOTS = 64  # tokens in the first cache, which is doubled whenever it is full; positions of the first table
MAX_EXPONENT = 80.0  # float32 holds exp of this, summed over many keys


def _array(x: Tensor) -> Any:
    """Return the same memory as an array: of numpy on a CPU, of torch elsewhere."""
    return x.detach().numpy() if shares_memory_with_numpy(x.device) else x.detach()


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(x)


def _gelu(x: Any) -> Any:
    """Return ``gelu(x)`` in its tanh approximation."""
    if isinstance(x, Tensor):
        return F.gelu(x, approximate="tanh")
    number = x.dtype.type  # operations with a number of the array's own type are faster
    inner = x * (x * x * number(0.044715 * math.sqrt(2 / math.pi)) + number(math.sqrt(2 / math.pi)))
    return x * (np.tanh(inner) * number(0.5) + number(0.5))


def _swap(x: Any) -> Any:
    """Exchange the two halves in the dimension before the last."""
    return x.flip(-2) if isinstance(x, Tensor) else x[..., ::-1, :]


Factors = tuple[Any, Any]  # of cos and sin; see ``RotaryFactors.at``


class RotaryFactors:
    """Factors by which queries, keys and values are multiplied at each position, in a table which grows.

    ``rotate(x) = x * cos + swapped(x) * sin``, the halves a and b of x being swapped; those of queries are also divided
    by ``sqrt(d) * softcap``, and those of values are 1 and 0.

    Args:
        model: its constants are used.
        device: device of the table.
        dtype: precision.
    """

    def __init__(self, model: Encoder, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self._table = self._compute(INITIAL_SLOTS)

    def _compute(self, size: int) -> Factors:
        config = self.model.config
        rotary = self.model.rotary(torch.arange(-1, size, device=self.device), self.dtype)  # -1: the leading token
        cos, sin = rotary.cos[0, :, None], rotary.sin[0, :, None]
        both = torch.stack([torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)], 1)
        query = both / (math.sqrt(config.head_size) * config.attention_softcap)
        value = torch.stack([torch.ones_like(both[:, 0]), torch.zeros_like(both[:, 0])], 1)
        both = torch.stack([query, both, value], 2).unsqueeze(3)
        return tuple(_array(factor.contiguous()) for factor in both.unbind(1))

    def at(self, position: Any, most: int) -> Factors:
        """Return the factors of cos and sin at positions, [R, 3, 1, 2, d/2] each.

        Args:
            position: positions from -1 on, an array [R], or one number for all rows, with R = 1.
            most: upper bound of the positions.
        """
        if most + 1 >= len(self._table[0]):
            self._table = self._compute(2 * (most + 1))
        chosen = slice(position + 1, position + 2) if isinstance(position, int) else position + 1
        return self._table[0][chosen], self._table[1][chosen]


class CachedLayers:
    """Layers, one position at a time, with a cache of keys and values.

    Args:
        model: model of the layers; parameters are used, never trained.
        layers: some of its layers.
        batch: rows B.
        size: slots of a row, each for the key and the value of one position.
    """

    def __init__(self, model: Encoder, layers: nn.ModuleList, batch: int, size: int) -> None:
        parameter = next(layers.parameters())
        self.dtype = torch.promote_types(model.compute_dtype or parameter.dtype, torch.float32)
        self.heads, self.softcap = model.config.heads, model.config.attention_softcap
        self.layers: Any = layers  # whose parts have weights
        self.device = parameter.device
        shape = (len(layers), batch, size, 2, self.heads, model.config.head_size)
        self._hold(torch.zeros(shape, device=self.device, dtype=self.dtype))
        self._mean_D1 = self.array(torch.full((model.config.width, 1), 1 / model.config.width))
        self._epsilon_11, self._softcap_111 = (
            self.array(torch.full((1,) * dims, x)) for dims, x in ((2, EPSILON), (3, self.softcap))
        )
        self.read_parameters()

    def array(self, x: Tensor) -> Any:
        """Return an array in the layers' device and precision; it shares the tensor's memory if that has both."""
        return _array(x.to(self.device, self.dtype))

    def read_parameters(self) -> None:
        """Look up the parameters, whose memory is shared: training them in place has an effect at once."""
        self._weights = [
            tuple(
                self.array(each.weight if each.weight.dim() == 1 else each.weight.T)
                for each in (
                    *(layer.pre_attention, layer.qkv, layer.out, layer.post_attention),
                    *(layer.pre_mlp, layer.mlp.gate_up, layer.mlp.down, layer.post_mlp),
                )
            )
            for layer in self.layers
        ]

    def _hold(self, cache: Tensor) -> None:
        self.cache, self._stores = cache, [_array(store) for store in cache]
        _, batch, size, *_ = cache.shape
        self._rows, self._slots = (_array(torch.arange(count, device=self.device)) for count in (batch, size))

    @property
    def size(self) -> int:
        """Slots of a row."""
        return self.cache.shape[2]

    def grow(self, size: int) -> None:
        """Enlarge the cache to ``size`` slots."""
        self._hold(F.pad(self.cache, (0, 0) * 3 + (0, size - self.size)))

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        self._hold(self.cache.repeat_interleave(times, 1))

    def normalise(self, x: Any, weight_D: Any) -> Any:
        """Apply RMSNorm: [R, D] -> [R, D]."""
        xp = torch if isinstance(x, Tensor) else np
        return x / xp.sqrt((x * x) @ self._mean_D1 + self._epsilon_11) * weight_D

    def step(self, x_RD: Any, factors: Factors, order: Any, used: int, rows: Any = None) -> Any:
        """Compute the next position of some rows: arrays [R, D] -> [R, D].

        Args:
            x_RD: input of the layers.
            factors: see ``RotaryFactors.at``.
            order: number of earlier positions of each row, [R], or one number for all. A position is stored in the slot
                of this number, and overwrites the oldest one in a full cache.
            used: leading slots to attend to, as far as they are filled.
            rows: numbers of the R rows; None for all.
        """
        lockstep = isinstance(order, int)
        place = (slice(None) if lockstep else self._rows if rows is None else rows, order % self.size)
        visible = self._slots[:used] <= (order if lockstep else order[:, None, None])
        if lockstep and order + 1 >= used:
            visible = None
        for weights, store in zip(self._weights, self._stores, strict=True):
            pre_attention, qkv, out, post_attention, pre_mlp, gate_up, down, post_mlp = weights
            qkv_RE = self.normalise(x_RD, pre_attention) @ qkv
            attended = self._attend(qkv_RE, factors, store, place, visible, used, rows)
            x_RD = x_RD + self.normalise(attended @ out, post_attention)
            hidden = self.normalise(x_RD, pre_mlp) @ gate_up
            half = hidden.shape[1] // 2
            gated = _gelu(hidden[:, :half]) * hidden[:, half:]
            x_RD = x_RD + self.normalise(gated @ down, post_mlp)
        return x_RD

    def _attend(self, qkv_RE: Any, factors: Factors, store: Any, place: Any, visible: Any, used: int, rows: Any) -> Any:
        """Store keys and values, and attend to the visible ones: [R, 3 D] -> [R, D]."""
        xp = torch if isinstance(qkv_RE, Tensor) else np
        count, size = len(qkv_RE), qkv_RE.shape[1] // (6 * self.heads)
        qkv = qkv_RE.reshape(count, 3, self.heads, 2, size)
        cos, sin = factors
        qkv = (qkv * cos + _swap(qkv) * sin).reshape(count, 3, self.heads, 2 * size)
        store[place] = qkv[:, 1:]
        cached = store[:, :used] if rows is None else store[:, :used][rows]
        cached = cached.swapaxes(1, 3)  # [R, H, 2, S, d]
        score = xp.tanh((cached[:, :, 0] @ qkv[:, 0, :, :, None])[..., 0]) * self._softcap_111
        if self.softcap > MAX_EXPONENT:
            score = score - xp.amax(score, -1, keepdims=True)
        weight = xp.exp(score)
        if visible is not None:
            weight = weight * visible
        weight = weight / weight.sum(-1, keepdims=True)
        return (weight[:, :, None] @ cached[:, :, 1]).reshape(count, -1)


class EncoderStepper:
    """An encoder, one symbol at a time.

    Args:
        encoder: parameters are used, never trained.
        batch: rows B.
    """

    def __init__(self, encoder: Encoder, batch: int) -> None:
        self._encoder = encoder
        self._down = CachedLayers(encoder, encoder.down, batch, encoder.config.window)
        self._factors = RotaryFactors(encoder, self._down.device, self._down.dtype)

    @torch.no_grad()
    def read(self, symbol_B: Tensor, position_B: Tensor) -> Tensor:
        """Return X_i of each row, [B, D]. Positions come in order, from 0 on; 0 at any time starts a row anew."""
        down, most = self._down, int(position_B.max())
        if not most:
            down.read_parameters()
        position, x_BD = _array(position_B), down.array(self._encoder.codec.embed(symbol_B))
        return _tensor(down.step(x_BD, self._factors.at(position, most), position, down.size))

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        self._down.repeat(times)


class Decoder:
    """Incremental decoder of a batch of sequences.

    One step of one row is ``x = encode(symbol)``, the agent's decision, and ``parameters = decode(action)``, all of it
    within ``torch.no_grad``.

    Args:
        lm: model; parameters are used, never trained.
        batch: rows B.
        max_symbols: longest sequence; memory grows with the tokens so far.

    Attributes:
        dtype: precision of the steps, float32 or finer.
        position_B: symbols which each row has finished.
        count_B: tokens of each row.
        x_BD: X_i of each row, from the last ``encode``.
    """

    def __init__(self, lm: UNet, batch: int, max_symbols: int) -> None:
        config, device = lm.config, lm.head.weight.device
        self.lm, self.max_symbols = lm, max_symbols
        window = min(config.window, max_symbols)
        self.down, self.up = CachedLayers(lm, lm.down, batch, window), CachedLayers(lm, lm.up, batch, window)
        self.dtype = self.down.dtype
        self.pooling = lm.pooling.stepper(batch, device, self.dtype)
        self._leading = int(self.pooling.leading() is not None)  # tokens before the first boundary
        self._max_tokens = max_symbols + self._leading
        self.tokens = CachedLayers(lm, lm.mid, batch, min(self._max_tokens, INITIAL_SLOTS))
        self._rotary = RotaryFactors(lm, device, self.dtype)
        self.position_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.count_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.x_BD = torch.zeros(batch, config.width, dtype=self.dtype, device=device)
        self._position: int | None = 0  # of every row; None if they differ
        self._factors = self._rotary.at(0, 0)  # of the positions, from the last ``encode``
        self.reset(torch.ones_like(self.position_B, dtype=torch.bool))

    def reset(self, rows_B: Tensor) -> None:
        """Start the rows which are True anew. Old keys stay in the caches, where the positions mask them."""
        every, lm = bool(rows_B.all()), self.lm
        for layers in (self.down, self.tokens, self.up):
            layers.read_parameters()
        self._norm_D, self._head_DP = self.up.array(lm.norm.weight), self.up.array(lm.head.weight.T)
        self.position_B.masked_fill_(rows_B, 0)
        self.count_B.masked_fill_(rows_B, 0)
        self.pooling.reset(rows_B)
        self._position = 0 if every or self._position == 0 else None
        # It is never overwritten, but the parameters may have been trained since the last call.
        token_BD = self.pooling.leading()
        if token_BD is not None and len(rows := rows_B.nonzero().flatten()):
            self._apply_token_layers(rows, token_BD, self._rotary.at(-1, 0), torch.zeros_like(self.count_B))

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        for layers in (self.down, self.tokens, self.up):
            layers.repeat(times)
        self.pooling.repeat(times)
        self.position_B = self.position_B.repeat_interleave(times)
        self.count_B = self.count_B.repeat_interleave(times)
        self.x_BD = self.x_BD.repeat_interleave(times, 0)

    def encode(self, symbol_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Read the next symbol of each row.

        Args:
            symbol_B: [B, *symbol_shape].
            rows_B: rows which read a symbol; the state of the others stays unchanged.

        Returns:
            X_i of each row, [B, D], which ``decode`` reads; that of the other rows is unchanged.
        """
        position: Any = self._position
        if position is None:
            position = _array(self.position_B)
        self._factors = self._rotary.at(position, int(position.max()) if self._position is None else position)
        if rows_B is None or bool(rows_B.all()):
            x_BD = self.down.array(self.lm.codec.embed(symbol_B))
            self.x_BD = _tensor(self.down.step(x_BD, self._factors, position, self.down.size))
        elif bool(rows_B.any()):
            rows = rows_B.nonzero().flatten()
            x_RD, at = self.down.array(self.lm.codec.embed(symbol_B[rows])), _array(self.position_B[rows])
            factors = self._rotary.at(at, int(at.max()))
            x_RD = self.down.step(x_RD, factors, at, self.down.size, _array(rows))
            self.x_BD = self.x_BD.index_copy(0, rows, _tensor(x_RD))
        return self.x_BD

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
            token_BD = self._apply_token_layers(rows, token_BD, self._factors, self.count_B + self._leading)
        self.count_B = self.count_B + boundary_B
        y_BD = _array(self.pooling.read(x_BD, token_BD, boundary_B, boundary_prob_B))
        order = _array(self.position_B) if self._position is None else self._position
        y_BD = self.up.step(y_BD, self._factors, order, self.up.size)
        self.position_B = self.position_B + 1
        self._position = None if self._position is None else self._position + 1
        return _tensor(self.up.normalise(y_BD, self._norm_D) @ self._head_DP)

    def _apply_token_layers(self, rows: Tensor, token_BD: Tensor, factors: Factors, slot_B: Tensor) -> Tensor:
        """Apply the token-level layers to the new tokens of some rows; those of other rows are unchanged: [B, D]."""
        every, some = len(rows) == len(token_BD), _array(rows)
        slot_R = _array(slot_B if every else slot_B[rows])
        used = int(slot_R.max()) + 1
        if used > self.tokens.size:
            self.tokens.grow(min(self._max_tokens, max(used, 2 * self.tokens.size)))
        if every:
            return _tensor(self.tokens.step(_array(token_BD), factors, slot_R, used))
        if len(factors[0]) > 1:
            factors = factors[0][some], factors[1][some]
        token_RD = self.tokens.step(_array(token_BD[rows]), factors, slot_R, used, some)
        return token_BD.index_copy(0, rows, _tensor(token_RD))
