"""Fit DLinear exactly: one linear map from the history of a series to its horizon, for all channels.

DLinear (Zeng et al. 2023, arXiv 2205.13504) forecasts a history by one linear map of its moving average and one of the
remainder, whose sum is any linear map of the history: least squares finds the minimum of its squared error on the
training windows in one pass, which its published training approaches (Toner & Darlow 2024, arXiv 2403.14587). A ridge,
chosen on the validation windows, takes the place of early stopping.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenv.core.errors import UserError
from tokenv.data.windows import Array, SeriesData, Windows
from tokenv.lm.codecs.series import known_values

RIDGES = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # relative to a window's mean square
MAX_BATCH = 256
MAX_VALIDATION_WINDOWS = 4096


def fit_linear_map(data: SeriesData, horizon: int) -> Tensor:
    """Fit the map to the windows on which a run trains, framed as the run's model reads them.

    The squared error is that of standardised values, by which forecasts are scored. Missing values of a history are
    replaced by the last known one; windows with a missing target value are left out.

    Args:
        data: data of the run.
        horizon: number of steps H at the end of every window.

    Returns:
        Weights, float64 [L + 1, H], for ``tokenv.lm.codecs.series.predict_linear``.

    Raises:
        UserError: every window has a missing value.
    """
    held_out = data.windows("validation", before=data.config.seq_len - horizon, stride=1)
    chosen_P = np.linspace(0, len(held_out) - 1, min(len(held_out), MAX_VALIDATION_WINDOWS)).astype(np.int64)
    square_FF, product_FH, count = _sums(data.windows("training"), None, horizon)
    if not count:
        raise UserError(
            "peers = ['dlinear'] or model.linear_path: every training window has a missing value in its last "
            f"{horizon} steps: expected some without"
        )
    validation = _sums(held_out, chosen_P, horizon)[:2]
    ridge = square_FF.diagonal().mean() * torch.eye(len(square_FF), dtype=torch.float64)
    weights = [torch.linalg.solve(square_FF + factor * ridge, product_FH) for factor in RIDGES]
    return min(weights, key=lambda weight_FH: _squared_error(weight_FH, *validation))


def _sums(windows: Windows, index_P: Array | None, horizon: int) -> tuple[Tensor, Tensor, int]:
    """Return sums over windows of features times features and of features times targets, and the number of examples."""
    features = windows.config.seq_len - horizon + 1
    square_FF, product_FH = (torch.zeros(features, size, dtype=torch.float64) for size in (features, horizon))
    count = 0
    for x_WF, y_WH in _examples(windows, np.arange(len(windows)) if index_P is None else index_P, horizon):
        square_FF += x_WF.T @ x_WF
        product_FH += x_WF.T @ y_WH
        count += len(x_WF)
    return square_FF, product_FH, count


def _examples(windows: Windows, index_P: Array, horizon: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features and targets, both weighted such that errors are those of standardised values."""
    for first in range(0, len(index_P), MAX_BATCH):
        index_B = index_P[first : first + MAX_BATCH]
        symbol_BN = windows.take(index_B).symbol_BN
        std_BC = torch.from_numpy(np.stack([windows.series[index].std_C for index in windows.series_P[index_B]]))
        ahead = symbol_BN[:, -horizon:]
        value, location, scale, _, _ = ahead.unbind(-1)
        weight_BC1 = (scale[:, 0] / std_BC).unsqueeze(-1)
        y_BCH = ((value - location) / scale).mT
        complete_BC = ~y_BCH.isnan().any(-1)
        x_BCF = F.pad(known_values(symbol_BN[:, :-horizon]).mT, (0, 1), value=1.0)
        yield (x_BCF * weight_BC1)[complete_BC], (y_BCH * weight_BC1)[complete_BC]


def _squared_error(weight_FH: Tensor, square_FF: Tensor, product_FH: Tensor) -> float:
    """Return the squared error of a map on windows with these sums, up to a constant."""
    return float(((square_FF @ weight_FH - 2 * product_FH) * weight_FH).sum())
