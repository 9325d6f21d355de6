"""Means over the batch and over samples, for gradient estimators.

A mean over the batch is the mean of the whole batch, whichever process holds its rows (``tokenv.core.expectations``).
"""

import torch
from torch import Tensor

from tokenv.core.distributed import all_reduce_sum, current_group
from tokenv.core.expectations import (
    local_masked_mean,
    masked_mean,
    mean_over,
    mean_over_decisions,
    policy_objective,
    reduces_batch,
    weighted_sums,
)

__all__ = [
    "any_over",
    "conditional_noise",
    "kernel_weighted_mean",
    "leave_one_out_mean",
    "local_masked_mean",
    "masked_mean",
    "mean_over",
    "mean_over_batch",
    "mean_over_decisions",
    "policy_objective",
]


def any_over(mask: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Whether ``mask`` is True anywhere along some dimensions, which vanish."""
    if not reduces_batch(mask, dim):
        return mask.any(dim) if dim else mask
    (count,) = all_reduce_sum(mask.sum(dim))
    return count > 0


def mean_over_batch(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the batch at every position, of the sequences that reach it: [.., B, T] -> [.., 1, T]."""
    return mean_over(x, mask, -2)


def kernel_weighted_mean(x: Tensor, mask: Tensor, place_B: Tensor, width: float) -> Tensor:
    """Mean over the batch as each sequence sees it: others count the less, the further off they stand.

    ``sum_c K_bc sum_t x_ct / sum_c K_bc n_c``, ``K_bc = exp(-((s_b - s_c) / width)^2 / 2)`` (Nadaraya and Watson's
    kernel regression), n_c being the entries of c where ``mask`` is True. Where all stand at the same place this is
    ``masked_mean``.

    Args:
        x: [.., B, T].
        mask: of its shape, or [B, T].
        place_B: s, where each sequence stands.
        width: of the kernel.

    Returns:
        [B, 1]; 0 where nothing is.
    """
    weight = mask.to(x.dtype).expand(x.shape)
    own = [(x * weight).transpose(-2, 0).flatten(1).sum(-1), weight.transpose(-2, 0).flatten(1).sum(-1)]
    total_R, count_R, place_R = _of_everyone(torch.stack([*own, place_B.to(x.dtype)], -1)).unbind(-1)
    kernel_BR = torch.exp(-((place_B.to(x.dtype)[:, None] - place_R) / width).square() / 2)
    count_B = kernel_BR @ count_R
    return (kernel_BR @ total_R / count_B.where(count_B > 0, 1.0)).unsqueeze(-1)


def _of_everyone(rows: Tensor) -> Tensor:
    """The whole batch's rows, of which these are some: [B, ..] -> [R, ..]. Gradients flow."""
    group = current_group()
    if group.size == 1:
        return rows
    before, after = group.rank * len(rows), (group.size - group.rank - 1) * len(rows)
    nothing = rows.new_zeros(before, *rows.shape[1:]), rows.new_zeros(after, *rows.shape[1:])
    (every,) = all_reduce_sum(torch.cat([nothing[0], rows, nothing[1]]))
    return every


def leave_one_out_mean(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Mean along ``dim`` of all but the entry itself, where ``mask`` is True; 0 where there are no others."""
    weight = mask.to(x.dtype)
    total, count = weighted_sums(x, weight, dim)
    others = (count - weight).clamp(min=0)
    return (total - x * weight) / others.where(others > 0, 1.0)


def conditional_noise(prob: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
    """Noise u given that ``a = [u < p]``, from a fresh uniform number: on (0, p) for a = 1, on (p, 1) for a = 0."""
    return torch.where(action.bool(), uniform * prob, prob + uniform * (1 - prob))
