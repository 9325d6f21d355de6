"""Packed tokens equal padded tokens, in values and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_attention import reference_attention

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.env.rollout import rollout
from tokenv.lm import unet
from tokenv.lm.attention import flex_with_mask
from tokenv.lm.config import POOLINGS, UNetConfig
from tokenv.lm.segments import BLOCK, Pack, bucket_size
from tokenv.lm.unet import UNet

LENGTH = 14
masks = st.lists(
    st.lists(st.integers(0, 1), min_size=LENGTH, max_size=LENGTH), min_size=3, max_size=3
)


def values_and_gradients(lm, symbol_BN, action_BN, boundary_BN):
    lm.zero_grad()
    y = lm.decode_hidden(lm.encode(symbol_BN), action_BN, boundary_BN)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y.detach()] + [p.grad.clone() for p in lm.parameters() if p.grad is not None]


@pytest.mark.parametrize("pooling", POOLINGS)
@settings(max_examples=10)
@given(masks, st.sampled_from([0, 5, 1000]), st.integers(0, 1000))
def test_packed_tokens_equal_padded_ones(pooling, mask, spare, seed):
    torch.manual_seed(seed)
    config = UNetConfig(
        width=16, heads=2, down_layers=1, mid_layers=2, up_layers=1, window=4, pooling=pooling
    )
    lm = UNet(config).double()
    for parameter in lm.parameters():  # some begin at zero
        torch.nn.init.normal_(parameter, std=0.3)
    symbol_BN = torch.randint(256, (3, LENGTH))
    action_BN = torch.tensor(mask)
    action_BN[:, 0] = 1
    boundary_BN = None if pooling == "select" else action_BN.double()
    padded = values_and_gradients(lm, symbol_BN, action_BN, boundary_BN)
    lm.pack_tokens()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unet, "bucket_size", lambda total: total + spare)
        packed = values_and_gradients(lm, symbol_BN, action_BN, boundary_BN)
    assert len(packed) == len(padded)
    for one, other in zip(packed, padded, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=6), st.integers(0, 2))
def test_the_block_mask_shows_each_token_its_own_past(count, spare):
    """On a CPU flex_attention reads the mask function alone; which blocks are computed is checked entry by entry."""
    bucket_size = (-(-sum(count) // BLOCK) + spare) * BLOCK
    pack = Pack.of(torch.tensor(count), max(count), bucket_size)
    row_C = torch.cat(
        [torch.full((n,), b) for b, n in enumerate(count)]
        + [torch.full((bucket_size - sum(count),), -1)]
    )
    past = torch.ones(bucket_size, bucket_size, dtype=torch.bool).tril()
    visible = past & (row_C[:, None] == row_C)
    mask = pack.block_mask()
    i = torch.arange(bucket_size)
    assert torch.equal(mask.mask_mod(0, 0, i[:, None], i[None, :]), visible)

    blocks = bucket_size // BLOCK
    tiles = visible.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2)
    partly = listed(mask.kv_num_blocks, mask.kv_indices)
    wholly = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (partly & wholly).any()
    assert torch.equal(wholly, wholly & tiles.all(-1).all(-1))
    assert torch.equal(tiles.any(-1).any(-1), (partly | wholly) & tiles.any(-1).any(-1))
    assert int((partly | wholly).sum()) == int(tiles.any(-1).any(-1).sum())  # and none in vain


def listed(number, index):
    """Return True for the blocks which a row of a block mask lists."""
    blocks = index.shape[-1]
    chosen = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        chosen[row, index[0, 0, row, : number[0, 0, row]].long()] = True
    return chosen


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_under_the_block_mask_is_that_of_the_sequences_alone():
    torch.manual_seed(0)
    count = torch.tensor([150, 3, 200])
    softcap = 7.0
    pack = Pack.of(count, 200, 3 * BLOCK)
    q, k, v = torch.randn(3, 1, 2, 3 * BLOCK, 8, dtype=torch.float64)
    actual = flex_with_mask(q, k, v, softcap, pack.block_mask())
    on_cpu = pack.attention(softcap)(q, k, v)
    start = 0
    for n in count.tolist():
        own = slice(start, start + n)
        expected = reference_attention(q[:, :, own], k[:, :, own], v[:, :, own], softcap)
        torch.testing.assert_close(actual[:, :, own], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(on_cpu[:, :, own], expected, rtol=1e-10, atol=1e-10)
        start += n


@given(st.integers(1, 10**7))
def test_a_pack_has_room_for_all_and_little_more(total):
    places = bucket_size(total)
    assert places % BLOCK == 0
    assert total <= places <= max(total * 17 // 16, total + BLOCK)
    # A few hundredths more or less take few sizes.
    assert len({bucket_size(round(total * (1 + share / 1000))) for share in range(-30, 31)}) <= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what warns is torch's compiler
def test_what_is_compiled_says_the_same_and_compiles_nothing_for_another_number_of_tokens():
    """Layers, exits and draws."""
    torch.manual_seed(0)
    lm = UNet(UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=4))
    agent = Learned(16, window=3, scale=0.5)
    parameters = [*lm.parameters(), *agent.parameters()]
    lm.pack_tokens()

    def passes():
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            td = rollout(
                lm, agent, torch.randint(256, (4, 200), generator=generator), generator=generator
            )
            loss = (
                td[keys.LOG_LIKELIHOOD] + td[keys.LOG_LIKELIHOOD_EARLY] + td[keys.ACTION_LOG_PROB]
            ).mean()
            yield td[keys.ACTION], loss.detach(), *torch.autograd.grad(loss, parameters)

    plain = list(passes())
    tokens = [int(action_BT.sum()) for action_BT, *_ in plain]
    assert len(set(tokens)) > 3
    assert len({bucket_size(number) for number in tokens}) == 1
    lm.compile_layers()
    agent.compile_draw()
    compiled = []
    for expected, actual in zip(plain, passes(), strict=True):
        assert torch.equal(actual[0], expected[0])
        torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-4, atol=1e-6)
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[1:] == compiled[:1] * 5
