"""Compute means over the batch and over samples, and the objective that gradient estimators descend.

A mean over the batch is that of the whole batch, whoever holds its rows (``tokenv.core.distributed``).
"""

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum, current_group


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` with weights ``mask`` (bool, or any of 0 or more), over all dimensions: [..], [..] -> [].

    0 where nothing is.
    """
    weight = mask.to(x.dtype)
    total, count = all_reduce_sum((x * weight).sum(), weight.sum())
    return total / count.where(count > 0, 1.0)


def local_masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """This process's part of ``masked_mean``, for losses, whose parts add up: [..], [..] -> []."""
    weight = mask.to(x.dtype)
    (count,) = all_reduce_sum(weight.sum())
    return (x * weight).sum() / count.where(count > 0, 1.0)


def _over_batch(x: Tensor, dim: int | tuple[int, ...]) -> bool:
    dims = (dim,) if isinstance(dim, int) else dim
    return any(each % x.dim() == x.dim() - 2 for each in dims)


def _sums_over(x: Tensor, weight: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, ...]:
    """Weighted sum and sum of weights along some dimensions, which stay with size 1."""
    sums = (x * weight).sum(dim, keepdim=True), weight.sum(dim, keepdim=True)
    return all_reduce_sum(*sums) if _over_batch(x, dim) else sums


def mean_over(x: Tensor, mask: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Mean where ``mask`` is True along some dimensions, which stay with size 1. 0 where nothing is."""
    total, count = _sums_over(x, mask.to(x.dtype), dim)
    return total / count.clamp(min=1)


def any_over(mask: Tensor, dim: tuple[int, ...]) -> Tensor:
    """Whether ``mask`` is True anywhere along some dimensions, which vanish."""
    if not _over_batch(mask, dim):
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
    total, count = _sums_over(x, weight, dim)
    others = (count - weight).clamp(min=0)
    return (total - x * weight) / others.where(others > 0, 1.0)


def conditional_noise(prob: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
    """Noise u given that ``a = [u < p]``, from a fresh uniform number: on (0, p) for a = 1, on (p, 1) for a = 0."""
    return torch.where(action.bool(), uniform * prob, prob + uniform * (1 - prob))


def mean_over_decisions(td: TensorDictBase, key: NestedKey) -> Tensor:
    """Mean of a loss over all decisions, 0 where nobody has written it; of a shared batch this process's part: []."""
    return local_masked_mean(td[key], td[keys.DECISION_MASK]) if key in td else td[keys.LOG_LIKELIHOOD].new_zeros(())


def policy_objective(td: TensorDictBase) -> Tensor:
    """What an estimator descends, per decision: its loss, and where boundaries are relaxed the model's own loss, too.

    Args:
        td: a rollout that the estimator has been applied to, [.., B, T].

    Returns:
        A scalar. If the estimator is unbiased, the expectation of its gradient with respect to policy and encoder
        is that of ``-1/decisions sum_{b,t} E_a[log p(x_{t+1} | x_<=t, a_<=t)]``.
    """
    loss = mean_over_decisions(td, keys.LOSS_POLICY)
    if keys.BOUNDARY in td:
        loss = loss - td[keys.LOG_LIKELIHOOD].sum() / td[keys.DECISION_MASK].sum()
    return loss
