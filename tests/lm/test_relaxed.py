"""Relaxed tokens: equal to the hard pass for gates of 0 and 1, with the gradient of the relaxed function."""

import math

import pytest
import torch
from episodes import forced_first
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.lm.attention import causal_attention
from tokenv.lm.config import UNetConfig
from tokenv.lm.segments import ema, relaxed_attention
from tokenv.lm.unet import UNet

LENGTH = 9
masks = st.lists(
    st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2
)
seeds = st.integers(0, 1000)


def small_lm():
    return UNet(
        UNetConfig(width=8, heads=2, down_layers=1, mid_layers=2, up_layers=1, window=4)
    ).double()


def random_strength(batch, length, corners=0.3):
    """Numbers in [0, 1], many of them exactly 0 or 1; column 0 is 1."""
    strength = torch.rand(batch, length, dtype=torch.float64)
    strength = torch.where(torch.rand(batch, length) < corners, strength.round(), strength)
    strength[:, 0] = 1
    return strength


@settings(max_examples=25)
@given(masks, seeds)
def test_at_hard_strengths_the_relaxed_pass_is_the_hard_pass(mask, seed):
    torch.manual_seed(seed)
    lm = small_lm()
    action_BT = forced_first(mask)
    x_BTD = lm.encode(torch.randint(256, action_BT.shape))
    relaxed = lm.decode(x_BTD, action_BT, action_BT.double())
    hard = lm.decode(x_BTD, action_BT)
    torch.testing.assert_close(relaxed, hard, rtol=1e-10, atol=1e-10)
    trained = [p for name, p in lm.named_parameters() if "early" not in name]
    grads = [
        torch.autograd.grad(out.square().sum(), trained, retain_graph=True)
        for out in (relaxed, hard)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("corners", [0.0, 0.6, 1.0])
def test_the_gradient_is_the_relaxed_functions_own(corners):
    """Finite differences inside the cube and at its corners, where the function continues smoothly."""
    lm = small_lm()
    weight = torch.randn(2, 6, 256, dtype=torch.float64)
    x_BTD = lm.encode(torch.randint(256, (2, 6))).detach()
    strength = random_strength(2, 6, corners).requires_grad_()
    action = torch.ones(2, 6, dtype=torch.long)

    def loss(strength, x_BTD):
        return (lm.decode(x_BTD, action, strength) * weight).sum()

    assert torch.autograd.gradcheck(
        loss, (strength, x_BTD.requires_grad_()), eps=1e-6, atol=1e-5, rtol=1e-4
    )


def plain_relaxed_attention(q, k, v, softcap, strength):
    """One query of one head of one row after the other."""
    out = torch.zeros_like(v)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in q.shape[:3])).tolist():
        scores = softcap * torch.tanh(
            k[b, h, : i + 1] @ q[b, h, i] / (math.sqrt(q.shape[-1]) * softcap)
        )
        weight = strength[b, : i + 1] * scores.exp()
        out[b, h, i] = weight @ v[b, h, : i + 1] / weight.sum()
    return out


@settings(max_examples=15)
@given(seeds, st.integers(1, 8), st.sampled_from([1.0, 30.0]))
def test_attention_is_its_formula(seed, length, scale):
    torch.manual_seed(seed)
    q, k, v = (scale * torch.randn(2, 2, length, 4, dtype=torch.float64) for _ in range(3))
    strength = random_strength(2, length).requires_grad_()
    actual = relaxed_attention(q, k, v, 50.0, strength)
    expected = plain_relaxed_attention(q, k, v, 50.0, strength)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(actual)
    grads = [torch.autograd.grad((out * weight).sum(), strength)[0] for out in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-8)
    whole = relaxed_attention(q, k, v, 50.0, torch.ones(2, length, dtype=torch.float64))
    torch.testing.assert_close(whole, causal_attention(q, k, v, 50.0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_value_and_gradient_stay_finite_however_far_the_scores_lie_apart(dtype):
    """Keys of strength 0 whose scores exceed the only present key's by twice the softcap."""
    q = torch.ones(1, 1, 6, 4, dtype=dtype) * 100
    k = torch.ones(1, 1, 6, 4, dtype=dtype) * 100
    k[:, :, 0] *= -1
    q, k, v = (x.requires_grad_() for x in (q, k, torch.randn(1, 1, 6, 4, dtype=dtype)))
    strength = torch.tensor([[1.0, 0, 0, 0, 0, 0]], requires_grad=True)
    out = relaxed_attention(q, k, v, 50.0, strength)
    torch.testing.assert_close(out, v[:, :, :1].expand_as(out))
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, strength))


@settings(max_examples=20)
@given(seeds, st.integers(1, LENGTH - 1))
def test_neither_byte_nor_strength_moves_an_earlier_output(seed, t):
    torch.manual_seed(seed)
    lm = small_lm()
    strength = random_strength(2, LENGTH)
    action = torch.ones(2, LENGTH, dtype=torch.long)
    symbol_BT = torch.randint(256, (2, LENGTH))
    other_strength = strength.clone()
    other_symbol_BT = symbol_BT.clone()
    other_strength[:, t] = (strength[:, t] + 0.5) % 1
    other_symbol_BT[:, t] = (symbol_BT[:, t] + 1) % 256
    before = lm.decode(lm.encode(symbol_BT), action, strength)
    for after in (
        lm.decode(lm.encode(symbol_BT), action, other_strength),
        lm.decode(lm.encode(other_symbol_BT), action, strength),
    ):
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(after[:, t], before[:, t])


@settings(max_examples=25)
@given(seeds, st.integers(1, 20))
def test_the_moving_average_is_the_loop(seed, length):
    torch.manual_seed(seed)
    prob = random_strength(2, length).requires_grad_()
    x_BMD = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    z = torch.zeros(2, 3, dtype=torch.float64)
    loop = []
    for k in range(length):
        z = prob[:, k, None] * x_BMD[:, k] + (1 - prob[:, k, None]) * z
        loop.append(z)
    actual = ema(prob, x_BMD)
    expected = torch.stack(loop, 1)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(actual)
    grads = [torch.autograd.grad((out * weight).sum(), (prob, x_BMD)) for out in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-11, atol=1e-11)
