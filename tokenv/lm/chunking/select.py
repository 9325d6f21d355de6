"""From bytes to tokens and back: what every pooling does, and the paper's: select, distribute, add (eq. 7-9)."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tokenv.lm.chunking.relaxed import relaxed_tokens


class Segments(NamedTuple):
    """Which bytes closed a token, and which token each byte sees.

    Attributes:
        boundary_BM: position of the byte that closed token m; padding repeats position 0.
        newest_BT: number of the newest token closed at or before each byte.
        count_B: tokens of each sequence.
        total: tokens of all.
    """

    boundary_BM: Tensor
    token_index_BT: Tensor
    count_B: Tensor
    total: int


def segment(action_BT: Tensor, multiple: int = 1) -> Segments:
    """Turn boundary decisions into token positions.

    The longest token sequence of the batch fixes M; learning it and the total is the only host synchronisation of a
    pass.

    Args:
        action_BT: 1 where a token ends; column 0 must be 1, so that every byte has a token to see.
        multiple: M is padded to a multiple of this.
    """
    batch, length = action_BT.shape
    token_index_BT = action_BT.cumsum(1) - 1
    count_B = token_index_BT[:, -1] + 1
    most, total = torch.stack([count_B.max(), count_B.sum()]).tolist()
    longest = -(-most // multiple) * multiple
    slot_BT = torch.where(action_BT.bool(), token_index_BT, longest)
    position_BT = torch.arange(length, device=action_BT.device).expand(batch, length)
    boundary = torch.zeros(batch, longest + 1, dtype=torch.long, device=action_BT.device)
    return Segments(boundary.scatter_(1, slot_BT, position_BT)[:, :longest], token_index_BT, count_B, total)


def _gather_rows(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """``out[b, m] = x[b, index[b, m]]``; a flat index_select is several times faster than gather on a CPU."""
    batch, length, width = x_BND.shape
    offset_B1 = torch.arange(batch, device=x_BND.device).unsqueeze(1) * length
    flat = x_BND.reshape(-1, width).index_select(0, (index_BM + offset_B1).flatten())
    return flat.view(batch, -1, width)


def select(x_BTD: Tensor, segments: Segments) -> Tensor:
    """Downsample: token m is the byte vector at its boundary (eq. 7). [B, T, D] -> [B, M, D]."""
    return _gather_rows(x_BTD, segments.boundary_BM)


def distribute(token_BMD: Tensor, segments: Segments) -> Tensor:
    """Upsample: every byte receives the newest token closed at or before it (eq. 9). [B, M, D] -> [B, T, D]."""
    if token_BMD.is_cuda:
        return SortedGather.apply(token_BMD, segments.token_index_BT)
    return _gather_rows(token_BMD, segments.token_index_BT)


class SortedGather(torch.autograd.Function):
    """``out[b, t] = x[b, index[b, t]]`` for rows of ``index`` that never fall; its gradient is the same every time.

    Bytes of a token lie side by side, so its gradient is the sum of a segment, in float32 or finer; index_select's own
    gradient adds in the model's precision and, on a GPU, in any order.
    """

    @staticmethod
    def forward(ctx: Any, x_BMD: Tensor, index_BT: Tensor) -> Tensor:
        """[B, M, D], [B, T] -> [B, T, D]."""
        ctx.save_for_backward(index_BT)
        ctx.count = x_BMD.shape[1]
        return _gather_rows(x_BMD, index_BT)

    @staticmethod
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None]:
        """Sums over the bytes of each token: [B, M, D]."""
        (index_BT,) = ctx.saved_tensors
        batch = len(index_BT)
        bytes_BM = torch.zeros(batch, ctx.count, dtype=torch.long, device=index_BT.device)
        bytes_BM.scatter_add_(1, index_BT, torch.ones_like(index_BT))
        fine = grad_BTD.to(torch.promote_types(grad_BTD.dtype, torch.float32)).flatten(0, 1)
        total = torch.segment_reduce(fine, "sum", lengths=bytes_BM.flatten(), unsafe=True)
        return total.view(batch, ctx.count, -1).to(grad_BTD.dtype), None


class TokenLayers(Protocol):
    """The token-level layers, as a pooling sees them; see ``UNet.apply_token_layers``."""

    def __call__(
        self,
        token_BMD: Tensor,
        position_BM: Tensor,
        gate_BM: Tensor | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """[B, M, D] -> [B, M, D]."""


class Stepper(ABC):
    """A pooling's memory when symbols come one at a time; rows start anew at different times."""

    @abstractmethod
    def token(self, x_BD: Tensor) -> Tensor:
        """The token that would close with this byte: [B, D] -> [B, D]."""

    @abstractmethod
    def read(self, x_BD: Tensor, token_BD: Tensor, boundary_B: Tensor, prob_B: Tensor | None) -> Tensor:
        """What the byte-level decoder reads at this byte.

        Args:
            x_BD: the encoder's output.
            token_BD: what the token-level layers made of ``token``; counts only where a boundary is drawn.
            boundary_B: True where a token ends.
            prob_B: the boundary probability, for poolings that read it.
        """

    @abstractmethod
    def reset(self, rows_B: Tensor) -> None:
        """Forget the rows that start anew."""

    def leading(self) -> Tensor | None:
        """The token before the first byte, [B, D]; None where there is none."""
        return None

    def repeat(self, times: int) -> None:
        """Let each row stand for ``times`` rows, side by side. All that is remembered are tensors [B, ..]."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.repeat_interleave(times, 0))


class Chunking(nn.Module, ABC):
    """How bytes become tokens, and how tokens come back to bytes.

    Args:
        width: model width D.

    Attributes:
        leading_tokens: tokens of every sequence before its first boundary's.
    """

    leading_tokens: int = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    @abstractmethod
    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """What the byte-level decoder reads.

        Args:
            x_BTD: the encoder's output.
            action_BT: 1 where a token ends; column 0 must be 1.
            boundary_BT: the boundaries as a tensor that carries gradient; what it holds is each pooling's own.
            apply_token_layers: the token-level layers.
            multiple: the number of tokens is padded to a multiple of this.

        Returns:
            Y, [B, T, D].
        """

    @abstractmethod
    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> Stepper:
        """The same, one byte at a time, for B rows."""


class NewestTokenStepper(Stepper):
    """Adds each row's newest token to the byte."""

    def __init__(self, batch: int, width: int, device: torch.device, dtype: torch.dtype) -> None:
        self.newest_BD = torch.zeros(batch, width, device=device, dtype=dtype)

    def reset(self, rows_B: Tensor) -> None:
        """Forget the rows' newest tokens."""
        self.newest_BD = self.newest_BD.masked_fill(rows_B[:, None], 0.0)

    def token(self, x_BD: Tensor) -> Tensor:
        """The byte vector itself."""
        return x_BD

    def read(self, x_BD: Tensor, token_BD: Tensor, boundary_B: Tensor, prob_B: Tensor | None) -> Tensor:
        """``x_t + (newest token)``."""
        self.newest_BD = torch.where(boundary_B[:, None], token_BD, self.newest_BD)
        return x_BD + self.newest_BD


class SelectChunking(Chunking):
    """A token is the byte vector at its boundary; every byte adds the newest token to itself (eq. 7-9).

    A ``boundary_BT`` holds strengths s in [0, 1], 1 in column 0, and asks for the relaxed pass (``lm.relaxed``),
    differentiable in s and at s = a equal to the hard one. It costs more: the token-level layers run over all N
    bytes instead of M tokens, with dense attention, time and memory O(N^2).
    """

    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """``Y_t = X_t + Y'_k``, k the newest token closed at or before t."""
        if boundary_BT is not None:
            return x_BTD + relaxed_tokens(x_BTD, boundary_BT, apply_token_layers)
        segments = segment(action_BT, multiple)
        token_BMD = apply_token_layers(select(x_BTD, segments), segments.boundary_BM, segments=segments)
        return x_BTD + distribute(token_BMD, segments)

    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> Stepper:
        """Remembers the newest token."""
        return NewestTokenStepper(batch, self.width, device, dtype)
