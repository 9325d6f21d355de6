"""The U-Net's first part, which agents may also bring alone: byte representations, and the early exit made of them."""

import torch
from torch import Tensor, nn

from tokenv.lm.attention import BLOCK, select_attention
from tokenv.lm.codecs.base import Codec, make_head
from tokenv.lm.config import UNetConfig
from tokenv.lm.layers import DecoderLayer, RMSNorm, RotaryTable


def make_layers(config: UNetConfig, count: int, mlp: int) -> nn.ModuleList:
    """``count`` layers of the model's width, with an MLP ``mlp`` times as wide."""
    return nn.ModuleList(DecoderLayer(config.width, config.heads, mlp * config.width) for _ in range(count))


class Encoder(nn.Module):
    """Byte-level layers before the boundaries are drawn (paper, eq. 1), and the early exit (eq. 14).

    Args:
        config: sizes; of the layers only ``down_layers`` are made.
        codec: what the model reads and predicts.
        compute_dtype: precision of the activations; None keeps the parameters'.
        early_exit: whether to make one here; the U-Net makes its own of its output head.
    """

    def __init__(
        self, config: UNetConfig, codec: Codec, compute_dtype: torch.dtype | None = None, *, early_exit: bool = True
    ) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.codec = codec
        self._block = BLOCK
        self.down = make_layers(config, config.down_layers, config.byte_mlp)
        if early_exit:
            self.early_norm, self.early_head = RMSNorm(config.width), make_head(codec, config.width)

    def embed(self, symbol: Tensor) -> Tensor:
        """Embedding in the compute precision: [.., *symbol_shape] -> [.., D]."""
        return self._computing(self.codec.embed(symbol))

    def _computing(self, x: Tensor) -> Tensor:
        """The same in the compute precision."""
        return x if self.compute_dtype is None else x.to(self.compute_dtype)

    def encode(self, symbol_BN: Tensor) -> Tensor:
        """Byte representations X (eq. 1): [B, N, *symbol_shape] -> [B, N, D]."""
        return self._byte_layers(self.down, self.embed(symbol_BN))

    def early_exit(self, x: Tensor) -> Tensor:
        """Parameters of p_early(x_{i+1} | x_<=i) from X_i alone (eq. 14): [.., D] -> [.., P]."""
        return self.early_head(self.early_norm(self._computing(x)))

    @torch.no_grad()
    def early_entropy(self, x: Tensor) -> Tensor:
        """Entropy of p_early(x_{i+1} | x_<=i) in nats, without gradient: [.., D] -> [..]."""
        return self.codec.entropy(self.early_exit(x))

    def rotary(self, position: Tensor, dtype: torch.dtype) -> RotaryTable:
        """RoPE's table at given byte positions."""
        return RotaryTable(position, self.config.head_size, self.config.rope_base, dtype)

    def _byte_layers(self, layers: nn.ModuleList, x_BND: Tensor) -> Tensor:
        rotary = self.rotary(torch.arange(x_BND.shape[1], device=x_BND.device), x_BND.dtype)
        config = self.config
        attention = select_attention(x_BND.shape[1], x_BND.device, config.attention_softcap, config.window, self._block)
        for layer in layers:
            x_BND = layer(x_BND, rotary, attention)
        return x_BND
