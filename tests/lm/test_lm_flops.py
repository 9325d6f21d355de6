"""Costs by the paper's rule, and the paper's figures."""

import pytest
import torch

from tokenv.lm.config import UNetConfig
from tokenv.lm.flops import (
    Passes,
    Tokens,
    early_exit_share,
    given_flops,
    matrix_parameters,
    policy_flops,
    policy_share,
    training_flops,
    update_flops,
)
from tokenv.lm.unet import UNet

RATE = 0.2


def paper_lm(width, heads, mid):
    with torch.device("meta"):
        return UNet(UNetConfig(width=width, heads=heads, down_layers=4, mid_layers=mid, up_layers=4))


def test_every_matrix_is_counted_by_hand():
    lm = UNet(UNetConfig(width=16, heads=2, down_layers=1, mid_layers=3, up_layers=2))
    byte_layers, token_layers, head = 3 * 7 * 16**2, 3 * 16 * 16**2, 256 * 16
    assert matrix_parameters(lm) == byte_layers + token_layers + 2 * head
    assert training_flops(lm, 100, 30, 6 * 5) == 6 * (100 * (byte_layers + 2 * head + 5) + 30 * token_layers)
    assert given_flops(lm, 100, 30) == 6 * (100 * (byte_layers + head) + 30 * token_layers)


@pytest.mark.parametrize(
    ("mid", "num_bytes", "flops", "tolerance"),
    [
        (12, 6_000_000_000, 2.0e18, 0.03),  # we count 2.019e18
        (6, 3_400_000_000, 0.95e18, 0.05),  # we count 0.913e18
    ],
)
def test_training_costs_what_the_paper_says(mid, num_bytes, flops, tolerance):
    lm = paper_lm(768, 12, mid)
    assert training_flops(lm, num_bytes, int(RATE * num_bytes), 6 * 9 * 768) == pytest.approx(flops, rel=tolerance)


def test_learning_the_boundaries_adds_less_than_a_thousandth():
    """Window 8 at 147M: 0.012% for the policy; the early exit, a second head, adds 0.35%."""
    lm = paper_lm(768, 12, 12)
    assert policy_share(lm, 1000, 200, 6 * 9 * 768) < 1e-3
    assert policy_share(lm, 1000, 200, 6 * 9 * 768) == pytest.approx(1.237e-4, rel=0.01)
    assert early_exit_share(lm, 1000, 200) == pytest.approx(3.52e-3, rel=0.01)


def test_shares_add_up():
    lm = paper_lm(512, 8, 4)
    added = training_flops(lm, 1000, 200, 6 * 9 * 512) - given_flops(lm, 1000, 200)
    shares = policy_share(lm, 1000, 200, 6 * 9 * 512) + early_exit_share(lm, 1000, 200)
    assert shares == pytest.approx(added / given_flops(lm, 1000, 200))


def test_a_policy_that_does_not_learn_goes_forward_only():
    lm, policy = paper_lm(512, 8, 4), torch.nn.Linear(512, 7)
    learning = policy_flops(policy)
    assert learning == 6 * 512 * 7
    assert update_flops(lm, 1000, Tokens(200), learning, Passes()) == training_flops(lm, 1000, 200, learning)
    assert policy_flops(policy.requires_grad_(False)) == 2 * 512 * 7
