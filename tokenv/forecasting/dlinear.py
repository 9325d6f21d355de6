"""DLinear (Zeng et al. 2023, arXiv 2205.13504), solved exactly: a peer, fitted on the spot to a run's training windows.

DLinear forecasts a history by one linear map of its moving average and one of the rest, whose sum is any linear map of
the history: its squared error on the training windows has a least value, which least squares finds in one pass and
which its published training approaches (Toner & Darlow 2024, arXiv 2403.14587). What stopping early does there, a ridge
does here: it is chosen on the validation windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from tokenv.core.errors import UserError
from tokenv.data.series.windows import SeriesData, Windows
from tokenv.forecasting.contexts import Array, ContextBatch
from tokenv.lm.codecs.series import LAST, LOCATION, SCALE, VALUE

RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of a window's mean square
MAX_BATCH = 256
VALIDATION = 4096  # windows, at most


def fit_dlinear(data: SeriesData, horizon: int) -> Callable[[ContextBatch], Array]:
    """Fit to all training windows; the same map serves all channels.

    Windows are those that the run's model was trained on, framed as it reads them. The squared error is of
    standardised values, which forecasts are scored by. Missing values of a history count as the last one known;
    windows that miss a value of what came are left out.

    Args:
        data: of the run.
        horizon: steps H at the end of every window.

    Returns:
        From histories to forecasts [B, H, C] on the original scale; the first value fills up shorter ones.

    Raises:
        UserError: every window misses a value.
    """
    history = data.config.seq_len - horizon
    held_out = data.windows("validation", before=history, stride=1)
    some_P = np.linspace(0, len(held_out) - 1, min(len(held_out), VALIDATION)).astype(np.int64)
    square_FF, product_FH, count = _moments(data.windows("training"), None, horizon)
    if not count:
        raise UserError("peers = ['dlinear']: every training window misses a value of what came; expected some without")
    validation = _moments(held_out, some_P, horizon)[:2]
    ridge = square_FF.diagonal().mean() * torch.eye(len(square_FF), dtype=torch.float64)
    fitted = [torch.linalg.solve(square_FF + factor * ridge, product_FH) for factor in RIDGES]
    weight_FH = min(fitted, key=lambda weight: _error(weight, *validation))

    def predict(batch: ContextBatch) -> Array:
        symbol_BL = batch.symbol_BL[:, -history:]
        lacking = history - symbol_BL.shape[1]
        if lacking:
            symbol_BL = torch.cat([symbol_BL[:, :1].expand(-1, lacking, -1, -1), symbol_BL], 1)
        location_B1C, scale_B1C = symbol_BL[:, :1, :, LOCATION], symbol_BL[:, :1, :, SCALE]
        found_BHC = (_features(symbol_BL) @ weight_FH).mT
        return np.asarray((location_B1C + scale_B1C * found_BHC).numpy())

    return predict


def _features(symbol_BL: Tensor) -> Tensor:
    """Values in units of their frame, and a one: [B, L, C, 5] -> float64 [B, C, L + 1]."""
    value = torch.where(symbol_BL[..., VALUE].isnan(), symbol_BL[..., LAST], symbol_BL[..., VALUE])
    read_BCL = ((value - symbol_BL[..., LOCATION]) / symbol_BL[..., SCALE]).mT
    return torch.cat([read_BCL, torch.ones_like(read_BCL[..., :1])], -1)


def _moments(windows: Windows, index_P: Array | None, horizon: int) -> tuple[Tensor, Tensor, int]:
    """Sums over windows of features times features, and of features times what came; and how many there were."""
    features = windows.config.seq_len - horizon + 1
    square_FF, product_FH = (torch.zeros(features, size, dtype=torch.float64) for size in (features, horizon))
    count = 0
    for x_WF, y_WH in _examples(windows, np.arange(len(windows)) if index_P is None else index_P, horizon):
        square_FF += x_WF.T @ x_WF
        product_FH += x_WF.T @ y_WH
        count += len(x_WF)
    return square_FF, product_FH, count


def _examples(windows: Windows, index_P: Array, horizon: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Features and what came, both weighted such that errors are those of standardised values."""
    for first in range(0, len(index_P), MAX_BATCH):
        index_B = index_P[first : first + MAX_BATCH]
        symbol_BN = windows.take(index_B).symbol_BN
        std_BC = torch.from_numpy(np.stack([windows.series[place].std_C for place in windows.series_P[index_B]]))
        weight_BC1 = (symbol_BN[:, 0, :, SCALE] / std_BC).unsqueeze(-1)
        ahead = symbol_BN[:, -horizon:]
        y_BCH = ((ahead[..., VALUE] - ahead[..., LOCATION]) / ahead[..., SCALE]).mT
        whole_BC = ~y_BCH.isnan().any(-1)
        yield (_features(symbol_BN[:, :-horizon]) * weight_BC1)[whole_BC], (y_BCH * weight_BC1)[whole_BC]


def _error(weight_FH: Tensor, square_FF: Tensor, product_FH: Tensor) -> float:
    """Squared error of a map on windows with these sums, but for what does not depend on it."""
    return float(((square_FF @ weight_FH - 2 * product_FH) * weight_FH).sum())
