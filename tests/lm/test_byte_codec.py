"""The byte codec: soft-capped categorical distributions, and nucleus sampling."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenv.lm.codecs.base import ByteCodec


@pytest.fixture
def codec():
    return ByteCodec(8, vocabulary=4)


def parameters_for(codec, prob):
    """Return a head's output whose capped logits are the log-probabilities."""
    return codec.softcap * torch.atanh(torch.tensor(prob).log() / codec.softcap)


def draws(codec, prob, count=4000, **options):
    drawn = codec.sample(parameters_for(codec, prob).expand(count, -1), **options)
    return torch.bincount(drawn, minlength=4) / count


def test_log_prob_is_that_of_the_capped_logits(codec):
    parameters = 40 * torch.randn(3, 5, 4)
    symbol = torch.randint(4, (3, 5))
    expected = torch.distributions.Categorical(logits=30 * torch.tanh(parameters / 30)).log_prob(
        symbol
    )
    torch.testing.assert_close(codec.log_prob(parameters, symbol), expected)


def test_entropy_is_that_of_the_capped_logits(codec):
    parameters = 40 * torch.randn(3, 5, 4)
    expected = torch.distributions.Categorical(logits=30 * torch.tanh(parameters / 30)).entropy()
    torch.testing.assert_close(codec.entropy(parameters), expected)


def test_log_prob_is_computed_in_float32_or_finer(codec):
    symbol = torch.tensor([1])
    assert codec.entropy(torch.randn(1, 4).bfloat16()).dtype == torch.float32
    assert codec.log_prob(torch.randn(1, 4).bfloat16(), symbol).dtype == torch.float32
    assert codec.log_prob(torch.randn(1, 4).double(), symbol).dtype == torch.float64


def test_embedded_symbols_have_unit_variance():
    codec = ByteCodec(64)
    assert codec.embed(torch.arange(256)).std().item() == pytest.approx(1, abs=0.05)


def test_temperature_zero_takes_the_most_probable(codec):
    parameters = torch.randn(2, 3, 4)
    assert torch.equal(codec.sample(parameters, temperature=0), parameters.argmax(-1))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-6, [0]),
        (0.35, [0]),
        (0.45, [0, 1]),
        (0.69, [0, 1]),
        (0.75, [0, 1, 2]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_smallest_nucleus(codec, top_p, kept):
    """The nucleus keeps its proportions; symbols are not sorted by probability."""
    prob = [0.4, 0.3, 0.2, 0.1]
    order = [2, 0, 3, 1]
    shuffled = [0.0] * 4
    for rank, symbol in enumerate(order):
        shuffled[symbol] = prob[rank]
    frequency = draws(codec, shuffled, top_p=top_p)
    total = sum(prob[rank] for rank in kept)
    for rank, symbol in enumerate(order):
        expected = prob[rank] / total if rank in kept else 0.0
        assert frequency[symbol].item() == pytest.approx(expected, abs=0.04 if expected else 0)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 20), min_size=4, max_size=4), st.floats(0.05, 1.0))
def test_nothing_outside_the_nucleus_is_drawn(weights, top_p):
    codec = ByteCodec(8, vocabulary=4)
    prob = [weight / sum(weights) for weight in weights]
    frequency = draws(codec, prob, count=200, top_p=top_p)
    for symbol, p in enumerate(prob):
        more_probable = sum(other for other in prob if other > p)
        if more_probable > top_p + 1e-5:
            assert frequency[symbol] == 0


def test_temperature_sharpens(codec):
    frequency = draws(codec, [0.4, 0.3, 0.2, 0.1], temperature=0.5)
    assert frequency[0].item() == pytest.approx(0.16 / 0.3, abs=0.04)


def test_draws_follow_the_generator(codec):
    parameters = torch.randn(50, 4)
    first, second = (
        codec.sample(parameters, generator=torch.Generator().manual_seed(3)) for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": math.nan}, "top_p"),
    ],
)
def test_impossible_options_are_refused(codec, options, name):
    with pytest.raises(ValueError, match=name):
        codec.sample(torch.randn(1, 4), **options)


def test_rounding_changes_a_draw_only_where_two_symbols_are_nearly_tied():
    """Symbols are drawn by rank: of two with nearly equal probabilities, rounding decides which has which noise."""
    codec = ByteCodec(8)
    difference = 1e-4
    parameters = torch.randn(4000, 256)
    noise = codec.sample_noise(len(parameters), None)
    rounded = parameters + difference / 10 * torch.randn_like(parameters)
    compiled = codec.sample(parameters, noise=noise)
    by_torch = codec.sample(rounded.double(), noise=noise)
    differ = compiled != by_torch
    assert 0 < differ.sum() < 100
    prob = codec.logits(rounded.double()).softmax(-1)
    ratio = prob.sort(descending=True).values / -torch.log1p(-noise)
    best, second = ratio.topk(2).values.T
    first_p, second_p = (prob.gather(1, symbol[:, None])[:, 0] for symbol in (compiled, by_torch))
    tied = ((first_p / second_p).log().abs() < difference) | ((best / second).log() < difference)
    assert tied[differ].all()
