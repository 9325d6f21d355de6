"""Costs by the paper's rule, and the paper's figures."""

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_attention import reference_attention
from torch.utils.flop_counter import FlopCounterMode

from tokenv.lm.config import UNetConfig
from tokenv.lm.flops import (
    Batch,
    Passes,
    Tokens,
    early_exit_share,
    given_flops,
    matrix_parameters,
    policy_flops,
    policy_share,
    rate_of_flops,
    reading_flops,
    update_flops,
)
from tokenv.lm.unet import UNet

RATE = 0.2


@functools.cache
def paper_lm(width, heads, mid):
    with torch.device("meta"):
        return UNet(
            UNetConfig(width=width, heads=heads, down_layers=4, mid_layers=mid, up_layers=4)
        )


def test_every_matrix_is_counted_by_hand():
    lm = UNet(UNetConfig(width=16, heads=2, down_layers=1, mid_layers=3, up_layers=2))
    byte_layers = 3 * 7 * 16**2
    token_layers = 3 * 16 * 16**2
    head = 256 * 16
    assert matrix_parameters(lm) == byte_layers + token_layers + 2 * head
    batch = Batch(4, 25)
    tokens = Tokens(30, learning_pairs=70)
    linear = 6 * (100 * (byte_layers + 2 * head + 5) + 30 * token_layers)
    assert update_flops(lm, batch, tokens, 6 * 5, Passes(), attention=False) == linear
    attention = 6 * 2 * 16 * (3 * batch.pairs(64) + 3 * 70)
    assert update_flops(lm, batch, tokens, 6 * 5, Passes()) == linear + attention
    assert (
        given_flops(lm, batch, tokens)
        == 6 * (100 * (byte_layers + head) + 30 * token_layers) + attention
    )


@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 50)))
def test_pairs_are_the_keys_that_queries_see(length, window):
    """A query's output depends on as many keys as are counted."""
    q = torch.zeros(length, 1)
    v = torch.eye(length)
    visible = reference_attention(q, q, v, 50.0, window) > 0
    assert Batch(3, length).pairs(window) == 3 * visible.sum()


def test_a_pair_costs_what_torch_counts():
    q = torch.randn(2, 3, 20, 8)
    with FlopCounterMode(display=False) as counter:
        reference_attention(q, q, q, 50.0)
    assert counter.get_total_flops() == 2 * (2 * 3 * 8) * 2 * 20**2  # sequences x 2 D x 2 x pairs


@pytest.mark.parametrize(
    ("mid", "num_bytes", "flops", "tolerance"),
    [
        (12, 6_000_000_000, 2.0e18, 0.03),  # we count 2.019e18
        (6, 3_400_000_000, 0.95e18, 0.05),  # we count 0.913e18
    ],
)
def test_training_costs_what_the_paper_says(mid, num_bytes, flops, tolerance):
    lm = paper_lm(768, 12, mid)
    batch = Batch(num_bytes // 4096, 4096)
    tokens = Passes().tokens(batch, RATE)
    assert update_flops(lm, batch, tokens, 6 * 9 * 768, Passes(), attention=False) == pytest.approx(
        flops, rel=tolerance
    )


def test_learning_the_boundaries_adds_less_than_a_thousandth():
    """Window 8 at 147M: 0.012% for the policy; the early exit, a second head, adds 0.35%."""
    lm = paper_lm(768, 12, 12)
    batch = Batch(1, 4096)
    tokens = Passes().tokens(batch, RATE)
    assert policy_share(lm, batch, tokens, 6 * 9 * 768) < 1e-3
    assert policy_share(lm, batch, tokens, 6 * 9 * 768) == pytest.approx(1.2e-4, rel=0.03)
    assert early_exit_share(lm, batch, tokens) == pytest.approx(3.4e-3, rel=0.03)


def test_shares_add_up():
    lm = paper_lm(512, 8, 4)
    batch = Batch(2, 500)
    tokens = Passes().tokens(batch, RATE)
    added = update_flops(lm, batch, tokens, 6 * 9 * 512, Passes()) - given_flops(lm, batch, tokens)
    shares = policy_share(lm, batch, tokens, 6 * 9 * 512) + early_exit_share(lm, batch, tokens)
    assert shares == pytest.approx(added / given_flops(lm, batch, tokens))


@given(st.floats(0.01, 0.99), st.integers(2, 300))
def test_reading_costs_a_third_of_training_and_gives_its_rate_back(rate, length):
    lm = paper_lm(512, 8, 4)
    policy = torch.nn.Linear(512, 7)
    batch = Batch(1, length)
    count = rate * length
    tokens = Tokens(count, learning_pairs=count * (count + 1) / 2)
    flops = reading_flops(lm, rate, policy, length)
    assert 3 * length * flops == pytest.approx(
        given_flops(lm, batch, tokens) + policy_flops(policy) * length
    )
    assert rate_of_flops(lm, flops, policy, length) == pytest.approx(rate)
    assert rate_of_flops(lm, 1.0, policy, length) < 0


def test_a_policy_that_does_not_learn_goes_forward_only():
    policy = torch.nn.Linear(512, 7)
    learning = policy_flops(policy)
    assert learning == 6 * 512 * 7
    assert policy_flops(policy.requires_grad_(False)) == 2 * 512 * 7
