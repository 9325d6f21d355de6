"""Means over the batch and over samples, for gradient estimators.

A mean over the batch is the mean of the whole batch, whichever process holds its rows (``tokenv.core.expectations``).
"""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, current_group
from tokenv.core.expectations import (
    local_masked_mean,
    masked_mean,
    mean_over,
    mean_over_decisions,
    policy_objective,
    weighted_sums,
)

__all__ = [
    "conditional_noise",
    "kernel_weighted_mean",
    "leave_one_out_mean",
    "local_masked_mean",
    "log_explained_variance",
    "masked_mean",
    "mean_over",
    "mean_over_batch",
    "mean_over_decisions",
    "policy_objective",
    "weighted_sums",
]


def log_explained_variance(
    td: TensorDictBase, target: Tensor, residual: Tensor, name: str = "explained_variance"
) -> None:
    """Log ``1 - Var(residual) / Var(target)`` over all decisions of the batch, 0 where the target does not vary.

    Args:
        td: rollout, whose diagnostics get the value.
        target: credits or rewards, [.., B, T].
        residual: what a baseline leaves of them, [.., B, T].
        name: name of the metric.
    """
    mask, (residual, target) = td[keys.DECISION_MASK], (residual.detach(), target.detach())
    rest, whole = (
        masked_mean((x - masked_mean(x, mask)).square(), mask) for x in (residual, target)
    )
    share = torch.where(whole > 0, 1 - rest / whole.where(whole > 0, 1.0), 0.0)
    td.set((keys.DIAGNOSTICS, name), share.expand(target.shape))


def mean_over_batch(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the batch at every position, without ended sequences: [.., B, T] -> [.., 1, T]."""
    return mean_over(x, mask, -2)


def kernel_weighted_mean(x: Tensor, mask: Tensor, location_B: Tensor, width: float) -> Tensor:
    """Return a mean over the batch for each sequence, with kernel weights (Nadaraya-Watson regression).

    ``sum_c K_bc sum_t x_ct / sum_c K_bc n_c``, ``K_bc = exp(-((s_b - s_c) / width)^2 / 2)``, n_c being the number of
    entries of c where ``mask`` is True. If all s are equal this is ``masked_mean``.

    Args:
        x: values, [.., B, T].
        mask: mask of the shape of ``x``, or [B, T].
        location_B: s, location of each sequence.
        width: standard deviation of the kernel.

    Returns:
        [B, 1]; 0 if there are no entries.
    """
    weight = mask.to(x.dtype).expand(x.shape)
    sums = [
        (x * weight).transpose(-2, 0).flatten(1).sum(-1),
        weight.transpose(-2, 0).flatten(1).sum(-1),
    ]
    total_R, count_R, location_R = _gather_rows(
        torch.stack([*sums, location_B.to(x.dtype)], -1)
    ).unbind(-1)
    kernel_BR = torch.exp(-((location_B.to(x.dtype)[:, None] - location_R) / width).square() / 2)
    count_B = kernel_BR @ count_R
    return (kernel_BR @ total_R / count_B.where(count_B > 0, 1.0)).unsqueeze(-1)


def _gather_rows(rows: Tensor) -> Tensor:
    """Return the rows of the whole batch, of which these are some, with gradients: [B, ..] -> [R, ..]."""
    group = current_group()
    if group.size == 1:
        return rows
    before = group.rank * len(rows)
    after = (group.size - group.rank - 1) * len(rows)
    zeros = rows.new_zeros(before, *rows.shape[1:]), rows.new_zeros(after, *rows.shape[1:])
    (all_rows,) = all_reduce_sum(torch.cat([zeros[0], rows, zeros[1]]))
    return all_rows


def leave_one_out_mean(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the mean along ``dim`` of all other entries where ``mask`` is True; 0 where there are none."""
    weight = mask.to(x.dtype)
    total, count = weighted_sums(x, weight, dim)
    others = (count - weight).clamp(min=0)
    return (total - x * weight) / others.where(others > 0, 1.0)


def conditional_noise(prob: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
    """Return noise u given ``a = [u < p]``, from a new uniform number: in (0, p) for a = 1, in (p, 1) for a = 0."""
    return torch.where(action.bool(), uniform * prob, prob + uniform * (1 - prob))
