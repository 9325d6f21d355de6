"""Means over the batch, in one place: here is where several processes will join their batches."""

from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` where ``mask`` is True, over all dimensions: [..], [..] -> []. 0 where nothing is."""
    weight = mask.to(x.dtype)
    return (x * weight).sum() / weight.sum().clamp(min=1)


def mean_over_batch(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over the batch at every position, of the sequences that reach it: [.., B, T] -> [.., 1, T]."""
    weight = mask.to(x.dtype)
    return (x * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp(min=1)
