"""Means over the batch and over samples, and the objective which gradient estimators descend.

Means over the batch are over the whole batch, whichever process holds its rows (``tokenv.core.distributed``).
"""

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, current_group


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``x`` with weights ``mask`` (bool or nonnegative), over all dimensions: [..], [..] -> [].

    It is 0 if all weights are.
    """
    weight = mask.to(x.dtype)
    total, count = all_reduce_sum((x * weight).sum(), weight.sum())
    return total / count.where(count > 0, 1.0)


def local_masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return this process's term of ``masked_mean``, for losses, which are summed over processes: [..], [..] -> []."""
    weight = mask.to(x.dtype)
    (count,) = all_reduce_sum(weight.sum())
    return (x * weight).sum() / count.where(count > 0, 1.0)


def _is_over_batch(x: Tensor, dim: int | tuple[int, ...]) -> bool:
    dims = (dim,) if isinstance(dim, int) else dim
    return any(each % x.dim() == x.dim() - 2 for each in dims)


def _sums_over(x: Tensor, weight: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return weighted sum and sum of weights along some dimensions, which keep size 1."""
    sums = (x * weight).sum(dim, keepdim=True), weight.sum(dim, keepdim=True)
    return all_reduce_sum(*sums) if _is_over_batch(x, dim) else sums


def mean_over(x: Tensor, mask: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the mean where ``mask`` is True along some dimensions, which keep size 1; 0 if it is False everywhere."""
    total, count = _sums_over(x, mask.to(x.dtype), dim)
    return total / count.clamp(min=1)


def any_over(mask: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Return whether ``mask`` is True anywhere along some dimensions, which are removed."""
    if not _is_over_batch(mask, dim):
        return mask.any(dim) if dim else mask
    (count,) = all_reduce_sum(mask.sum(dim))
    return count > 0


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
    sums = [(x * weight).transpose(-2, 0).flatten(1).sum(-1), weight.transpose(-2, 0).flatten(1).sum(-1)]
    total_R, count_R, location_R = _gather_rows(torch.stack([*sums, location_B.to(x.dtype)], -1)).unbind(-1)
    kernel_BR = torch.exp(-((location_B.to(x.dtype)[:, None] - location_R) / width).square() / 2)
    count_B = kernel_BR @ count_R
    return (kernel_BR @ total_R / count_B.where(count_B > 0, 1.0)).unsqueeze(-1)


def _gather_rows(rows: Tensor) -> Tensor:
    """Return the rows of the whole batch, of which these are some, with gradients: [B, ..] -> [R, ..]."""
    group = current_group()
    if group.size == 1:
        return rows
    before, after = group.rank * len(rows), (group.size - group.rank - 1) * len(rows)
    zeros = rows.new_zeros(before, *rows.shape[1:]), rows.new_zeros(after, *rows.shape[1:])
    (all_rows,) = all_reduce_sum(torch.cat([zeros[0], rows, zeros[1]]))
    return all_rows


def leave_one_out_mean(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the mean along ``dim`` of all other entries where ``mask`` is True; 0 where there are none."""
    weight = mask.to(x.dtype)
    total, count = _sums_over(x, weight, dim)
    others = (count - weight).clamp(min=0)
    return (total - x * weight) / others.where(others > 0, 1.0)


def conditional_noise(prob: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
    """Return noise u given ``a = [u < p]``, from a new uniform number: in (0, p) for a = 1, in (p, 1) for a = 0."""
    return torch.where(action.bool(), uniform * prob, prob + uniform * (1 - prob))


def mean_over_decisions(td: TensorDictBase, key: NestedKey) -> Tensor:
    """Return this process's term of a loss's mean over all decisions; 0 if the loss is not in the rollout: []."""
    return local_masked_mean(td[key], td[keys.DECISION_MASK]) if key in td else td[keys.LOG_LIKELIHOOD].new_zeros(())


def policy_objective(td: TensorDictBase) -> Tensor:
    """Return the objective of an estimator per decision: its loss, and if boundaries are relaxed also the model's loss.

    Args:
        td: rollout to which the estimator has been applied, [.., B, T].

    Returns:
        A scalar. If the estimator is unbiased, the expectation of its gradient with respect to policy and encoder
        is that of ``-1/decisions sum_{b,t} E_a[log p(x_{t+1} | x_<=t, a_<=t)]``.
    """
    loss = mean_over_decisions(td, keys.LOSS_POLICY)
    if keys.BOUNDARY in td:
        loss = loss - td[keys.LOG_LIKELIHOOD].sum() / td[keys.DECISION_MASK].sum()
    return loss
