"""Every attention equals the reference, and local attention is linear in the length."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_attention import reference_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokenv.lm import attention
from tokenv.lm.attention import (
    BLOCK,
    SMALL_BLOCK,
    BlockedAttention,
    _flex_mask,
    block_queries,
    causal_attention,
    flex_attention,
    flex_with_mask,
    local_attention,
    select_attention,
)

SOFTCAP = 2.0  # low, so that the cap bends the scores
sizes = st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 6))  # N, H, d
windows = st.integers(1, 45)


def random_qkv(length, heads, size, dtype=torch.float64, batch=2):
    return [
        torch.randn(batch, heads, length, size, dtype=dtype, requires_grad=True) for _ in range(3)
    ]


def value_and_gradients(attention, qkv, weight, *args):
    out = attention(*qkv, SOFTCAP, *args)
    return out, *torch.autograd.grad((out * weight).sum(), qkv)


def assert_equals_reference(attention, qkv, *args):
    weight = torch.randn_like(qkv[0])
    expected = value_and_gradients(reference_attention, qkv, weight, *args)
    torch.testing.assert_close(
        value_and_gradients(attention, qkv, weight, *args), expected, rtol=1e-10, atol=1e-12
    )


def plain_flex(qkv, window):
    """Without torch.compile; torch warns of that once."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "flex_attention called without torch.compile", UserWarning
        )
        return flex_attention(*qkv, SOFTCAP, window)


@settings(max_examples=40)
@given(sizes, windows)
def test_local_attention_equals_the_reference(size, window):
    assert_equals_reference(local_attention, random_qkv(*size), window)


@settings(max_examples=20)
@given(sizes)
def test_causal_attention_equals_the_reference(size):
    assert_equals_reference(causal_attention, random_qkv(*size))


@settings(max_examples=40)
@given(sizes, st.integers(1, 45))
def test_blocked_attention_equals_the_reference(size, block):
    assert_equals_reference(lambda *qkvs: BlockedAttention.apply(*qkvs, block), random_qkv(*size))


def test_long_sequences_are_attended_to_in_blocks(monkeypatch):
    """The choice depends on the memory of the scores; the result is the same."""
    qkv = random_qkv(200, 2, 4)
    assert block_queries(qkv[0]) > 200
    whole = causal_attention(*qkv, SOFTCAP)
    monkeypatch.setattr(attention, "BLOCK_ENTRIES", 2**14)
    assert block_queries(qkv[0]) == attention.MIN_QUERIES
    torch.testing.assert_close(causal_attention(*qkv, SOFTCAP), whole, rtol=1e-10, atol=1e-12)


@settings(max_examples=10)
@given(sizes, st.none() | windows)
def test_flex_attention_equals_the_reference(size, window):
    """On a CPU only values are compared: torch has no gradient there."""
    qkv = [x.detach() for x in random_qkv(*size, dtype=torch.float32)]
    expected = reference_attention(*qkv, SOFTCAP, window)
    torch.testing.assert_close(plain_flex(qkv, window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 100, 3 * BLOCK])
@pytest.mark.parametrize(
    "window", [1, SMALL_BLOCK - 1, SMALL_BLOCK, SMALL_BLOCK + 1, 2 * BLOCK, None]
)
@pytest.mark.parametrize("block", [SMALL_BLOCK, BLOCK])
def test_flex_computes_the_blocks_that_are_seen_and_no_others(length, window, block):
    mask = _flex_mask(length, window, torch.device("cpu"), block)
    assert set(mask.BLOCK_SIZE) == {block}
    blocks = -(-length // block)
    i = torch.arange(blocks * block)
    visible = (
        (i <= i[:, None])
        & (i[:, None] - i < (window or len(i)))
        & (i < length)
        & (i[:, None] < length)
    )
    assert torch.equal(
        mask.to_dense()[0, 0].bool(), visible.view(blocks, block, blocks, block).any(-1).any(1)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what warns is torch's compiler
@pytest.mark.parametrize(
    ("length", "window", "block"), [(200, 64, SMALL_BLOCK), (256, 65, BLOCK), (200, None, BLOCK)]
)
def test_compiled_flex_reads_the_blocks_of_its_mask(length, window, block):
    qkv = [x.detach() for x in random_qkv(length, 2, 16, dtype=torch.float32)]
    mask = _flex_mask(length, window, torch.device("cpu"), block)
    actual = torch.compile(flex_with_mask, dynamic=False)(*qkv, SOFTCAP, mask)
    torch.testing.assert_close(
        actual, reference_attention(*qkv, SOFTCAP, window), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("window", [None, 5])
def test_a_chosen_attention_is_one_of_them(window):
    qkv = random_qkv(23, 2, 4)
    chosen = select_attention(23, torch.device("cpu"), SOFTCAP, window)
    torch.testing.assert_close(chosen(*qkv), reference_attention(*qkv, SOFTCAP, window))


def test_the_reference_hides_what_lies_outside_the_window():
    """Plain loops: query i attends to keys i - W + 1, ..., i with soft-capped scores."""
    q, k, v = random_qkv(7, 1, 3, batch=1)
    out = reference_attention(q, k, v, SOFTCAP, 3)[0, 0]
    for i in range(7):
        visible = slice(max(0, i - 2), i + 1)
        scores = SOFTCAP * torch.tanh(k[0, 0, visible] @ q[0, 0, i] / 3**0.5 / SOFTCAP)
        torch.testing.assert_close(out[i], scores.softmax(0) @ v[0, 0, visible])


def test_huge_scores_stay_finite():
    qkv = [(1e4 * x).detach().requires_grad_() for x in random_qkv(12, 1, 4, dtype=torch.float32)]
    for x in value_and_gradients(local_attention, qkv, torch.ones_like(qkv[0]), 5):
        assert x.isfinite().all()


class _Largest(TorchDispatchMode):
    """Record the size of the largest tensor which any operation creates."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(
            [self.numel, *(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))]
        )
        return out


def test_local_attention_never_builds_a_square():
    """Forward and backward: the largest tensor is 2 W N scores, whatever N."""
    window, heads = 4, 2
    for length in (64, 128, 256, 512):
        qkv = random_qkv(length, heads, 4, batch=1)
        with _Largest() as mode:
            value_and_gradients(local_attention, qkv, torch.ones_like(qkv[0]), window)
        assert mode.numel == heads * length * 2 * window
