"""Dynamic token pooling (Nawrot et al. 2023, arXiv 2211.09761): a token is the mean of its bytes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenv.lm.chunking.select import Chunking, NewestTokenStepper, Stepper, TokenLayers, distribute, segment

EPSILON = 1e-9  # added to a segment's size, as published


def segment_mean(x_BTD: Tensor, group_BT: Tensor, weight_BT: Tensor, count: int) -> Tensor:
    """``sum_t w_t x_t / (sum_t w_t + 1e-9)`` over the bytes of each group: [B, count, D]; time and memory O(T D).

    Sums run in float64: rounded to the model's precision, they then hardly depend on their order, which a GPU is
    free to choose.

    Args:
        x_BTD: byte vectors.
        group_BT: number of each byte's group; ``count`` and above are dropped.
        weight_BT: w.
        count: groups per sequence.
    """
    batch, _, width = x_BTD.shape
    offset_B1 = torch.arange(batch, device=x_BTD.device).unsqueeze(1) * (count + 1)
    slot = (group_BT.clamp(max=count) + offset_B1).flatten()
    weight_BT = weight_BT.double()
    total = weight_BT.new_zeros(batch * (count + 1), width)
    total = total.index_add(0, slot, (x_BTD * weight_BT.unsqueeze(-1)).flatten(0, 1))
    size = weight_BT.new_zeros(batch * (count + 1)).index_add(0, slot, weight_BT.flatten())
    mean = (total / (size + EPSILON).unsqueeze(-1)).view(batch, count + 1, width)
    return mean[:, :count].to(x_BTD.dtype)


class MeanChunking(Chunking):
    """Token k is the mean of its segment's bytes, layer-normalised; token 0 is a learned null group.

    A boundary byte closes its segment and belongs to it; bytes after the last boundary are in no token. A byte adds
    token number ``cumsum(a)_t`` to itself. The null group stands at position -1.

    A ``boundary_BT`` holds straight-through boundaries b, equal to the actions in value. The published weights of
    byte t in segment k are ``1 - (k - c_t)`` where ``k = c_t = cumsum(b)_t - b_t`` and 0 elsewhere, divided by their
    sum over bytes: value 1 and the gradient of c_t, so that no dense [T, M] matrix is needed. The published weights
    of the way back are normalised over segments, each byte having just one, which leaves a gradient of 1e-9 of the
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
        """LayerNorm in its input's precision: [.., D] -> [.., D]."""
        weight, bias = self.norm.weight.to(token.dtype), self.norm.bias.to(token.dtype)
        return F.layer_norm(token, (self.width,), weight, bias, self.norm.eps)

    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """``Y_t = X_t + Y'_k``, ``k = cumsum(a)_t``."""
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
        token_BMD = segment_mean(torch.cat([null_B1D, x_BTD], 1), group_BT, weight_BT, segments.boundary_BM.shape[1])
        token_BMD = apply_token_layers(self.normalise(token_BMD), segments.boundary_BM - 1, segments=segments)
        return x_BTD + distribute(token_BMD, segments)[:, 1:]

    def stepper(self, batch: int, device: torch.device, dtype: torch.dtype) -> Stepper:
        """Remembers the newest token, and sum and number of the bytes since its boundary."""
        return _MeanStepper(self, batch, device, dtype)


class _MeanStepper(NewestTokenStepper):
    def __init__(self, pooling: MeanChunking, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(batch, pooling.width, device, dtype)
        self.pooling = pooling
        self.sum_BD = torch.zeros(batch, pooling.width, device=device, dtype=torch.float64)
        self.size_B = torch.zeros(batch, device=device, dtype=torch.float64)

    def reset(self, rows_B: Tensor) -> None:
        super().reset(rows_B)
        self._close(rows_B)

    def _close(self, rows_B: Tensor) -> None:
        self.sum_BD = self.sum_BD.masked_fill(rows_B[:, None], 0.0)
        self.size_B = self.size_B.masked_fill(rows_B, 0.0)

    def leading(self) -> Tensor:
        null_BD = self.pooling.null_D.detach().to(self.newest_BD.dtype).expand_as(self.newest_BD)
        return self.pooling.normalise(null_BD)

    def token(self, x_BD: Tensor) -> Tensor:
        self.sum_BD, self.size_B = self.sum_BD + x_BD, self.size_B + 1
        return self.pooling.normalise((self.sum_BD / (self.size_B + EPSILON)[:, None]).to(x_BD.dtype))

    def read(self, x_BD: Tensor, token_BD: Tensor, boundary_B: Tensor, prob_B: Tensor | None) -> Tensor:
        self._close(boundary_B)
        return super().read(x_BD, token_BD, boundary_B, prob_B)
