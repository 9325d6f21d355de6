"""Expectations: means over a batch which several processes may share, and all boundaries of a short sequence.

A mean over the batch is the mean of the whole batch, whichever process holds its rows (``tokenv.core.distributed``).
"""

import itertools

import torch
import torch.nn.functional as F
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from tokenv.core import keys
from tokenv.core.distributed import all_reduce_sum


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of ``x`` with weights ``mask`` (bool, or numbers >= 0) over all dimensions: [..], [..] -> [].

    It is 0 where all weights are 0.
    """
    weight = mask.to(x.dtype)
    total, count = all_reduce_sum((x * weight).sum(), weight.sum())
    return total / count.where(count > 0, 1.0)


def local_masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return this process's summand of ``masked_mean``; the processes' losses add up to it: [..], [..] -> []."""
    weight = mask.to(x.dtype)
    (count,) = all_reduce_sum(weight.sum())
    return (x * weight).sum() / count.where(count > 0, 1.0)


def reduces_batch(x: Tensor, dim: int | tuple[int, ...]) -> bool:
    """Check whether ``dim`` includes the batch dimension B of [.., B, T]."""
    dims = (dim,) if isinstance(dim, int) else dim
    return any(each % x.dim() == x.dim() - 2 for each in dims)


def weighted_sums(x: Tensor, weight: Tensor, dim: int | tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the weighted sum and the sum of weights along some dimensions, which remain with size 1."""
    sums = (x * weight).sum(dim, keepdim=True), weight.sum(dim, keepdim=True)
    return all_reduce_sum(*sums) if reduces_batch(x, dim) else sums


def mean_over(x: Tensor, mask: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the mean where ``mask`` is True along some dimensions, which remain with size 1; 0 where it never is."""
    total, count = weighted_sums(x, mask.to(x.dtype), dim)
    return total / count.clamp(min=1)


def mean_over_decisions(td: TensorDictBase, key: NestedKey) -> Tensor:
    """Return this process's summand of a loss's mean over all decisions, 0 if the key is missing: []."""
    if key not in td:
        return td[keys.LOG_LIKELIHOOD].new_zeros(())
    return local_masked_mean(td[key], td[keys.DECISION_MASK])


def policy_objective(td: TensorDictBase) -> Tensor:
    """Return the objective of an estimator per decision: its loss, plus the model's where boundaries are relaxed.

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


def all_boundaries(length: int, batch: int = 1) -> Tensor:
    """Return all joint actions of B sequences of N symbols, int64 [C, B, T], C = 2^(B (N - 2)), T = N - 1.

    The first symbol's boundary is forced and the last one's predicts nothing, so N - 2 are free in each sequence.

    Args:
        length: symbols N.
        batch: sequences B.
    """
    free = length - 2
    bits = torch.tensor(list(itertools.product((0, 1), repeat=batch * free))).view(-1, batch, free)
    return F.pad(bits, (1, 0), value=1)


def forcing_noise(action: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return noise which gives these actions under every policy: 0 forces a boundary, 1 forces none; [..] -> [..]."""
    return (1 - action).to(dtype)
