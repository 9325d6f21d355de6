"""A peer to measure against: the same decoder layers over all bytes, and no tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokenv.lm.attention import attention_for
from tokenv.lm.codecs.base import ByteCodec, new_head
from tokenv.lm.config import UNetConfig
from tokenv.lm.encoder import make_layers
from tokenv.lm.layers import RMSNorm, RotaryTable


class PlainTransformer(nn.Module):
    """A byte-level transformer as wide and deep as the U-Net, each layer with full attention and the middle's MLP.

    Args:
        config: of the U-Net.
        compute_dtype: precision of the activations; None keeps the parameters'.
    """

    def __init__(self, config: UNetConfig, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.codec = ByteCodec(config.width, softcap=config.output_softcap)
        layers = config.down_layers + config.mid_layers + config.up_layers
        self.layers = make_layers(config, layers, config.token_mlp)
        self.norm, self.head = RMSNorm(config.width), new_head(self.codec, config.width)

    def loss(self, symbol_BN: Tensor) -> Tensor:
        """Nats per byte of x_2, ..., x_N: []."""
        x_BTD = self.codec.embed(symbol_BN[:, :-1])
        x_BTD = x_BTD if self.compute_dtype is None else x_BTD.to(self.compute_dtype)
        length, config = x_BTD.shape[1], self.config
        position_T = torch.arange(length, device=x_BTD.device)
        rotary = RotaryTable(position_T, config.head_size, config.rope_base, x_BTD.dtype)
        attention = attention_for(length, x_BTD.device, config.attention_softcap)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary, attention)
        return -self.codec.log_prob(self.head(self.norm(x_BTD)), symbol_BN[:, 1:]).mean()

    def compile_layers(self) -> None:
        """Compile every layer."""
        for layer in self.layers:
            layer.compile(dynamic=False)
