"""Norm, rotary positions and pooling against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.lm.config import UNetConfig
from tokenv.lm.layers import EPSILON, MLP, DecoderLayer, RMSNorm, RotaryTable
from tokenv.lm.segments import distribute, segment, select
from tokenv.lm.unet import UNet


def random_norm(width):
    norm = RMSNorm(width).double()
    with torch.no_grad():
        norm.weight.normal_()
    return norm


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from([0.0, 1e-4, 1.0, 1e4]),
)
def test_rms_norm_equals_torchs(shape, width, scale):
    norm = random_norm(width)
    x = (scale * torch.randn(*shape, width, dtype=torch.float64)).requires_grad_()
    weight = torch.randn_like(x)
    expected = F.rms_norm(x, (width,), norm.weight, EPSILON)
    torch.testing.assert_close(norm(x), expected)
    inputs = (x, norm.weight)
    torch.testing.assert_close(
        torch.autograd.grad((norm(x) * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
    )


def test_rms_norm_passes_gradcheck():
    norm = random_norm(5)
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, _: norm(x), (x, norm.weight))


@settings(max_examples=25)
@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 1000), st.sampled_from([2, 4, 8]))
def test_rotated_scores_depend_on_the_distance_only(i, j, shift, size):
    q, k = torch.randn(2, 1, 1, size, dtype=torch.float64)

    def score(i, j):
        rotated = [
            RotaryTable(torch.tensor([p]), size, 1e4, torch.float64).rotate(x)
            for x, p in ((q, i), (k, j))
        ]
        return (rotated[0] * rotated[1]).sum()

    torch.testing.assert_close(score(i + shift, j + shift), score(i, j), rtol=1e-9, atol=1e-9)
    if i == j:
        torch.testing.assert_close(score(i, j), (q * k).sum())


def test_rotation_turns_pairs_by_the_position_times_their_frequency():
    position = torch.tensor([3])
    table = RotaryTable(position, 4, 100.0, torch.float64)
    rotated = table.rotate(torch.tensor([[[1.0, 0.0, 0.0, 1.0]]], dtype=torch.float64))[0, 0]
    slow = torch.tensor(0.3, dtype=torch.float64)  # frequencies 1 and 100 ** -0.5
    fast = torch.tensor(3.0, dtype=torch.float64)
    torch.testing.assert_close(
        rotated, torch.stack([fast.cos(), -slow.sin(), fast.sin(), slow.cos()])
    )


def test_angles_stay_fine_in_coarse_precision():
    """The angles of far positions are exact, although bfloat16 represents integers up to 256 only."""
    position = torch.tensor([4001])
    coarse = RotaryTable(position, 8, 1e4, torch.bfloat16)
    fine = RotaryTable(position, 8, 1e4, torch.float64)
    torch.testing.assert_close(coarse.cos.double(), fine.cos, rtol=0.01, atol=0.01)


def test_a_layer_adds_attention_and_mlp_to_its_input():
    """Gemma 2's order, written out."""
    layer = DecoderLayer(8, 2, 24).double()
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    rotary = RotaryTable(torch.arange(5), 4, 1e4, torch.float64)

    def mean_of_values(q, k, v):
        return v.mean(-2, keepdim=True).expand_as(v)

    v = layer.qkv(layer.pre_attention(x))[..., 16:].mean(1, keepdim=True).expand_as(x)
    middle = x + layer.post_attention(layer.out(v))
    hidden = layer.pre_mlp(middle)
    gate = layer.mlp.gate_up.weight[:24]
    up = layer.mlp.gate_up.weight[24:]
    mlp = layer.mlp.down(F.gelu(hidden @ gate.T, approximate="tanh") * (hidden @ up.T))
    torch.testing.assert_close(layer(x, rotary, mean_of_values), middle + layer.post_mlp(mlp))


@st.composite
def forced_masks(draw):
    batch = draw(st.integers(1, 4))
    length = draw(st.integers(1, 12))
    rows = st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1)
    return torch.tensor([[1, *draw(rows)] for _ in range(batch)])


@settings(max_examples=40)
@given(forced_masks())
def test_select_and_distribute_equal_plain_loops(action_BT):
    batch, length = action_BT.shape
    segments = segment(action_BT)
    assert segments.count_B.tolist() == action_BT.sum(1).tolist()
    x_BTD = torch.randn(batch, length, 3, dtype=torch.float64, requires_grad=True)
    token_BMD = select(x_BTD, segments)
    assert token_BMD.shape[1] == action_BT.sum(1).max()
    y_BTD = distribute(token_BMD.sin(), segments)

    expected = []
    for b in range(batch):
        tokens = [x_BTD[b, i] for i in range(length) if action_BT[b, i]]
        for m, token in enumerate(tokens):
            torch.testing.assert_close(token_BMD[b, m], token)
        newest = -1
        for i in range(length):
            newest += int(action_BT[b, i])
            expected.append(tokens[newest].sin())
    expected_BTD = torch.stack(expected).view(batch, length, 3)
    torch.testing.assert_close(y_BTD, expected_BTD)
    weight = torch.randn_like(y_BTD)
    torch.testing.assert_close(
        torch.autograd.grad((y_BTD * weight).sum(), x_BTD),
        torch.autograd.grad((expected_BTD * weight).sum(), x_BTD),
    )


@pytest.mark.parametrize("length", [1, 5])
def test_every_symbol_may_close_a_token(length):
    action_BT = torch.ones(2, length, dtype=torch.long)
    x_BTD = torch.randn(2, length, 3)
    segments = segment(action_BT)
    assert torch.equal(select(x_BTD, segments), x_BTD)
    assert torch.equal(distribute(x_BTD, segments), x_BTD)


def test_layers_that_are_computed_again_give_the_same_bit_for_bit():
    torch.manual_seed(0)
    config = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=4)
    lm = UNet(config)
    symbol_BN = torch.randint(0, 256, (2, 24))
    action_BN = (torch.rand(2, 24) < 0.3).long()
    action_BN[:, 0] = 1

    def value_and_gradients():
        out = lm(symbol_BN, action_BN).square().sum()
        return out, *torch.autograd.grad(out, [*lm.parameters()], allow_unused=True)

    plain = value_and_gradients()
    lm.enable_activation_checkpointing()
    for one, other in zip(plain, value_and_gradients(), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 5))
def test_geglu_is_the_formula(rows, hidden):
    mlp = MLP(3, hidden).double()
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    gate, up = mlp.gate_up(x).chunk(2, -1)
    expected = mlp.down(F.gelu(gate, approximate="tanh") * up)
    inputs = [x, *mlp.parameters()]
    torch.testing.assert_close(mlp(x), expected)
    weight = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad((mlp(x) * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
    )
