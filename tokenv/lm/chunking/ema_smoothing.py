"""H-Net's way from bytes to tokens and back (Hwang et al. 2025, arXiv 2507.07955): select, smooth, weigh, project."""

import torch
from torch import Tensor, nn

from tokenv.lm.chunking.relaxed import ema
from tokenv.lm.chunking.select import Chunking, Stepper, TokenLayers, distribute, segment, select

MARGIN = 1e-4  # P stays this far from 0 and 1


class EMASmoothing(Chunking):
    """A token is the byte vector at its boundary; on the way back tokens are smoothed by their probabilities.

    With probabilities p, ``P_k = clamp(p at boundary k, 1e-4, 1 - 1e-4)``, Y' the token-level layers' output, k the
    newest token of byte t and the confidence ``c_t = p_t`` at a boundary and ``1 - p_t`` elsewhere::

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
        """[.., D] -> [.., D], in the projection's own precision."""
        return self.residual_proj(x.to(self.residual_proj.weight.dtype))

    def forward(
        self,
        x_BTD: Tensor,
        action_BT: Tensor,
        boundary_BT: Tensor | None,
        apply_token_layers: TokenLayers,
        multiple: int = 1,
    ) -> Tensor:
        """``Y_t = z_k STE(c_t) + residual_proj(X_t)``."""
        segments = segment(action_BT, multiple)
        residual_BTD = self.residual(x_BTD)
        token_BMD = apply_token_layers(select(x_BTD, segments), segments.boundary_BM, segments=segments)
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
        """Remembers the newest smoothed token z."""
        return _EMASmoothingStepper(self, batch, device)


class _EMASmoothingStepper(Stepper):
    def __init__(self, pooling: EMASmoothing, batch: int, device: torch.device) -> None:
        self.pooling = pooling
        self.z_BD = torch.zeros(batch, pooling.width, device=device, dtype=pooling.residual_proj.weight.dtype)

    def reset(self, rows_B: Tensor) -> None:
        self.z_BD = self.z_BD.masked_fill(rows_B[:, None], 0.0)

    def token(self, x_BD: Tensor) -> Tensor:
        return x_BD

    def read(self, x_BD: Tensor, token_BD: Tensor, boundary_B: Tensor, prob_B: Tensor | None) -> Tensor:
        z_BD = token_BD.to(self.z_BD.dtype)
        if prob_B is not None:
            prob_B1 = prob_B.to(z_BD.dtype).clamp(MARGIN, 1 - MARGIN).unsqueeze(-1)
            z_BD = prob_B1 * z_BD + (1 - prob_B1) * self.z_BD
        self.z_BD = torch.where(boundary_B[:, None], z_BD, self.z_BD)
        return (self.z_BD + self.pooling.residual(x_BD)).to(x_BD.dtype)
