"""Chunking: how bytes become tokens, and how tokens come back to bytes.

``SelectChunking`` is the paper's (eq. 7-9), ``DeviationChunking`` a variant of it, ``MeanChunking`` that of dynamic
token pooling, ``EMASmoothing`` H-Net's. Each has a stepper, which computes the same one byte at a time.
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.lm.segments import Segments, distribute, ema, relaxed_tokens, segment, select

EPSILON = 1e-9  # added to the size of a segment whose bytes are averaged, as published
MARGIN = 1e-4  # distance from 0 and 1 of the probabilities with which tokens are smoothed


class TokenLayers(Protocol):
    """Token-level layers; see ``UNet.apply_token_layers``."""

    def __call__(
        self,
        token_BMD: Tensor,
        position_BM: Tensor,
        gate_BM: Tensor | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """[B, M, D] -> [B, M, D]."""


class Chunking(nn.Module, ABC):
    """Common to all chunkings.

    Args:
        width: model width D.

    Attributes:
        leading_tokens: tokens of every sequence before that of its first boundary.
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
        """Return the input of the byte-level decoder, Y: [B, T, D].

        Args:
            x_BTD: output of the encoder.
            action_BT: 1 where a token ends; column 0 must be 1.
            boundary_BT: boundaries as a tensor which carries gradient; its values depend on the chunking.
            apply_token_layers: token-level layers.
            multiple: the number of tokens is padded to a multiple of this number.
        """

    @abstractmethod
    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> "Stepper":
        """Return the state which computes the same for B rows, one byte at a time."""


class Stepper(ABC):
    """State of a chunking while symbols come one at a time; rows start anew at different times."""

    @abstractmethod
    def token(self, x_BD: Tensor) -> Tensor:
        """Return the token which would close with this byte: [B, D] -> [B, D]."""

    @abstractmethod
    def read(
        self,
        x_BD: Tensor,
        token_BD: Tensor,
        boundary_B: Tensor,
        prob_B: Tensor | None,
    ) -> Tensor:
        """Return the input of the byte-level decoder at this byte, [B, D].

        Args:
            x_BD: output of the encoder.
            token_BD: output of the token-level layers for ``token``; read only where a boundary is drawn.
            boundary_B: True where a token ends.
            prob_B: boundary probability, for chunkings which read it.
        """

    @abstractmethod
    def reset(self, rows_B: Tensor) -> None:
        """Reset the rows which start anew."""

    def leading(self) -> Tensor | None:
        """Return the token before the first byte, [B, D]; None if there is none."""
        return None

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times, side by side. The whole state consists of tensors [B, ..]."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.repeat_interleave(times, 0))


class _NewestTokenStepper(Stepper):
    """Adds the newest token of each row to the byte."""

    def __init__(
        self,
        batch: int,
        width: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.newest_BD = torch.zeros(batch, width, device=device, dtype=dtype)

    def reset(self, rows_B: Tensor) -> None:
        self.newest_BD = self.newest_BD.masked_fill(rows_B[:, None], 0.0)

    def token(self, x_BD: Tensor) -> Tensor:
        return x_BD

    def read(
        self,
        x_BD: Tensor,
        token_BD: Tensor,
        boundary_B: Tensor,
        prob_B: Tensor | None,
    ) -> Tensor:
        boundary_B1 = boundary_B[:, None]
        self.newest_BD = torch.where(boundary_B1, self._read_token(x_BD, token_BD), self.newest_BD)
        return x_BD + self.newest_BD

    def _read_token(self, x_BD: Tensor, token_BD: Tensor) -> Tensor:
        """Return what bytes add of a token which closes with this byte."""
        return token_BD


class _ChangeStepper(_NewestTokenStepper):
    def _read_token(self, x_BD: Tensor, token_BD: Tensor) -> Tensor:
        return token_BD - x_BD


class SelectChunking(Chunking):
    """A token is the byte vector at its boundary; every byte adds the newest token to itself (eq. 7-9).

    ``Y_t = X_t + Y'_k``, k the newest token closed at or before t. A ``boundary_BT`` holds gates s in [0, 1], 1 in
    column 0, and requires the relaxed pass (``relaxed_tokens``), which is differentiable in s and equal to the hard
    one at s = a. It costs more: the token-level layers run over all N bytes instead of M tokens, with dense attention,
    time and memory O(N^2).
    """

    stepper_class = _NewestTokenStepper

    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """Return Y; see ``Chunking``."""
        apply_token_layers = self._read_layers(apply_token_layers)
        if boundary_BT is not None:
            return x_BTD + relaxed_tokens(x_BTD, boundary_BT, apply_token_layers)
        segments = segment(action_BT, multiple)
        token_BMD = apply_token_layers(
            select(x_BTD, segments), segments.boundary_BM, segments=segments
        )
        return x_BTD + distribute(token_BMD, segments)

    def _read_layers(self, apply_token_layers: TokenLayers) -> TokenLayers:
        """Return the function from tokens to what bytes add of them."""
        return apply_token_layers

    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> Stepper:
        """Return a state which holds what bytes add of the newest token."""
        return self.stepper_class(batch, self.width, device, dtype)


class DeviationChunking(SelectChunking):
    """As ``SelectChunking``, but a byte adds what the token-level layers change of its token.

    ``Y_t = X_t + Y'_k - X'_k`` with X'_k the byte vector at the boundary: layers which change nothing leave no trace of
    the token. The independent policy of the code which the authors of arXiv 2602.13940 released has this form; their
    sequential policy adds ``Y'_k``.
    """

    stepper_class = _ChangeStepper

    def _read_layers(self, apply_token_layers: TokenLayers) -> TokenLayers:
        def change(token_BMD: Tensor, *arguments: Any, **options: Any) -> Tensor:
            return apply_token_layers(token_BMD, *arguments, **options) - token_BMD

        return change


def segment_mean(x_BTD: Tensor, group_BT: Tensor, weight_BT: Tensor, count: int) -> Tensor:
    """Return ``sum_t w_t x_t / (sum_t w_t + 1e-9)`` over the bytes of each group: [B, count, D], in O(T D).

    Sums are computed in float64: rounded to the model's precision, they then hardly depend on their order, which is
    arbitrary on a GPU.

    Args:
        x_BTD: byte vectors.
        group_BT: number of each byte's group; ``count`` and above are dropped.
        weight_BT: w.
        count: groups per sequence.
    """
    batch, _, width = x_BTD.shape
    index_B = torch.arange(batch, device=x_BTD.device)
    offset_B1 = index_B.unsqueeze(1) * (count + 1)
    slot = group_BT.clamp(max=count) + offset_B1
    slot = slot.flatten()
    weight_BT = weight_BT.double()
    total = weight_BT.new_zeros(batch * (count + 1), width)
    weighted = x_BTD * weight_BT.unsqueeze(-1)
    total = total.index_add(0, slot, weighted.flatten(0, 1))
    size = weight_BT.new_zeros(batch * (count + 1))
    size = size.index_add(0, slot, weight_BT.flatten())
    mean = total / (size + EPSILON).unsqueeze(-1)
    return mean.view(batch, count + 1, width)[:, :count].to(x_BTD.dtype)


class MeanChunking(Chunking):
    """Dynamic token pooling (Nawrot et al. 2023, arXiv 2211.09761): a token is the mean of its bytes.

    Token k is the mean of the bytes of its segment, layer-normalised; token 0 is a learned null group. A boundary byte
    closes its segment and belongs to it; bytes after the last boundary are in no token. ``Y_t = X_t + Y'_k`` with
    ``k = cumsum(a)_t``. The null group is at position -1.

    A ``boundary_BT`` holds straight-through boundaries b, equal to the actions in value. The published weights of
    byte t in segment k are ``1 - (k - c_t)`` where ``k = c_t = cumsum(b)_t - b_t`` and 0 elsewhere, divided by their
    sum over bytes: value 1 and the gradient of c_t, so that no dense [T, M] matrix is needed. The published weights
    of the way back are normalised over segments, of which each byte has one, which leaves a gradient of 1e-9 of the
    weight's own; here it is 0.

    Args:
        width: model width D.
    """

    leading_tokens = 1

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.null_D = nn.Parameter(torch.randn(width))
        self.norm = nn.LayerNorm(width)

    def normalise(self, token: Tensor) -> Tensor:
        """Apply LayerNorm in float32 or finer, in which its gradients are summed: [.., D] -> [.., D]."""
        fine = torch.promote_types(token.dtype, torch.float32)
        weight = self.norm.weight.to(fine)
        bias = self.norm.bias.to(fine)
        return F.layer_norm(
            token.to(fine),
            (self.width,),
            weight,
            bias,
            self.norm.eps,
        ).to(token.dtype)

    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """Return Y; see ``Chunking``."""
        # The null group is the segment of a byte before the first.
        null_B1D = self.null_D.to(x_BTD.dtype).expand(x_BTD.shape[0], 1, -1)
        action_BT = F.pad(action_BT, (1, 0), value=1)
        segments = segment(action_BT, multiple)
        weight_BT = torch.ones(action_BT.shape, dtype=torch.float64, device=x_BTD.device)
        if boundary_BT is not None:
            boundary_BT = boundary_BT.double()
            earlier_BT = F.pad(boundary_BT.cumsum(1) - boundary_BT, (1, 0))
            weight_BT = weight_BT + (earlier_BT - earlier_BT.detach())
        group_BT = segments.token_index_BT + 1 - action_BT
        x_BND = torch.cat([null_B1D, x_BTD], 1)
        token_BMD = segment_mean(x_BND, group_BT, weight_BT, segments.boundary_BM.shape[1])
        token_BMD = self.normalise(token_BMD)
        token_BMD = apply_token_layers(token_BMD, segments.boundary_BM - 1, segments=segments)
        return x_BTD + distribute(token_BMD, segments)[:, 1:]

    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> Stepper:
        """Return a state which holds the newest token, and sum and number of the bytes since its boundary."""
        return _MeanStepper(self, batch, device, dtype)


class _MeanStepper(_NewestTokenStepper):
    def __init__(
        self,
        chunking: MeanChunking,
        batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(batch, chunking.width, device, dtype)
        self.chunking = chunking
        self.sum_BD = torch.zeros(batch, chunking.width, device=device, dtype=torch.float64)
        self.size_B = torch.zeros(batch, device=device, dtype=torch.float64)

    def reset(self, rows_B: Tensor) -> None:
        super().reset(rows_B)
        self._clear_segments(rows_B)

    def _clear_segments(self, rows_B: Tensor) -> None:
        self.sum_BD = self.sum_BD.masked_fill(rows_B[:, None], 0.0)
        self.size_B = self.size_B.masked_fill(rows_B, 0.0)

    def leading(self) -> Tensor:
        null_BD = self.chunking.null_D.detach().to(self.newest_BD.dtype).expand_as(self.newest_BD)
        return self.chunking.normalise(null_BD)

    def token(self, x_BD: Tensor) -> Tensor:
        self.sum_BD = self.sum_BD + x_BD
        self.size_B = self.size_B + 1
        size_B1 = (self.size_B + EPSILON)[:, None]
        mean_BD = self.sum_BD / size_B1
        return self.chunking.normalise(mean_BD.to(x_BD.dtype))

    def read(
        self,
        x_BD: Tensor,
        token_BD: Tensor,
        boundary_B: Tensor,
        prob_B: Tensor | None,
    ) -> Tensor:
        self._clear_segments(boundary_B)
        return super().read(x_BD, token_BD, boundary_B, prob_B)


class EMASmoothing(Chunking):
    """H-Net's chunking (Hwang et al. 2025, arXiv 2507.07955): tokens are smoothed by their probabilities.

    A token is the byte vector at its boundary. With probabilities p, ``P_k = clamp(p at boundary k, 1e-4, 1 - 1e-4)``,
    Y' the output of the token-level layers, k the newest token of byte t and the confidence ``c_t = p_t`` at a boundary
    and ``1 - p_t`` elsewhere::

        z_k = P_k Y'_k + (1 - P_k) z_{k-1}
        Y_t = z_k STE(c_t) + residual_proj(X_t)

    STE has value 1 and the identity's gradient. ``residual_proj`` has a bias, starts with zero weight, and computes
    in its own precision, as smoothing does. ``boundary_BT`` holds p; without it P = c = 1.

    Args:
        width: model width D.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.residual_proj = nn.Linear(width, width)
        nn.init.zeros_(self.residual_proj.weight)

    def residual(self, x: Tensor) -> Tensor:
        """Project in the projection's own precision: [.., D] -> [.., D]."""
        return self.residual_proj(x.to(self.residual_proj.weight.dtype))

    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """Return Y; see ``Chunking``."""
        segments = segment(action_BT, multiple)
        residual_BTD = self.residual(x_BTD)
        token_BMD = apply_token_layers(
            select(x_BTD, segments), segments.boundary_BM, segments=segments
        )
        token_BMD = token_BMD.to(residual_BTD.dtype)
        if boundary_BT is None:
            y_BTD = distribute(token_BMD, segments)
        else:
            prob_BT = boundary_BT.to(residual_BTD.dtype)
            prob_BM = prob_BT.gather(1, segments.boundary_BM).clamp(MARGIN, 1 - MARGIN)
            confidence_BT = torch.where(action_BT.bool(), prob_BT, 1 - prob_BT)
            one_BT = 1 + (confidence_BT - confidence_BT.detach())
            y_BTD = distribute(ema(prob_BM, token_BMD), segments) * one_BT.unsqueeze(-1)
        return (y_BTD + residual_BTD).to(x_BTD.dtype)

    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> Stepper:
        """Return a state which holds the newest smoothed token z."""
        return _EMASmoothingStepper(self, batch, device)


class _EMASmoothingStepper(_NewestTokenStepper):
    """Keeps the newest smoothed token z as the newest token."""

    def __init__(self, chunking: EMASmoothing, batch: int, device: torch.device) -> None:
        super().__init__(batch, chunking.width, device, chunking.residual_proj.weight.dtype)
        self.chunking = chunking

    def read(
        self,
        x_BD: Tensor,
        token_BD: Tensor,
        boundary_B: Tensor,
        prob_B: Tensor | None,
    ) -> Tensor:
        z_BD = token_BD.to(self.newest_BD.dtype)
        if prob_B is not None:
            prob_B1 = prob_B.to(z_BD.dtype).clamp(MARGIN, 1 - MARGIN).unsqueeze(-1)
            z_BD = prob_B1 * z_BD + (1 - prob_B1) * self.newest_BD
        self.newest_BD = torch.where(
            boundary_B[:, None],
            z_BD,
            self.newest_BD,
        )
        return (self.newest_BD + self.chunking.residual(x_BD)).to(x_BD.dtype)
