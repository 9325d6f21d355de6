"""The whole model: causality, the paper's sizes, other symbols."""

import math

import pytest
import torch
from episodes import forced_first
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.estimators.recipes import reinforce
from tokenv.lm.codecs.base import Codec
from tokenv.lm.config import UNetConfig
from tokenv.lm.flops import matrix_parameters
from tokenv.lm.layers import Linear
from tokenv.lm.segments import segment, select
from tokenv.lm.unet import UNet

LENGTH = 14
masks = st.lists(
    st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH), min_size=2, max_size=2
)
seeds = st.integers(0, 1000)


def small_lm(**options):
    """Float64; fewer bytes in the window than in the sequences."""
    return UNet(
        UNetConfig(width=16, heads=2, down_layers=2, mid_layers=2, up_layers=2, window=4), **options
    ).double()


@settings(max_examples=25)
@given(masks, st.integers(0, LENGTH - 1), seeds)
def test_a_symbol_moves_no_earlier_output(mask, t, seed):
    torch.manual_seed(seed)
    lm = small_lm()
    action_BN = forced_first(mask)
    symbol_BN = torch.randint(256, action_BN.shape)
    changed_BN = symbol_BN.clone()
    changed_BN[:, t] = (symbol_BN[:, t] + 1) % 256
    before = lm(symbol_BN, action_BN)
    after = lm(changed_BN, action_BN)
    torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(after[:, t], before[:, t])
    early_before, early_after = (lm.early_exit(lm.encode(x)) for x in (symbol_BN, changed_BN))
    torch.testing.assert_close(early_after[:, :t], early_before[:, :t], rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(masks, st.integers(1, LENGTH - 1), seeds)
def test_a_boundary_moves_no_earlier_output(mask, t, seed):
    torch.manual_seed(seed)
    lm = small_lm()
    action_BN = forced_first(mask)
    symbol_BN = torch.randint(256, action_BN.shape)
    changed_BN = action_BN.clone()
    changed_BN[:, t] = 1 - action_BN[:, t]
    before = lm(symbol_BN, action_BN)
    after = lm(symbol_BN, changed_BN)
    torch.testing.assert_close(after[:, :t], before[:, :t], rtol=1e-10, atol=1e-10)
    assert not torch.allclose(after[:, t], before[:, t])


@settings(max_examples=10)
@given(masks, seeds)
def test_rows_and_padding_do_not_meet(mask, seed):
    """Rows have different numbers of tokens; each alone gives the same."""
    torch.manual_seed(seed)
    lm = small_lm()
    action_BN = forced_first(mask)
    symbol_BN = torch.randint(256, action_BN.shape)
    together = lm(symbol_BN, action_BN)
    alone = [lm(symbol_BN[b : b + 1, : 9 + b], action_BN[b : b + 1, : 9 + b]) for b in range(2)]
    for b, row in enumerate(alone):
        torch.testing.assert_close(together[b : b + 1, : 9 + b], row, rtol=1e-10, atol=1e-10)


@settings(max_examples=10)
@given(masks, st.sampled_from([2, 8, 128]), seeds)
def test_padding_the_tokens_changes_nothing(mask, multiple, seed):
    """Padding to few different token lengths, for compiled layers, changes neither values nor gradients."""
    torch.manual_seed(seed)
    lm = small_lm()
    action_BN = forced_first(mask)
    symbol_BN = torch.randint(256, action_BN.shape)
    trained = [p for name, p in lm.named_parameters() if "early" not in name]
    results = []
    for lm._token_multiple in (1, multiple):
        out = lm(symbol_BN, action_BN)
        results.append((out, *torch.autograd.grad(out.square().sum(), trained)))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    tokens = segment(action_BN, multiple)
    assert tokens.boundary_BM.shape[1] % multiple == 0
    assert tokens.count_B.tolist() == action_BN.sum(1).tolist()


def meta_lm(width, heads, mid):
    with torch.device("meta"):
        return UNet(
            UNetConfig(width=width, heads=heads, down_layers=4, mid_layers=mid, up_layers=4)
        )


def parameters(*modules):
    return sum(x.numel() for module in modules for x in module.parameters())


@pytest.mark.parametrize(
    ("width", "heads", "mid", "millions"), [(768, 12, 12, 147), (768, 12, 6, 90), (512, 8, 6, 40)]
)
def test_sizes_are_the_papers(width, heads, mid, millions):
    assert parameters(meta_lm(width, heads, mid)) == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize(("mid", "millions"), [(2, 23), (4, 31), (6, 40)])
def test_matrices_of_the_layers_round_to_the_papers_small_sizes(mid, millions):
    """The paper's 23M, 31M and 40M are the layers; embedding and both heads add 3 * 256 * 512 = 0.39M."""
    lm = meta_lm(512, 8, mid)
    assert round(matrix_parameters(lm.down, lm.mid, lm.up) / 1e6) == millions
    assert parameters(lm.codec, lm.head, lm.early_head) == 3 * 256 * 512


def test_the_early_exit_starts_as_a_copy_of_its_own():
    lm = small_lm()
    for early, late in ((lm.early_head, lm.head), (lm.early_norm, lm.norm)):
        torch.testing.assert_close(early.weight, late.weight, rtol=0, atol=0)
        assert early.weight.data_ptr() != late.weight.data_ptr()
    with torch.no_grad():
        lm.early_head.weight.zero_()
    assert lm.head.weight.abs().sum() > 0


def test_tokens_stand_at_their_boundaries_byte_positions():
    lm = small_lm()
    action_BN = torch.tensor([[1, 0, 0, 1, 0, 0, 0, 0, 1, 1]])
    x_BND = lm.encode(torch.randint(256, action_BN.shape))
    token_BMD = select(x_BND, segment(action_BN))
    byte_BM = torch.tensor([[0, 3, 8, 9]])
    index_BM = torch.arange(4)[None]
    by_byte, by_index = (
        lm.apply_token_layers(token_BMD, position) for position in (byte_BM, index_BM)
    )
    assert not torch.allclose(by_byte, by_index)
    torch.testing.assert_close(lm.apply_token_layers(token_BMD, byte_BM + 5), by_byte)
    outputs = {}
    lm.mid[-1].register_forward_hook(lambda layer, args, out: outputs.setdefault("out", out))
    lm.decode(x_BND, action_BN)
    torch.testing.assert_close(outputs["out"][:, :4], by_byte)  # what follows is padding


def test_bfloat16_activations_are_close_to_float32():
    config = UNetConfig(width=64, heads=4, window=8)
    torch.manual_seed(1)
    fine = UNet(config)
    coarse = UNet(config, compute_dtype=torch.bfloat16)
    coarse.load_state_dict(fine.state_dict())
    symbol_BN = torch.randint(256, (2, 30))
    action_BN = (torch.rand(2, 30) < 0.3).long()
    action_BN[:, 0] = 1
    expected = fine(symbol_BN, action_BN)
    actual = coarse(symbol_BN, action_BN)
    assert actual.dtype == torch.bfloat16
    assert (actual.float() - expected).std() < 0.05 * expected.std()
    log_prob = coarse.codec.log_prob(actual, symbol_BN)
    assert log_prob.dtype == torch.float32
    log_prob.sum().backward()
    assert all(
        p.grad is None or (p.grad.dtype == torch.float32 and p.grad.isfinite().all())
        for p in coarse.parameters()
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"width": 0}, "width"),
        ({"window": 0}, "window"),
        ({"width": 10, "heads": 4}, "heads"),
        ({"width": 6, "heads": 2}, "heads"),
    ],
)
def test_impossible_sizes_are_refused(options, name):
    with pytest.raises(ValueError, match=f"model.{name}"):
        UNetConfig(**options)


class GaussianCodec(Codec):
    """Real numbers with a normal distribution: mean and log standard deviation."""

    symbol_shape = (1,)
    symbol_dtype = torch.float64
    num_parameters = 2

    def __init__(self, width):
        super().__init__()
        self.lift = Linear(1, width)

    def embed(self, symbol):
        return self.lift(symbol)

    def _normal(self, parameters):
        mean, log_std = parameters.unbind(-1)
        return torch.distributions.Normal(mean, log_std.exp(), validate_args=False)

    def log_prob(self, parameters, symbol):
        return self._normal(parameters).log_prob(symbol.squeeze(-1))

    def sample(self, parameters, *, temperature=1.0, top_p=1.0, generator=None, after=None):
        normal = self._normal(parameters)
        noise = torch.randn(normal.mean.shape, generator=generator, dtype=parameters.dtype)
        return (normal.mean + temperature * normal.stddev * noise).unsqueeze(-1)


def test_another_codec_trains_without_any_other_change():
    lm = small_lm(codec=GaussianCodec(16))
    agent = Learned(16, window=2).double()
    walk_BN1 = torch.randn(4, LENGTH, 1, dtype=torch.float64).cumsum(1)
    optimizer = torch.optim.Adam([*lm.parameters(), *agent.parameters()], lr=3e-3)
    losses = []
    for _ in range(3):
        data = reinforce()(rollout(lm, agent, walk_BN1))
        late = -data[keys.LOG_LIKELIHOOD].mean()
        early = -data[keys.LOG_LIKELIHOOD_EARLY].mean()
        loss = late + 0.1 * early + 0.01 * data[keys.LOSS_POLICY].mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(
            p.grad is not None and p.grad.isfinite().all()
            for p in nn.ModuleList([lm, agent]).parameters()
        )
        optimizer.step()
        losses.append(late.item())
    assert data[keys.SYMBOL].shape == (4, LENGTH - 1, 1)
    assert math.isfinite(losses[-1])
    assert losses[-1] < losses[0]
