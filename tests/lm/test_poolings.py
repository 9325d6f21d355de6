"""The published poolings: equal to their dense formulas in value and gradient, causal, and the same step by step."""

import pytest
import torch
import torch.nn.functional as F
from episodes import forced_first
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.lm.config import POOLINGS, UNetConfig
from tokenv.lm.incremental import Decoder
from tokenv.lm.segments import SortedGather, segment
from tokenv.lm.unet import UNet

LENGTH = 12
masks = st.lists(
    st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2
)
seeds = st.integers(0, 1000)
poolings = st.sampled_from(POOLINGS)


def small_lm(pooling):
    config = UNetConfig(
        width=8, heads=2, down_layers=1, mid_layers=2, up_layers=1, window=4, pooling=pooling
    )
    lm = UNet(config).double()
    with torch.no_grad():  # as if trained: zero weights would hide mistakes
        for parameter in lm.pooling.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return lm


def probability_of(action_BT):
    """Return probabilities which agree with the actions; 1 in the first column."""
    prob = 0.5 * torch.rand(action_BT.shape, dtype=torch.float64)
    prob = torch.where(action_BT.bool(), 1 - prob, prob)
    prob[:, 0] = 1
    return prob


def soft_boundary(pooling, action_BT):
    return probability_of(action_BT) if pooling == "smooth" else action_BT.double()


def published_weights(index_BT, count):
    """[B, T, count]: 1 - (k - c_t) where k = c_t, 0 elsewhere (Nawrot et al. 2023)."""
    difference = torch.arange(count) - index_BT.unsqueeze(-1)
    return torch.where(difference.round() == 0, 1 - difference, 0.0)


def dense_mean(lm, x_BTD, boundary_BT):
    """Nawrot's pooling as published, with dense [B, T, S] matrices."""
    count = int(boundary_BT.detach().sum(1).max().round())
    down = published_weights(boundary_BT.cumsum(1) - boundary_BT, count)
    down = down / (down.sum(1, keepdim=True) + 1e-9)
    null = lm.pooling.null_D.expand(len(x_BTD), 1, -1)
    token = F.layer_norm(
        torch.cat([null, down.mT @ x_BTD], 1), (8,), lm.pooling.norm.weight, lm.pooling.norm.bias
    )
    position = torch.full((len(x_BTD), count + 1), -1)
    for b, row in enumerate(boundary_BT.detach().round()):
        at = row.nonzero().flatten()
        position[b, 1 : len(at) + 1] = at
    up = published_weights(boundary_BT.cumsum(1), count + 1)
    up = up / (up.sum(2, keepdim=True) + 1e-9)
    return x_BTD + up @ lm.apply_token_layers(token, position)


@settings(max_examples=20)
@given(masks, st.booleans(), st.sampled_from([1, 8]), seeds)
def test_mean_is_nawrots_dense_formula_in_value_and_gradient(mask, force, multiple, seed):
    """Also without a boundary at the first byte, whose bytes receive the null group."""
    torch.manual_seed(seed)
    lm = small_lm("mean")
    action_BT = forced_first(mask) if force else torch.tensor(mask)
    action_BT[:, -1] |= action_BT.sum(1) == 0
    x_BTD = torch.randn(2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    boundary_BT = action_BT.double().requires_grad_()
    pooled = lm.pooling(x_BTD, action_BT, boundary_BT, lm.apply_token_layers, multiple)
    expected = dense_mean(lm, x_BTD, boundary_BT)
    torch.testing.assert_close(pooled, expected, rtol=1e-7, atol=1e-7)
    inputs = (boundary_BT, x_BTD, lm.pooling.null_D, lm.pooling.norm.weight)
    weight = torch.randn_like(pooled)
    grads = [torch.autograd.grad((y * weight).sum(), inputs) for y in (pooled, expected)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)
    hard = lm.pooling(x_BTD, action_BT, None, lm.apply_token_layers)
    torch.testing.assert_close(hard, pooled, rtol=1e-12, atol=1e-12)


def test_the_published_way_back_leaves_no_gradient():
    """Weights are normalised over segments, of which each byte has one: 1e-9 of the weight's gradient remains."""
    boundary_BT = forced_first([[0, 1, 0, 0, 1, 1]]).double().requires_grad_()
    up = published_weights(boundary_BT.cumsum(1), 5)
    weight = torch.randn(up.shape, dtype=torch.float64)
    (bare,) = torch.autograd.grad((up * weight).sum(), boundary_BT, retain_graph=True)
    (normalised,) = torch.autograd.grad(
        (up / (up.sum(2, keepdim=True) + 1e-9) * weight).sum(), boundary_BT
    )
    assert bare.abs().min() > 1e-2
    torch.testing.assert_close(normalised, 1e-9 * bare, rtol=1e-6, atol=1e-15)


def plain_smooth(lm, x_BTD, action_BT, prob_BT):
    """H-Net's equations, one byte of one sequence after the other; STE(c) = c / stop(c)."""
    weight = lm.pooling.residual_proj.weight
    bias = lm.pooling.residual_proj.bias
    rows = []
    for x_TD, action_T, prob_T in zip(x_BTD, action_BT, prob_BT, strict=True):
        at = action_T.nonzero().flatten()
        token_MD = lm.apply_token_layers(x_TD[at][None], at[None])[0]
        z = 0.0
        k = 0
        row = []
        for x, b, p in zip(x_TD, action_T.tolist(), prob_T, strict=True):
            if b:
                clamped = p.clamp(1e-4, 1 - 1e-4)
                z = clamped * token_MD[k] + (1 - clamped) * z
                k += 1
            c = p if b else 1 - p
            row.append(z * (c + (1 - c).detach()) + weight @ x + bias)
        rows.append(torch.stack(row))
    return torch.stack(rows)


@settings(max_examples=20)
@given(masks, st.sampled_from([1, 8]), seeds)
def test_smooth_is_hnets_formula_in_value_and_gradient(mask, multiple, seed):
    torch.manual_seed(seed)
    lm = small_lm("smooth")
    action_BT = forced_first(mask)
    x_BTD = torch.randn(2, LENGTH, 8, dtype=torch.float64, requires_grad=True)
    prob_BT = probability_of(action_BT).requires_grad_()
    pooled = lm.pooling(x_BTD, action_BT, prob_BT, lm.apply_token_layers, multiple)
    expected = plain_smooth(lm, x_BTD, action_BT, prob_BT)
    torch.testing.assert_close(pooled, expected, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(pooled)
    grads = [torch.autograd.grad((y * weight).sum(), (prob_BT, x_BTD)) for y in (pooled, expected)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_smooth_without_probabilities_selects_and_distributes():
    smooth = small_lm("smooth")
    select = small_lm("select")
    select.load_state_dict(smooth.state_dict(), strict=False)
    action_BT = forced_first([[0, 1, 0, 0, 1, 1]])
    x_BTD = torch.randn(1, 6, 8, dtype=torch.float64)
    bare, added = (
        lm.pooling(x_BTD, action_BT, None, lm.apply_token_layers) for lm in (smooth, select)
    )
    torch.testing.assert_close(bare - smooth.pooling.residual_proj(x_BTD), added - x_BTD)


@settings(max_examples=30)
@given(poolings, masks, st.booleans(), st.integers(1, LENGTH - 1), seeds)
def test_nothing_moves_an_earlier_output(pooling, mask, soft, t, seed):
    torch.manual_seed(seed)
    lm = small_lm(pooling)
    action_BT = forced_first(mask)
    symbol_BT = torch.randint(256, action_BT.shape)
    boundary_BT = soft_boundary(pooling, action_BT)
    flipped_BT = action_BT.clone()
    other_BT = boundary_BT.clone()
    other_symbol_BT = symbol_BT.clone()
    flipped_BT[:, t] = 1 - action_BT[:, t]
    other_BT[:, t] = 1 - boundary_BT[:, t]
    other_symbol_BT[:, t] = (symbol_BT[:, t] + 1) % 256

    def run(symbol_BT, action_BT, boundary_BT):
        return lm.decode(lm.encode(symbol_BT), action_BT, boundary_BT if soft else None)

    before = run(symbol_BT, action_BT, boundary_BT)
    for after in (
        run(symbol_BT, flipped_BT, other_BT),
        run(other_symbol_BT, action_BT, boundary_BT),
    ):
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-10, atol=1e-10)
        assert not torch.allclose(after[:, t], before[:, t])


@settings(max_examples=30)
@given(
    poolings,
    st.booleans(),
    st.lists(st.integers(1, LENGTH), min_size=2, max_size=4),
    st.floats(0, 1),
    seeds,
)
def test_stepping_equals_one_pass_when_rows_start_anew_at_their_own_times(
    pooling, soft, lengths, rate, seed
):
    """Row 0 reads episodes of the given lengths, row 1 the same in the other order, each then starting anew."""
    torch.manual_seed(seed)
    lm = small_lm(pooling)
    total = sum(lengths)
    starts = [{sum(order[:i]) for i in range(len(order))} for order in (lengths, lengths[::-1])]
    symbol_BT = torch.randint(256, (2, total))
    action_BT = (torch.rand(2, total) < rate).long()
    first_BT = torch.tensor([[t in start for t in range(total)] for start in starts])
    action_BT[first_BT] = 1
    prob_BT = probability_of(action_BT).masked_fill(first_BT, 1.0)
    decoder = Decoder(lm, 2, max(lengths))
    stepped = []
    for t in range(total):
        decoder.reset(first_BT[:, t])
        decoder.encode(symbol_BT[:, t])
        stepped.append(decoder.decode(action_BT[:, t], prob_BT[:, t] if soft else None))
    stepped = torch.stack(stepped, 1)
    for b, start in enumerate(starts):
        for begin, end in zip(sorted(start), [*sorted(start)[1:], total], strict=True):
            symbol, action, prob = (
                x[b : b + 1, begin:end] for x in (symbol_BT, action_BT, prob_BT)
            )
            with torch.no_grad():
                expected = lm.decode(
                    lm.encode(symbol), action, prob if soft and pooling == "smooth" else None
                )
            torch.testing.assert_close(
                stepped[b : b + 1, begin:end], expected, rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_reset_row_follows_parameters_that_were_trained_meanwhile(pooling):
    """The model is updated while an environment uses it."""
    lm = small_lm(pooling)
    symbol_BT = torch.randint(256, (2, 6))
    action_BT = forced_first([[0, 1, 0, 0, 1, 1]] * 2)
    decoder = Decoder(lm, 2, 6)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        expected = lm(symbol_BT, action_BT)
    decoder.reset(torch.ones(2, dtype=torch.bool))
    stepped = []
    for t in range(6):
        decoder.encode(symbol_BT[:, t])
        stepped.append(decoder.decode(action_BT[:, t]))
    torch.testing.assert_close(torch.stack(stepped, 1), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_bfloat16_is_close_and_every_parameter_learns(pooling):
    config = UNetConfig(width=64, heads=4, window=8, pooling=pooling)
    fine = UNet(config)
    coarse = UNet(config, compute_dtype=torch.bfloat16)
    coarse.load_state_dict(fine.state_dict())
    symbol_BT = torch.randint(256, (2, 30))
    action_BT = forced_first((torch.rand(2, 30) < 0.3).long().tolist())
    boundary_BT = soft_boundary(pooling, action_BT).float().requires_grad_()
    out, expected = (
        lm.decode(lm.encode(symbol_BT), action_BT, boundary_BT) for lm in (coarse, fine)
    )
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).std() < 0.05 * expected.std()
    coarse.codec.log_prob(out, symbol_BT).sum().backward()
    assert boundary_BT.grad.isfinite().all()
    assert boundary_BT.grad.abs().sum() > 0
    for name, parameter in coarse.named_parameters():
        assert "early" in name or (
            parameter.grad.dtype == torch.float32 and parameter.grad.isfinite().all()
        ), name


def test_layernorm_of_mean_sums_its_gradients_in_float32():
    """In bfloat16 the sum over 2 x 4,096 symbols was 22% off."""
    pooling = UNet(UNetConfig(width=16, heads=2, pooling="mean")).pooling
    token_BMD = torch.randn(2, 4096, 16).bfloat16()
    grad_BMD = (torch.randn(2, 4096, 16) + 1).bfloat16()
    pooling.normalise(token_BMD).backward(grad_BMD)
    coarse = [parameter.grad.clone() for parameter in pooling.norm.parameters()]
    pooling.zero_grad()
    pooling.normalise(token_BMD.float()).backward(grad_BMD.float())
    fine = [parameter.grad for parameter in pooling.norm.parameters()]
    torch.testing.assert_close(coarse, fine, rtol=1e-3, atol=1e-3)


def test_the_papers_pooling_has_no_parameters_and_others_start_as_published():
    assert not list(small_lm("select").pooling.parameters())
    smooth = UNet(UNetConfig(width=8, heads=2, pooling="smooth")).pooling
    assert not smooth.residual_proj.weight.any()


@settings(max_examples=20)
@given(masks)
def test_deviation_adds_what_the_token_level_layers_change(mask):
    lm = small_lm("deviation")
    action_BT = forced_first(mask)
    x_BTD = torch.randn(2, LENGTH, 8, dtype=torch.float64)
    y_BTD = lm.pooling(x_BTD, action_BT, None, lambda token, *_, **__: token * 3.0)
    for b in range(2):
        newest = 0
        for t in range(LENGTH):
            newest = t if action_BT[b, t] else newest
            torch.testing.assert_close(y_BTD[b, t], x_BTD[b, t] + 2.0 * x_BTD[b, newest])


def test_an_unknown_pooling_is_refused():
    with pytest.raises(
        ValueError,
        match=r"model\.pooling = 'max': expected select .*, deviation .*, mean .* or smooth",
    ):
        UNetConfig(pooling="max")


@settings(max_examples=20)
@given(masks, st.sampled_from([torch.float64, torch.bfloat16]), st.integers(0, 3), seeds)
def test_gathering_what_is_sorted_equals_gathering_in_value_and_gradient(mask, dtype, spare, seed):
    torch.manual_seed(seed)
    token_index_BT = segment(forced_first(mask)).token_index_BT
    x_BMD = torch.randn(2, LENGTH + spare, 8).to(dtype).requires_grad_()
    weight = torch.randn(2, LENGTH, 8).to(dtype)
    expected = torch.stack(
        [x_D[row_T] for x_D, row_T in zip(x_BMD.double(), token_index_BT, strict=True)]
    )
    (expected_gradient,) = torch.autograd.grad((expected * weight).sum(), x_BMD)
    gathered = SortedGather.apply(x_BMD, token_index_BT)
    assert torch.equal(gathered.double(), expected)
    (gradient,) = torch.autograd.grad((gathered * weight).sum(), x_BMD)
    torch.testing.assert_close(gradient, expected_gradient)
