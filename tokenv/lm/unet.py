"""The autoregressive U-Net (paper, eq. 1-9): encode, chunk, apply token-level layers, distribute, decode.

::

    x_BN --encode--> X_BND --select(a)--> X'_BMD --mid--> Y'_BMD --distribute(a), add X--> decode --> p(x_{i+1})
                       |
                       +--early exit--> p_early(x_{i+1}), without any token

Everything is causal: symbol i affects no output before i, and boundary a_i no prediction of x_1, ..., x_i.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokenv.core.devices import compiles
from tokenv.core.sequences import elapsed_symbols
from tokenv.lm.attention import (
    BLOCK,
    SMALL_BLOCK,
    AttentionFn,
    allow_many_shapes,
    flex_options,
    select_attention,
)
from tokenv.lm.chunking import (
    Chunking,
    DeviationChunking,
    EMASmoothing,
    MeanChunking,
    SelectChunking,
)
from tokenv.lm.codecs.base import ByteCodec, Codec, make_head
from tokenv.lm.config import UNetConfig
from tokenv.lm.elapsed import ElapsedEmbedding
from tokenv.lm.layers import DecoderLayer, RMSNorm, RotaryTable
from tokenv.lm.segments import Pack, Segments, bucket_size, relaxed_attention


def _log_prob(codec: Codec, head: Callable[[Tensor], Tensor], x: Tensor, symbol: Tensor) -> Tensor:
    return codec.log_prob(head(x), symbol)


@functools.cache
def _compiled_log_prob() -> Callable[..., Tensor]:
    return torch.compile(_log_prob, dynamic=False)


def make_layers(config: UNetConfig, count: int, mlp: int) -> nn.ModuleList:
    """Build ``count`` layers of the model's width, with an MLP ``mlp`` times as wide."""
    return nn.ModuleList(
        DecoderLayer(
            config.width,
            config.heads,
            mlp * config.width,
        )
        for _ in range(count)
    )


class Encoder(nn.Module):
    """Byte-level layers before the boundaries are drawn (paper, eq. 1), and the early exit (eq. 14).

    Args:
        config: sizes; only ``down_layers`` layers are built.
        codec: codec of the symbols.
        compute_dtype: precision of the activations; None for that of the parameters.
        early_exit: whether to build an early exit; the U-Net builds one from its output head.
    """

    def __init__(
        self,
        config: UNetConfig,
        codec: Codec,
        compute_dtype: torch.dtype | None = None,
        *,
        early_exit: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.compute_dtype = compute_dtype
        self.codec = codec
        self._block = BLOCK
        self.down = make_layers(config, config.down_layers, config.byte_mlp)
        if early_exit:
            self.early_norm = RMSNorm(config.width)
            self.early_head = make_head(codec, config.width)

    def embed(self, symbol: Tensor) -> Tensor:
        """Embed symbols in the compute precision: [.., *symbol_shape] -> [.., D]."""
        return self._to_compute_dtype(self.codec.embed(symbol))

    def _to_compute_dtype(self, x: Tensor) -> Tensor:
        """Cast to the compute precision."""
        if self.compute_dtype is None:
            return x
        return x.to(self.compute_dtype)

    def encode(self, symbol_BN: Tensor) -> Tensor:
        """Return byte representations X (eq. 1): [B, N, *symbol_shape] -> [B, N, D]."""
        return self._byte_layers(self.down, self.embed(symbol_BN))

    def early_exit(self, x: Tensor) -> Tensor:
        """Return the parameters of p_early(x_{i+1} | x_<=i) from X_i alone (eq. 14): [.., D] -> [.., P]."""
        return self.early_head(self.early_norm(self._to_compute_dtype(x)))

    @torch.no_grad()
    def early_entropy(self, x: Tensor) -> Tensor:
        """Return the entropy of p_early(x_{i+1} | x_<=i) in nats, without gradient: [.., D] -> [..]."""
        return self.codec.entropy(self.early_exit(x))

    def rotary(self, position: Tensor, dtype: torch.dtype) -> RotaryTable:
        """Return rotary embeddings at given byte positions."""
        return RotaryTable(position, self.config.head_size, self.config.rope_base, dtype)

    def _byte_layers(self, layers: nn.ModuleList, x_BND: Tensor) -> Tensor:
        position_N = torch.arange(x_BND.shape[1], device=x_BND.device)
        rotary = self.rotary(position_N, x_BND.dtype)
        config = self.config
        attention = select_attention(
            x_BND.shape[1], x_BND.device, config.attention_softcap, config.window, self._block
        )
        for layer in layers:
            x_BND = layer(x_BND, rotary, attention)
        return x_BND


_POOLINGS: dict[str, type[Chunking]] = {
    "select": SelectChunking,
    "deviation": DeviationChunking,
    "mean": MeanChunking,
    "smooth": EMASmoothing,
}


class UNet(Encoder):
    """Byte-level encoder, token-level middle, byte-level decoder, an output head and an early-exit head.

    Args:
        config: sizes.
        codec: codec of the symbols; bytes by default.
        compute_dtype: precision of the activations; None for that of the parameters.
    """

    auxiliary_head: Any

    def __init__(
        self,
        config: UNetConfig,
        codec: Codec | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        codec = codec or ByteCodec(config.width, softcap=config.output_softcap)
        super().__init__(config, codec, compute_dtype, early_exit=False)
        self.packs = False
        self._log_prob = _log_prob
        # M is padded to a multiple of this number, since many different lengths would fragment memory.
        self._token_multiple = 32
        self.mid = make_layers(config, config.mid_layers, config.token_mlp)
        self.up = make_layers(config, config.up_layers, config.byte_mlp)
        self.pooling = _POOLINGS[config.pooling](config.width)
        if config.elapsed:
            self.elapsed = ElapsedEmbedding(config.width)
        self.norm = RMSNorm(config.width)
        self.head = make_head(self.codec, config.width)
        # The early exit starts as a copy of the output head (paper, section 2.4), norm included (ours).
        self.early_norm = copy.deepcopy(self.norm)
        self.early_head = copy.deepcopy(self.head)
        self.auxiliary_head = self.codec.make_auxiliary_head(config.width)

    @property
    def token_multiple(self) -> int:
        """Number to a multiple of which the number of tokens M is padded."""
        # Flex attention is compiled for each M, so M should take few values.
        if compiles(self.head.weight.device):
            return 128
        return self._token_multiple

    @property
    def recomputes(self) -> bool:
        """Whether activations are recomputed in the backward pass."""
        return any(layer.recompute for layer in self.mid)

    def apply_token_layers(
        self,
        token_BMD: Tensor,
        position_BM: Tensor,
        gate_BM: Tensor | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """Return token representations Y' (eq. 4).

        Args:
            token_BMD: tokens.
            position_BM: byte position of each token's boundary, for RoPE.
            gate_BM: gates of the tokens in [0, 1], or None for ordinary tokens; see ``relaxed_attention``.
            segments: segments of the sequences, whose number of tokens lets a model with ``pack_tokens`` leave out the
                padding.

        Returns:
            Y', [B, M, D].
        """
        softcap = self.config.attention_softcap
        if self.packs and segments is not None:
            pack = Pack.of(
                segments.count_B,
                token_BMD.shape[1],
                bucket_size(segments.total),
            )
            packed = self._token_layers(
                pack.packed(token_BMD),
                pack.packed(position_BM),
                pack.attention(softcap),
            )
            return pack.padded(packed)
        if gate_BM is None:
            attention = select_attention(token_BMD.shape[1], token_BMD.device, softcap)
        else:
            attention = functools.partial(relaxed_attention, softcap=softcap, gate_BN=gate_BM)
        return self._token_layers(token_BMD, position_BM, attention)

    def _token_layers(
        self, token_BMD: Tensor, position_BM: Tensor, attention: AttentionFn
    ) -> Tensor:
        rotary = self.rotary(position_BM, token_BMD.dtype)
        for layer in self.mid:
            token_BMD = layer(token_BMD, rotary, attention)
        return token_BMD

    def decode_hidden(
        self, x_BTD: Tensor, action_BT: Tensor, boundary_BT: Tensor | None = None
    ) -> Tensor:
        """Return the normalised hidden states which the heads read, from byte representations and boundaries (eq. 3-5).

        Args:
            x_BTD: output of the encoder, or the same in a higher precision, as in observations.
            action_BT: 1 where a token ends; column 0 must be 1.
            boundary_BT: boundaries as floats which carry gradient. ``select`` reads them as gates in [0, 1] (column 0
                must be 1) and runs relaxed, at a higher cost; ``mean`` as straight-through decisions, equal to the
                actions in value; ``smooth`` as boundary probabilities. None for the actions alone. The clock of
                ``config.elapsed`` reads the actions in any case.

        Returns:
            [B, T, D].
        """
        y_BTD = self.pooling(
            self._to_compute_dtype(x_BTD),
            action_BT,
            boundary_BT,
            self.apply_token_layers,
            self.token_multiple,
        )
        if self.config.elapsed:
            y_BTD = y_BTD + self._to_compute_dtype(self.elapsed(elapsed_symbols(action_BT)))
        return self.norm(self._byte_layers(self.up, y_BTD))

    def decode(self, x_BTD: Tensor, action_BT: Tensor, boundary_BT: Tensor | None = None) -> Tensor:
        """Return the parameters of p(x_{i+1} | x_<=i, a_<=i) (eq. 6); the arguments are those of ``decode_hidden``.

        Returns:
            The head's output, [B, T, P].
        """
        return self.head(self.decode_hidden(x_BTD, action_BT, boundary_BT))

    def log_prob(self, y: Tensor, symbol: Tensor) -> Tensor:
        """Return the log-probability in nats of the next symbols: [.., D], [.., *symbol_shape] -> [..]."""
        return self._log_prob(self.codec, self.head, y, symbol)

    def early_log_prob(self, x: Tensor, symbol: Tensor) -> Tensor:
        """Return the early exit's log-probability of the next symbols, from the output of ``encode``."""
        return self._log_prob(self.codec, self.early_exit, x, symbol)

    def decode_samples(
        self, x_BTD: Tensor, action: Tensor, boundary: Tensor | None = None
    ) -> Tensor:
        """Apply ``decode_hidden`` to several samples of the boundaries: actions [.., B, T] -> [.., B, T, D]."""
        samples = action.shape[:-2]
        x = x_BTD.expand(*samples, *x_BTD.shape).flatten(0, -3)
        if boundary is not None:
            boundary = boundary.flatten(0, -2)
        return self.decode_hidden(x, action.flatten(0, -2), boundary).view(*action.shape, -1)

    def sequence_log_prob(self, y: Tensor, symbol_BN: Tensor) -> Tensor:
        """Return the log-probability in nats of what each symbol is followed by, [.., B, T], T = N - 1.

        It is ``log p(x_{i+1} | x_<=i, a_<=i)``, or ``Codec.trailing_log_prob`` if the codec has trailing symbols.

        Args:
            y: output of ``decode_samples``, [.., B, T, D], or of the known symbols alone, [.., B, N - trailing, D].
            symbol_BN: sequences, [B, N, *symbol_shape].
        """
        if self.codec.trailing:
            return self.codec.trailing_log_prob(self.auxiliary_head, y, symbol_BN)
        target_BT = symbol_BN[:, 1:]
        return self.log_prob(y, target_BT.expand(*y.shape[:-3], *target_BT.shape))

    def forward(self, symbol_BN: Tensor, action_BN: Tensor) -> Tensor:
        """Return the parameters of p(x_{i+1} | x_<=i, a_<=i) for given boundaries: [B, N, P]."""
        return self.decode(self.encode(symbol_BN), action_BN)

    def enable_activation_checkpointing(self) -> None:
        """Store only the layers' inputs for the backward pass: a third more arithmetic, a fraction of the memory."""
        for layer in (*self.down, *self.mid, *self.up):
            layer.recompute = True

    def pack_tokens(self) -> None:
        """Switch on sequence packing: the token-level layers compute no padding, with the same results."""
        self.packs = True

    def use_small_flex_blocks(self) -> None:
        """Use small attention blocks at byte level on a GPU, if the window fits into one, with the same results."""
        if self.config.window <= SMALL_BLOCK:
            self._block = SMALL_BLOCK

    def compile_layers(self) -> None:
        """Compile every layer, and the heads with the likelihoods.

        There is one compilation for all byte-level layers, and one for each size of a pack of tokens.
        """
        allow_many_shapes()
        self._token_multiple = 128
        options = None
        if compiles(self.head.weight.device):
            options = flex_options(self._block)
        for layer in (*self.down, *self.up):
            layer.compile(dynamic=False, options=options)
        # With dynamic sizes, torch 2.11 fails to lower flex_attention's soft-cap.
        for layer in self.mid:
            layer.compile(dynamic=False)
        self._log_prob = _compiled_log_prob()
