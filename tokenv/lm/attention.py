"""Soft-capped causal attention, by implementations which are fast on CPU and GPU.

``BlockedAttention`` stores nothing of size N x N, so its memory is linear in the length, and compares a block of
queries with no keys after its end, which saves almost half of the arithmetic (cf. Rabe & Staats 2021, arXiv
2112.05682).
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokenv.core.devices import compiles

BLOCK_ENTRIES = 2**24  # scores of a block, over batch and heads: 64 MiB in float32
MIN_QUERIES = 64


def block_queries(q: Tensor) -> int:
    """Return the number of queries in a block, for queries [.., N, d]: its scores stay small for any length."""
    rows = q.shape[:-2].numel() * q.shape[-2]
    return max(BLOCK_ENTRIES // max(rows, 1), MIN_QUERIES)


class BlockedAttention(torch.autograd.Function):
    """``causal_attention`` in blocks of ``block`` queries."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softcap: float,
        block: int,
    ) -> Tensor:
        """Return attended values, [.., N, d]."""
        ctx.save_for_backward(q, k, v)
        ctx.softcap = softcap
        ctx.block = block
        out = torch.empty_like(v)
        for rows, keys in _blocks(q.shape[-2], block):
            _, prob = _probabilities(
                q[..., rows, :],
                k[..., keys, :],
                softcap,
            )
            out[..., rows, :] = prob @ v[..., keys, :]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of queries, keys and values."""
        q, k, v = ctx.saved_tensors
        scale = _scale(q, ctx.softcap)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)
        for rows, keys in _blocks(q.shape[-2], ctx.block):
            tanh, prob = _probabilities(
                q[..., rows, :],
                k[..., keys, :],
                ctx.softcap,
            )
            grad_v[..., keys, :] += prob.mT @ grad[..., rows, :]
            inner = torch._softmax_backward_data(
                grad[..., rows, :] @ v[..., keys, :].mT,
                prob,
                -1,
                prob.dtype,
            )
            slope = tanh.square_().neg_().add_(1.0)
            inner.mul_(slope).mul_(ctx.softcap * scale)
            grad_q[..., rows, :] = inner @ k[..., keys, :]
            grad_k[..., keys, :] += inner.mT @ q[..., rows, :]
        return grad_q, grad_k, grad_v, None, None


def _blocks(length: int, block: int) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of every block, and the keys up to its end."""
    for start in range(0, length, block):
        stop = min(start + block, length)
        yield slice(start, stop), slice(stop)


def _scale(q: Tensor, softcap: float) -> float:
    return 1.0 / (math.sqrt(q.shape[-1]) * softcap)


def _later(length: int, device: torch.device) -> Tensor:
    """Return which keys come after each query, [N, N]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).triu_(1)


def _probabilities(q: Tensor, k: Tensor, softcap: float) -> tuple[Tensor, Tensor]:
    """Return ``t = tanh(q.k / (sqrt(d) * softcap))`` and the softmax of ``softcap * t``; queries are the last keys."""
    tanh = ((q * _scale(q, softcap)) @ k.mT).tanh_()
    capped = tanh.mul(softcap)
    queries = q.shape[-2]
    capped[..., -queries:].masked_fill_(_later(queries, q.device), -math.inf)
    return tanh, capped.softmax(-1)


AttentionFn = Callable[[Tensor, Tensor, Tensor], Tensor]
# queries, and keys, of a block of the GPU's attention
BLOCK = 128
SMALL_BLOCK = 64
# largest number of stored scores of local attention: 128 MiB in float32, twice a layer
STORED_ENTRIES = 2**25


@contextmanager
def without_stored_scores() -> Iterator[None]:
    """Compute all attention in this context as for large batches, and as on a GPU: no scores are stored."""
    global BLOCK_ENTRIES, STORED_ENTRIES
    earlier = BLOCK_ENTRIES, STORED_ENTRIES
    BLOCK_ENTRIES = STORED_ENTRIES = 0
    try:
        yield
    finally:
        BLOCK_ENTRIES, STORED_ENTRIES = earlier


class _CappedSoftmax(torch.autograd.Function):
    """``softmax(softcap * tanh(scores) + bias)``, in place, with two stored matrices instead of five.

    On a CPU attention is bound by passes over the score matrix, not by arithmetic. ``scores`` is overwritten.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, softcap: float) -> Tensor:
        tanh = scores.tanh_()
        prob = tanh.mul(softcap).add_(bias).softmax(-1)
        ctx.save_for_backward(tanh, prob)
        ctx.softcap = softcap
        return prob

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        tanh, prob = ctx.saved_tensors
        inner = torch._softmax_backward_data(grad, prob, -1, prob.dtype)
        slope = tanh.square().neg_().add_(1.0).mul_(ctx.softcap)
        return inner.mul_(slope), None, None


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    softcap: float,
) -> Tensor:
    """Attend with scores ``softcap * tanh(q.k / (sqrt(d) * softcap)) + bias``: [.., N, d]; bias [.., N, S]."""
    scores = (q * _scale(q, softcap)) @ k.mT
    return _CappedSoftmax.apply(scores, bias, softcap) @ v


def attention_bias(hidden: Tensor, like: Tensor) -> Tensor:
    """Return -inf where keys are hidden and 0 elsewhere, in the precision of ``like``."""
    bias = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(hidden, -math.inf)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, softcap: float) -> Tensor:
    """Attend to all earlier positions: time O(N^2); memory O(N^2) for short sequences, O(N) for long ones."""
    length = q.shape[-2]
    block = block_queries(q)
    if block < length:
        return BlockedAttention.apply(q, k, v, softcap, block)
    hidden = _later(length, q.device)
    return capped_attention(q, k, v, attention_bias(hidden, q), softcap)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    window: int,
) -> Tensor:
    """Attend to a sliding window, in blocks of ``window`` queries: time and memory O(N * window).

    A block of W queries needs only the keys of its own and of the previous block. If the scores would need much memory
    they are not stored, but computed again in the backward pass.
    """
    entries = 2 * window * q.shape[:-1].numel()
    if q.requires_grad and entries > STORED_ENTRIES:
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(_local_attention, q, k, v, softcap, window, **how)
    return _local_attention(q, k, v, softcap, window)


def _in_blocks(x: Tensor, block: int) -> Tensor:
    """Split a sequence into blocks, the last one padded: [.., N, d] -> [.., N / block, block, d]."""
    tail = -x.shape[-2] % block
    if tail:
        x = F.pad(x, (0, 0, 0, tail))
    return x.unflatten(-2, (-1, block))


def _previous(x: Tensor) -> Tensor:
    """Return the block before each one; before the first there are zeros."""
    return F.pad(x[..., :-1, :, :], (0, 0, 0, 0, 1, 0))


def _local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    window: int,
) -> Tensor:
    length = q.shape[-2]
    block = min(window, length)
    q = _in_blocks(q, block)
    k = _in_blocks(k, block)
    v = _in_blocks(v, block)
    i = torch.arange(block, device=q.device)[:, None]
    j = torch.arange(-block, block, device=q.device)[None, :]
    outside = (j > i) | (j <= i - window)
    hidden = outside.expand(q.shape[-3], -1, -1).clone()
    hidden[0, :, :block] = True
    k = torch.cat([_previous(k), k], -2)
    v = torch.cat([_previous(v), v], -2)
    out = capped_attention(q, k, v, attention_bias(hidden, q), softcap)
    return out.flatten(-3, -2)[..., :length, :]


@functools.lru_cache(maxsize=64)
def _flex_mask(length: int, window: int | None, device: torch.device, block: int = BLOCK) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if window is None:
            return j <= i
        return (j <= i) & (j > i - window)

    return create_block_mask(
        visible,
        None,
        None,
        length,
        length,
        device=str(device),
        BLOCK_SIZE=block,
    )


def flex_options(block: int) -> dict[str, Any] | None:
    """Return torch.compile's options for ``flex_with_mask`` on CUDA, with masks of ``block`` queries and keys.

    The default kernel may not fit small blocks (bfloat16 and heads of 64 on an H100: there is none for the backward
    pass, pytorch#176025); some of those which autotuning tries do. Matrix products are not autotuned.
    """
    if block != SMALL_BLOCK:
        return None
    return {"max_autotune": True, "max_autotune_gemm_backends": "ATEN"}


def allow_many_shapes() -> None:
    """Let torch.compile compile a function for up to 64 shapes; after 8, its default, it would run uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)


@functools.cache
def _compiled_flex(block: int) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    allow_many_shapes()
    return torch.compile(flex_attention, dynamic=False, options=flex_options(block))


def flex_with_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    mask: Any,
) -> Tensor:
    """Attend by torch's ``flex_attention`` with a ``BlockMask``; compiled on CUDA."""
    from torch.nn.attention.flex_attention import flex_attention as eager

    def cap(
        score: Tensor,
        b: Tensor,
        h: Tensor,
        i: Tensor,
        j: Tensor,
    ) -> Tensor:
        # tanh(x) = 2 sigmoid(2 x) - 1, for which GPUs have an instruction.
        return 2 * softcap * torch.sigmoid(score * (2 / softcap)) - softcap

    # In a compiled layer it is fused by the compilation of the layer.
    run = eager
    if compiles(q.device) and not torch.compiler.is_compiling():
        run = _compiled_flex(mask.BLOCK_SIZE[0])
    return run(q, k, v, score_mod=cap, block_mask=mask)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softcap: float,
    window: int | None = None,
) -> Tensor:
    """Attend by torch's ``flex_attention``: fused, without blocks outside the window; for CUDA."""
    mask = _flex_mask(q.shape[-2], window, q.device)
    return flex_with_mask(q, k, v, softcap, mask)


def select_attention(
    length: int,
    device: torch.device,
    softcap: float,
    window: int | None = None,
    block: int = BLOCK,
) -> AttentionFn:
    """Return the fastest attention for sequences of one length on one device, as a function of q, k and v.

    On a GPU it works in blocks of ``block`` queries and keys; with small windows most of a large block is masked.
    """
    if compiles(device):
        # The mask is built here, outside of compiled layers.
        return functools.partial(
            flex_with_mask,
            softcap=softcap,
            mask=_flex_mask(length, window, device, block),
        )
    if window is None or window >= length:
        return functools.partial(causal_attention, softcap=softcap)
    return functools.partial(local_attention, softcap=softcap, window=window)
