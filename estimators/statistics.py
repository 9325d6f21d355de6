"""Means over the batch and over samples, in one place: here is where several processes will join their batches."""

import torch
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` with weights ``mask`` (bool, or any of 0 or more), over all dimensions: [..], [..] -> [].

    0 where nothing is.
    """
    weight = mask.to(x.dtype)
    total = weight.sum()
    return (x * weight).sum() / total.where(total > 0, 1.0)


def mean_over(x: Tensor, mask: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Mean where ``mask`` is True along some dimensions, which stay with size 1. 0 where nothing is."""
    weight = mask.to(x.dtype)
    return (x * weight).sum(dim, keepdim=True) / weight.sum(dim, keepdim=True).clamp(min=1)


def mean_over_batch(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the batch at every position, of the sequences that reach it: [.., B, T] -> [.., 1, T]."""
    return mean_over(x, mask, -2)


def mean_of_others(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Mean along ``dim`` of all but the entry itself, where ``mask`` is True; 0 where there are no others."""
    weight = mask.to(x.dtype)
    others = (weight.sum(dim, keepdim=True) - weight).clamp(min=0)
    return ((x * weight).sum(dim, keepdim=True) - x * weight) / others.where(others > 0, 1.0)


def conditional_noise(prob: Tensor, action: Tensor, uniform: Tensor) -> Tensor:
    """Noise u given that ``a = [u < p]``, from a fresh uniform number: on (0, p) for a = 1, on (p, 1) for a = 0."""
    return torch.where(action.bool(), uniform * prob, prob + uniform * (1 - prob))
