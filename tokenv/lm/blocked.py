"""Causal attention over long sequences on a CPU: blocks of queries, computed again in the backward pass.

Nothing of size N x N is ever kept, so memory is linear in the length; and a block of queries meets no keys behind its
end, which spares almost half of the arithmetic (cf. Rabe & Staats 2021, arXiv 2112.05682).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_ENTRIES = 2**24  # of a block's scores, over batch and heads: 64 MiB in float32
LEAST_QUERIES = 64


def block_queries(q: Tensor) -> int:
    """Queries of a block, for queries [.., N, d]: as many as keep its scores small, whatever the length."""
    rows = q.shape[:-2].numel() * q.shape[-2]
    return max(BLOCK_ENTRIES // max(rows, 1), LEAST_QUERIES)


class BlockedAttention(torch.autograd.Function):
    """``tokenv.lm.attention.causal_attention``, block by block; ``softcap`` as there, ``block`` queries at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, softcap: float, block: int) -> Tensor:
        """Attended values, [.., N, d]."""
        ctx.save_for_backward(q, k, v)
        ctx.softcap, ctx.block = softcap, block
        out = torch.empty_like(v)
        for rows, keys in _blocks(q.shape[-2], block):
            _, prob = _probabilities(q[..., rows, :], k[..., keys, :], softcap)
            out[..., rows, :] = prob @ v[..., keys, :]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Gradients of queries, keys and values."""
        q, k, v = ctx.saved_tensors
        scale = _scale(q, ctx.softcap)
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys in _blocks(q.shape[-2], ctx.block):
            tanh, prob = _probabilities(q[..., rows, :], k[..., keys, :], ctx.softcap)
            grad_v[..., keys, :] += prob.mT @ grad[..., rows, :]
            inner = torch._softmax_backward_data(grad[..., rows, :] @ v[..., keys, :].mT, prob, -1, prob.dtype)
            inner.mul_(tanh.square_().neg_().add_(1.0)).mul_(ctx.softcap * scale)
            grad_q[..., rows, :] = inner @ k[..., keys, :]
            grad_k[..., keys, :] += inner.mT @ q[..., rows, :]
        return grad_q, grad_k, grad_v, None, None


def _blocks(length: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Every block's queries, and the keys up to its end."""
    for start in range(0, length, block):
        stop = min(start + block, length)
        yield slice(start, stop), slice(stop)


def _scale(q: Tensor, softcap: float) -> float:
    return 1.0 / (math.sqrt(q.shape[-1]) * softcap)


def _probabilities(q: Tensor, k: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """``tanh(q.k / (sqrt(d) * softcap))`` and the softmax of ``softcap`` times that, queries being the last keys."""
    tanh = ((q * _scale(q, softcap)) @ k.mT).tanh_()
    capped = tanh.mul(softcap)
    queries = q.shape[-2]
    capped[..., -queries:].masked_fill_(
        torch.ones(queries, queries, dtype=torch.bool, device=q.device).triu_(1), -math.inf
    )
    return tanh, capped.softmax(-1)
