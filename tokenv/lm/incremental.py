"""Incremental decoding, one symbol at a time: caches, and the two halves of a step.

A byte-level layer stores its window in a ring buffer, a token-level layer all tokens so far, the chunking its
``Stepper``. Token-level layers are computed only where a token ends: time and memory are proportional to the tokens.
Every row of the batch has its own position, so that rows can start anew at different times. The result is that of the
one-pass model (tested), always in float32 or finer, in which rounding hardly depends on the number of rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.core.devices import shares_memory_with_numpy
from tokenv.lm.attention import attention_bias, capped_attention
from tokenv.lm.layers import rotary_frequencies
from tokenv.lm.unet import Encoder, UNet

INITIAL_SLOTS = 64  # tokens in the first cache, which is doubled whenever it is full


class CachedLayers:
    """Layers, one position at a time, with a cache of keys and values.

    Args:
        model: model of the layers; parameters are used, never trained.
        layers: some of its layers.
        batch: rows B.
        size: slots of a row, each for the key and the value of one position.
        output: norm and head which are applied after the layers; none by default.
    """

    def __init__(
        self,
        model: Encoder,
        layers: nn.ModuleList,
        batch: int,
        size: int,
        output: Sequence[Any] = (),
    ) -> None:
        parameter = next(layers.parameters())
        self.dtype = torch.promote_types(model.compute_dtype or parameter.dtype, torch.float32)
        self.softcap = model.config.attention_softcap
        self.device = parameter.device
        self._model = model
        self._layers = [*layers]
        self._output = output
        shape = (len(layers), batch, size, 2, model.config.heads, model.config.head_size)
        cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        self._hold(cache)
        self.read_parameters()

    def read_parameters(self) -> None:
        """Look up the parameters anew, where training them might have moved them."""

    def _hold(self, cache: Tensor) -> None:
        self.cache = cache
        self._row_B = torch.arange(cache.shape[1], device=self.device)

    @property
    def size(self) -> int:
        """Slots of a row."""
        return self.cache.shape[2]

    def grow(self, size: int) -> None:
        """Enlarge the cache to ``size`` slots."""
        added = size - self.size
        cache = F.pad(self.cache, (0, 0, 0, 0, 0, 0, 0, added))
        self._hold(cache)

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        self._hold(self.cache.repeat_interleave(times, 1))

    def rotary(self, position_R: Tensor) -> Any:
        """Return the rotary embeddings at one position of each row, which ``step`` reads."""
        return self._model.rotary(position_R[:, None], self.dtype)

    @torch.no_grad()
    def step(
        self,
        x_RD: Tensor,
        rotary: Any,
        order_R: Tensor,
        row_R: Tensor | None = None,
    ) -> Tensor:
        """Compute the next position of some rows.

        Args:
            x_RD: input of the layers.
            rotary: rotary embeddings at the positions; layers of the same model and device share them.
            order_R: number of earlier positions of each row. A position is stored in the slot of this number, and
                overwrites the oldest one in a full cache.
            row_R: numbers of the R rows; None for all.

        Returns:
            [R, D], or what the head returns.
        """
        if row_R is None:
            row_R = self._row_B
        place = row_R, order_R % self.size
        x_R1D = x_RD.to(self.dtype).unsqueeze(1)
        slot_S = torch.arange(self.size, device=self.device)
        hidden_RS = slot_S > order_R[:, None]
        bias_R11S = attention_bias(hidden_RS[:, None, None], x_R1D)
        for layer, store in zip(self._layers, self.cache, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, store: Tensor = store) -> Tensor:
                newest = [k[:, :, 0], v[:, :, 0]]
                store[place] = torch.stack(newest, 1)
                key, value = store[row_R].permute(2, 0, 3, 1, 4)  # [R, H, S, d] each
                return capped_attention(q, key, value, bias_R11S, self.softcap)

            x_R1D = layer.forward(x_R1D, rotary, attend)  # a compiled layer expects whole sequences
        for module in self._output:
            x_R1D = module(x_R1D)
        return x_R1D.squeeze(1)


class CompiledLayers(CachedLayers):
    """``CachedLayers`` on a CPU, where a step is few numbers and many operations: compiled functions compute it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._import_kernels()
        super().__init__(*args, **options)

    def _import_kernels(self) -> None:
        # Only stepping needs numba, which takes a second to import.
        from tokenv.lm import cpu_kernels

        self._kernels = cpu_kernels

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: neither a module nor the arrays, whose memory is that of tensors."""
        state = self.__dict__.copy()
        for name in ("_kernels", "_frequencies", "_weights", "_output_weights", "_stores", "_rows"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, and share the memory of its tensors."""
        self.__dict__.update(state)
        self._import_kernels()
        self._hold(self.cache)
        self.read_parameters()

    def read_parameters(self) -> None:
        """Look up the parameters, whose memory is shared: training them in place has an effect at once."""
        config = self._model.config
        layers: Any = self._layers  # whose parts have weights
        frequencies = rotary_frequencies(config.head_size, config.rope_base, self.dtype)
        self._frequencies = frequencies.numpy()
        self._weights = [self._layer_weights(layer) for layer in layers]
        self._output_weights = self._arrays(*self._output)

    def _layer_weights(self, layer: Any) -> Any:
        attention = (layer.pre_attention, layer.qkv, layer.out, layer.post_attention)
        mlp = (layer.pre_mlp, layer.mlp.gate_up, layer.mlp.down, layer.post_mlp)
        return self._arrays(*attention, *mlp)

    def _arrays(self, *modules: Any) -> Any:
        """Return weights as arrays, matrices transposed; they share the tensors' memory unless their type differs."""
        return tuple(module.weight.detach().to(self.dtype).numpy().T for module in modules)

    def _hold(self, cache: Tensor) -> None:
        super()._hold(cache)
        self._stores = [store.numpy() for store in self.cache]
        self._rows = self._row_B.numpy()

    def rotary(self, position_R: Tensor) -> Any:
        """Return cosines and sines at one position of each row, [R, d/2] each."""
        return self._kernels.rotary_at(position_R.numpy(), self._frequencies)

    def step(
        self,
        x_RD: Tensor,
        rotary: Any,
        order_R: Tensor,
        row_R: Tensor | None = None,
    ) -> Tensor:
        """Compute the next position of some rows; see ``CachedLayers``."""
        kernels = self._kernels
        order = order_R.numpy()
        rows = self._rows
        if row_R is not None:
            rows = row_R.numpy()
        x = x_RD.detach().to(self.dtype).numpy()
        for weights, store in zip(self._weights, self._stores, strict=True):
            x = kernels.step_layer(
                x,
                weights,
                store,
                *rotary,
                order,
                rows,
                self.softcap,
            )
        if self._output:
            x = kernels.project(x, *self._output_weights)
        return torch.from_numpy(x)


def cache_layers(
    model: Encoder,
    layers: nn.ModuleList,
    batch: int,
    size: int,
    **options: Any,
) -> CachedLayers:
    """Return ``CachedLayers`` which are fast on the device of the model; the arguments are theirs."""
    on_cpu = shares_memory_with_numpy(next(layers.parameters()).device)
    kind = CompiledLayers if on_cpu else CachedLayers
    return kind(model, layers, batch, size, **options)


class EncoderStepper:
    """An encoder, one symbol at a time.

    Args:
        encoder: parameters are used, never trained.
        batch: rows B.
    """

    def __init__(self, encoder: Encoder, batch: int) -> None:
        self._encoder = encoder
        self._down = cache_layers(encoder, encoder.down, batch, encoder.config.window)

    @torch.no_grad()
    def read(self, symbol_B: Tensor, position_B: Tensor) -> Tensor:
        """Return X_i of each row, [B, D]. Positions come in order, from 0 on; 0 at any time starts a row anew."""
        if not bool(position_B.any()):
            self._down.read_parameters()
        return self._down.step(
            self._encoder.codec.embed(symbol_B),
            self._down.rotary(position_B),
            position_B,
        )

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
        elapsed_B: symbols of each row since its newest boundary, counted with ``model.elapsed``.
        x_BD: X_i of each row, from the last ``encode``.
    """

    def __init__(self, lm: UNet, batch: int, max_symbols: int) -> None:
        config = lm.config
        device = lm.head.weight.device
        self.lm = lm
        self.codec = lm.codec
        self.max_symbols = max_symbols
        window = min(config.window, max_symbols)
        self.down = cache_layers(lm, lm.down, batch, window)
        self.up = cache_layers(lm, lm.up, batch, window, output=(lm.norm, lm.head))
        self.dtype = self.down.dtype
        self.pooling = lm.pooling.stepper(batch, device, self.dtype)
        self._leading = int(self.pooling.leading() is not None)  # tokens before the first boundary
        self._max_tokens = max_symbols + self._leading
        self.tokens = cache_layers(
            lm,
            lm.mid,
            batch,
            min(self._max_tokens, INITIAL_SLOTS),
        )
        self.position_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.count_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.elapsed_B = torch.zeros(batch, dtype=torch.long, device=device)
        self.x_BD = torch.zeros(batch, config.width, dtype=self.dtype, device=device)
        self.reset(torch.ones_like(self.position_B, dtype=torch.bool))

    def reset(self, rows_B: Tensor) -> None:
        """Start the rows which are True anew. Old keys stay in the caches, where the positions mask them."""
        for layers in (self.down, self.tokens, self.up):
            layers.read_parameters()
        self.position_B.masked_fill_(rows_B, 0)
        self.count_B.masked_fill_(rows_B, 0)
        self.pooling.reset(rows_B)
        # It is never overwritten, but the parameters may have been trained since the last call.
        token_BD = self.pooling.leading()
        if token_BD is not None and len(rows := rows_B.nonzero().flatten()):
            self._apply_token_layers(
                rows,
                token_BD,
                torch.full_like(self.count_B, -1),
                torch.zeros_like(self.count_B),
            )

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side."""
        for layers in (self.down, self.tokens, self.up):
            layers.repeat(times)
        self.pooling.repeat(times)
        self.position_B = self.position_B.repeat_interleave(times)
        self.count_B = self.count_B.repeat_interleave(times)
        self.elapsed_B = self.elapsed_B.repeat_interleave(times)
        self.x_BD = self.x_BD.repeat_interleave(times, 0)

    def encode(self, symbol_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """Read the next symbol of each row.

        Args:
            symbol_B: [B, *symbol_shape].
            rows_B: rows which read a symbol; the state of the others stays unchanged.

        Returns:
            X_i of each row, [B, D], which ``decode`` reads; that of the other rows is unchanged.
        """
        self._rotary = self.down.rotary(self.position_B)
        if rows_B is None or bool(rows_B.all()):
            self.x_BD = self.down.step(
                self.codec.embed(symbol_B),
                self._rotary,
                self.position_B,
            )
        elif bool(rows_B.any()):
            rows = rows_B.nonzero().flatten()
            position_R = self.position_B[rows]
            x_RD = self.down.step(
                self.codec.embed(symbol_B[rows]),
                self.down.rotary(position_R),
                position_R,
                rows,
            )
            self.x_BD = self.x_BD.index_copy(0, rows, x_RD)
        return self.x_BD

    def decode(self, action_B: Tensor, boundary_prob_B: Tensor | None = None) -> Tensor:
        """Finish the step which ``encode`` began: end a token or not, and predict.

        Args:
            action_B: 1 where a token ends; must be 1 at a row's first symbol.
            boundary_prob_B: boundary probabilities, read by ``smooth`` only; None if the one-pass model reads none.

        Returns:
            Parameters of p(x_{i+1} | x_<=i, a_<=i), [B, P].
        """
        boundary_B = action_B.bool()
        x_BD = self.x_BD
        token_BD = self.pooling.token(x_BD)
        rows = boundary_B.nonzero().flatten()
        if len(rows):
            token_BD = self._apply_token_layers(
                rows,
                token_BD,
                self.position_B,
                self.count_B + self._leading,
            )
        self.count_B = self.count_B + boundary_B
        y_BD = self.pooling.read(x_BD, token_BD, boundary_B, boundary_prob_B)
        if self.lm.config.elapsed:
            self.elapsed_B = (self.elapsed_B + 1).masked_fill(boundary_B, 0)
            y_BD = y_BD + self.lm.elapsed(self.elapsed_B)
        parameters_BP = self.up.step(y_BD, self._rotary, self.position_B)
        self.position_B = self.position_B + 1
        return parameters_BP

    def _apply_token_layers(
        self,
        rows: Tensor,
        token_BD: Tensor,
        position_B: Tensor,
        order_B: Tensor,
    ) -> Tensor:
        """Apply the token-level layers to the new tokens of some rows; those of other rows are unchanged: [B, D]."""
        used = int(order_B.max()) + 1
        if used > self.tokens.size:
            size = max(used, 2 * self.tokens.size)
            self.tokens.grow(min(self._max_tokens, size))
        if len(rows) == len(token_BD):
            return self.tokens.step(
                token_BD,
                self.tokens.rotary(position_B),
                order_B,
            )
        token_RD = self.tokens.step(
            token_BD[rows],
            self.tokens.rotary(position_B[rows]),
            order_B[rows],
            rows,
        )
        return token_BD.index_copy(0, rows, token_RD)
