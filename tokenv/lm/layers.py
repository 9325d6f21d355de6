"""The modules of a Gemma-2 style decoder layer.

Parameters stay in their own (usually float32) precision; every layer computes in the precision of its input, so
that one cast of the embedding decides the precision of the whole model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokenv.core.devices import is_accelerator
from tokenv.lm.attention import AttentionFn

EPSILON = 1e-6


class Linear(nn.Linear):
    """A bias-free linear map in the precision of its input, initialised N(0, 1/fan_in)."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__(fan_in, fan_out, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., fan_in] -> [.., fan_out]."""
        return F.linear(x, self.weight.to(x.dtype))


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm with as few passes over memory as eager PyTorch allows: four times faster on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        square = norm.square() / x.shape[-1] + EPSILON
        scale = square.rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        products = (x * scale).mul_(grad)
        grad_weight = products.flatten(0, -2).sum(0)
        grad = grad * weight
        inner = torch.linalg.vecdot(grad, x).unsqueeze(-1)
        along = inner * scale.square() / -x.shape[-1]
        return torch.addcmul(grad, x, along).mul_(scale), grad_weight


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + 1e-6) * weight`` over the last dimension (Zhang & Sennrich 2019)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise: [.., D] -> [.., D]."""
        weight = self.weight.to(x.dtype)
        if is_accelerator(x.device):
            return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)
        return _RMSNormFunction.apply(x, weight)


def rotary_frequencies(
    head_size: int, base: float, dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Return the angles by which rotary position embeddings turn at each position, in radians, [d/2]."""
    power = torch.arange(0, head_size, 2, device=device, dtype=dtype) / head_size
    return base**-power


class RotaryTable:
    """Cosines and sines of rotary position embeddings (Su et al. 2021) for given positions.

    Args:
        position: integer positions, [.., N].
        head_size: even.
        base: base of the frequencies.
        dtype: precision of the result; the angles themselves are computed in float32 or finer.
    """

    def __init__(
        self,
        position: Tensor,
        head_size: int,
        base: float,
        dtype: torch.dtype,
    ) -> None:
        fine = torch.promote_types(dtype, torch.float32)
        frequency = rotary_frequencies(head_size, base, fine, position.device)
        angle = position.to(fine).unsqueeze(-1) * frequency
        self.cos = angle.cos().to(dtype).unsqueeze(-3)  # [.., 1, N, d/2]: the same for all heads
        self.sin = angle.sin().to(dtype).unsqueeze(-3)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate queries or keys: [.., H, N, d] -> [.., H, N, d]."""
        a, b = x.chunk(2, -1)
        first = a * self.cos - b * self.sin
        second = b * self.cos + a * self.sin
        return torch.cat([first, second], -1)


class _GeGLUFunction(torch.autograd.Function):
    """``gelu(gate) * up`` of two concatenated halves: it stores its input alone, and returns one gradient, not two."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, -1)
        activated = F.gelu(gate, approximate="tanh")
        torch.mul(grad, activated, out=grad_up)
        torch.ops.aten.gelu_backward.grad_input(
            grad * up,
            gate,
            approximate="tanh",
            grad_input=grad_gate,
        )
        return grad_gate_up


class MLP(nn.Module):
    """GeGLU: ``down(gelu(gate(x)) * up(x))`` (Shazeer 2020); gate and up are one matrix product."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = Linear(width, 2 * hidden)
        self.down = Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [.., D] -> [.., D]."""
        gate_up = self.gate_up(x)
        if is_accelerator(x.device):  # a compiled layer fuses it
            gate, up = gate_up.chunk(2, -1)
            return self.down(F.gelu(gate, approximate="tanh") * up)
        return self.down(_GeGLUFunction.apply(gate_up))


class DecoderLayer(nn.Module):
    """RMSNorm before and after attention and MLP, each added to the stream (Gemma 2).

    Attributes:
        recompute: whether to store only the input for the backward pass, and recompute the rest there.
    """

    recompute = False

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.pre_attention = RMSNorm(width)
        self.post_attention = RMSNorm(width)
        self.pre_mlp = RMSNorm(width)
        self.post_mlp = RMSNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, rotary: RotaryTable, attend: AttentionFn) -> Tensor:
        """Apply the layer.

        Args:
            x: residual stream, [B, N, D].
            rotary: rotary embeddings of the positions.
            attend: function of rotated q, k and v, each [B, H, N, d], which returns the attended values [B, H, N, d]:
                an attention function in the one-pass model, a cache in incremental decoding.
        """
        if self.recompute and x.requires_grad:
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            y: Tensor = checkpoint(self._forward, x, rotary, attend, **how)
            return y
        return self._forward(x, rotary, attend)

    def _forward(self, x: Tensor, rotary: RotaryTable, attend: AttentionFn) -> Tensor:
        qkv = self.qkv(self.pre_attention(x))
        qkv = qkv.unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = attend(rotary.rotate(q), rotary.rotate(k), v)
        attended = attended.transpose(1, 2).flatten(-2)
        x = x + self.post_attention(self.out(attended))
        return x + self.post_mlp(self.mlp(self.pre_mlp(x)))
