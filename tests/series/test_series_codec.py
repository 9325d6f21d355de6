"""The series codec: densities integrate to one, agree with their quantiles, and are never NaN."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tokenv.env.generation import generate
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet
from tokenv.series.codec import DENSITIES, SeriesCodec
from tokenv.series.densities import MIN_SCALE, Bins, Gaussian, LogisticMixture, StudentT

FAMILIES = {
    "gaussian": Gaussian(),
    "student_t": StudentT(),
    "logistic_mixture": LogisticMixture(3),
    "bins": Bins(12, 3.0),
}
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
every_density = pytest.mark.parametrize("density", DENSITIES)
seeds = st.integers(0, 2**31)


def raw_for(family, *shape, seed=0, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(
        *shape, family.num_parameters, dtype=torch.float64, generator=generator
    )


def make_codec(density, channels=1):
    return SeriesCodec(16, channels, density).double()


def make_symbol(value, location=0.0, scale=1.0, loss_mask=1.0, last=None):
    """[.., C] -> [.., C, 5]."""
    value = torch.as_tensor(value, dtype=torch.float64)
    parts = (location, scale, loss_mask, location if last is None else last)
    rest = [torch.as_tensor(x, dtype=torch.float64).expand(value.shape) for x in parts]
    return torch.stack([value, *rest], -1)


def parameters_for(codec, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, codec.num_parameters, dtype=torch.float64, generator=generator)


# --- densities ---


@every_family
@settings(max_examples=15)
@given(seed=seeds, spread=st.sampled_from([0.3, 1.0, 2.0]))
def test_densities_integrate_to_one(family, seed, spread):
    """By the midpoint rule over x = sinh(s), which reaches into heavy tails."""
    raw = raw_for(family, 1, seed=seed, spread=spread)
    steps = 200_000
    reach = math.asinh(1e7)
    s = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps * 2 * reach - reach
    total = (family.log_prob(raw, s.sinh()).exp() * s.cosh()).sum() * 2 * reach / steps
    assert total.item() == pytest.approx(1, abs=1e-3)  # bins have edges


@every_family
@settings(max_examples=20)
@given(seed=seeds)
def test_the_density_is_the_slope_of_the_distribution(family, seed):
    raw = raw_for(family, 9, seed=seed)
    x = torch.tensor([-6.3, -2.9, -1.1, -0.4, 0.1, 0.3, 1.4, 2.8, 5.2], dtype=torch.float64)
    width = 1e-5
    slope = (family.cdf(raw, x + width) - family.cdf(raw, x - width)) / (2 * width)
    assert_close(family.log_prob(raw, x).exp(), slope, rtol=1e-4, atol=1e-7)


@every_family
@settings(max_examples=20)
@given(seed=seeds, q=st.floats(1e-5, 1 - 1e-5))
def test_the_quantile_inverts_the_distribution(family, seed, q):
    raw = raw_for(family, 8, seed=seed)
    q_8 = torch.full((8,), q, dtype=torch.float64)
    assert_close(family.cdf(raw, family.quantile(raw, q_8)), q_8, rtol=1e-6, atol=1e-9)


@every_family
@settings(max_examples=15)
@given(seed=seeds, spread=st.sampled_from([0.3, 1.0, 3.0]))
def test_quantiles_rise(family, seed, spread):
    raw = raw_for(family, 8, seed=seed, spread=spread)
    q_Q1 = torch.linspace(0.001, 0.999, 97, dtype=torch.float64)[:, None]
    found_Q8 = family.quantile(raw, q_Q1)
    assert (found_Q8.diff(dim=0) > 0).all()
    assert_close(family.cdf(raw, found_Q8), q_Q1.expand(-1, 8), rtol=0, atol=1e-9)


@every_family
@settings(max_examples=15)
@given(seed=seeds, value=st.sampled_from([-4.7, -2.9, -0.3, 0.0, 0.6, 3.0, 5.5]))
def test_the_ranked_probability_score_is_its_integral(family, seed, value):
    """``int (F(x) - [x >= y])^2 dx``, by the midpoint rule over x = y + sinh(s), which has a corner at y."""
    raw = raw_for(family, 1, seed=seed)
    steps = 100_000
    reach = math.asinh(1e6)
    s = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps * 2 * reach - reach
    distance = (family.cdf(raw, value + s.sinh()) - (s >= 0).double()).square()
    expected = (distance * s.cosh()).sum() * 2 * reach / steps
    score = family.crps(raw, torch.tensor([value], dtype=torch.float64))
    assert_close(score.item(), expected.item(), rtol=1e-6, atol=1e-6)


@settings(max_examples=15)
@given(seed=seeds, spread=st.sampled_from([0.1, 1.0, 2.0]))
def test_the_mixtures_score_is_exact_to_ten_digits(seed, spread):
    """``E|X - y| - int F (1 - F) dx``, by the trapezoidal rule, which is exact for such smooth functions."""
    generator = torch.Generator().manual_seed(seed)
    location_K, logit_K = spread * torch.randn(2, 3, generator=generator, dtype=torch.float64)
    scale_K = 0.2 + 3 * torch.rand(3, generator=generator, dtype=torch.float64)
    raw = torch.cat(
        [logit_K, location_K, torch.log(torch.expm1(scale_K - MIN_SCALE)) - math.log(math.e - 1)]
    )
    step = 0.05
    x = torch.arange(-150, 150, step, dtype=torch.float64)
    cdf = torch.sigmoid((x[:, None] - location_K) / scale_K) @ logit_K.softmax(0)
    z_K = (0.4 - location_K) / scale_K
    distance = logit_K.softmax(0) @ (
        scale_K * (2 * torch.logaddexp(z_K, torch.zeros(3).double()) - z_K)
    )
    expected = distance - step * (cdf * (1 - cdf)).sum()
    score = LogisticMixture(3).crps(raw, torch.tensor(0.4, dtype=torch.float64))
    assert_close(score, expected, rtol=0, atol=1e-9)


@every_family
def test_entropy_and_mean_are_those_of_many_draws(family):
    """Means over evenly spaced quantiles."""
    raw = raw_for(family, 4)
    count = 20_000
    q = ((torch.arange(count, dtype=torch.float64) + 0.5) / count)[:, None].expand(-1, 4)
    x = family.quantile(raw.expand(count, -1, -1), q)
    tolerance = {"rtol": 0.01, "atol": 0.02}
    assert_close(family.mean(raw), x.mean(0), **tolerance)
    assert_close(family.entropy(raw), -family.log_prob(raw, x).mean(0), **tolerance)


def test_scales_have_a_floor():
    """The likelihood of a constant series is bounded."""
    for family in (Gaussian(), StudentT(), LogisticMixture(2)):
        raw = torch.full((family.num_parameters,), -1e4, dtype=torch.float64)
        raw[0 if family.num_parameters < 6 else slice(0, 4)] = 0.0
        assert family.log_prob(raw, torch.zeros((), dtype=torch.float64)).item() <= -math.log(
            MIN_SCALE
        )


@pytest.mark.parametrize("value", [-1e8, -3.0, 3.0, 1e8])
@every_family
def test_far_values_and_edges_have_finite_gradients(family, value):
    raw = raw_for(family, 1).float().requires_grad_()
    log_prob = family.log_prob(raw, torch.tensor([value]))
    log_prob.sum().backward()
    assert log_prob.isfinite().all()
    assert raw.grad.isfinite().all()


# --- the codec ---


@every_density
@settings(max_examples=20)
@given(seed=seeds, shift=st.floats(-1e4, 1e4), factor=st.floats(1e-3, 1e3))
def test_shifted_and_scaled_values_cost_log_scale_more(density, seed, shift, factor):
    """Mean, quantiles and distribution agree, too; the embedding is the same."""
    codec = make_codec(density, channels=2)
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    plain = make_symbol(value, 0.3, 1.7)
    moved = make_symbol(factor * value + shift, factor * 0.3 + shift, factor * 1.7)
    parameters = parameters_for(codec, 5, seed=seed)
    difference = codec.log_prob(parameters, plain) - codec.log_prob(parameters, moved)
    assert_close(
        difference,
        torch.full((5,), 2 * math.log(factor), dtype=torch.float64),
        rtol=1e-6,
        atol=1e-6,
    )
    assert_close(codec.embed(plain), codec.embed(moved), rtol=1e-6, atol=1e-6)
    frames = [(s[..., 1], s[..., 2]) for s in (plain, moved)]
    for ask in (codec.mean, lambda p, *frame: codec.quantile(p, 0.9, *frame)):
        before, after = (ask(parameters, *frame) for frame in frames)
        assert_close(after, factor * before + shift, rtol=1e-7, atol=1e-7)
    before, after = (
        codec.cdf(parameters, s[..., 0], *frame)
        for s, frame in zip((plain, moved), frames, strict=True)
    )
    assert_close(before, after, rtol=1e-5, atol=1e-7)


@every_density
def test_missing_values_are_worth_exactly_nothing(density):
    codec = make_codec(density, channels=3)
    value = torch.randn(4, 3, dtype=torch.float64)
    value[1, 0] = value[2] = math.nan
    symbol = make_symbol(value)
    symbol[3, :, 3] = 0  # in the context
    parameters = parameters_for(codec, 4).requires_grad_()
    log_prob = codec.log_prob(parameters, symbol)
    assert codec.loss_mask(symbol).tolist() == [3, 2, 0, 0]
    assert log_prob.isfinite().all()
    assert log_prob[2:].tolist() == [0, 0]
    (log_prob.sum() + codec.embed(symbol).sum()).backward()
    grad = parameters.grad.view(4, 3, -1)
    assert grad.isfinite().all()
    assert not grad[1, 0].any()
    assert not grad[2:].any()
    assert grad[0].any(-1).all()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in codec.parameters())


def test_missing_is_read_as_a_vector_of_its_own():
    codec = make_codec("gaussian")
    missing, zero = codec.embed(make_symbol([[math.nan], [0.0]]))
    assert not torch.allclose(missing, zero)
    assert_close(codec.embed(make_symbol([math.nan], 7.0, 3.0)), missing)


def test_channels_factorise():
    codec = make_codec("student_t", 2)
    single = make_codec("student_t")
    symbol = make_symbol(torch.randn(6, 2))
    parameters = parameters_for(codec, 6)
    halves = [
        single.log_prob(parameters[:, 3 * c : 3 * c + 3], symbol[:, c : c + 1]) for c in range(2)
    ]
    assert_close(codec.log_prob(parameters, symbol), halves[0] + halves[1])
    assert_close(
        codec.entropy(parameters),
        single.entropy(parameters[:, :3]) + single.entropy(parameters[:, 3:]),
    )


@every_density
def test_draws_have_the_moments_of_the_density(density):
    codec = make_codec(density)
    count = 20_000
    parameters = parameters_for(codec, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = codec.sample(parameters.expand(count, -1), generator=generator)
    assert drawn.shape == (count, 1, 5)
    assert drawn.dtype == codec.symbol_dtype
    assert_close(drawn[0, 0, 1:], torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64))
    value = drawn[:, 0, 0]
    assert value.mean().item() == pytest.approx(
        codec.mean(parameters).item(), abs=5 * value.std().item() / count**0.5
    )
    surprise = -codec.log_prob(parameters.expand(count, -1), drawn).mean().item()
    assert surprise == pytest.approx(codec.entropy(parameters).item(), abs=0.05)
    for q in (0.1, 0.5, 0.9):
        share = (value < codec.quantile(parameters, q).item()).double().mean().item()
        assert share == pytest.approx(q, abs=0.012)


@every_density
def test_cautious_draws_stay_near_the_median(density):
    codec = make_codec(density)
    parameters = parameters_for(codec, 1).expand(500, -1)
    median, low, high = (codec.quantile(parameters[:1], q).item() for q in (0.5, 0.25, 0.75))
    assert_close(
        codec.sample(parameters, temperature=0)[:, 0, 0],
        torch.full((500,), median, dtype=torch.float64),
    )
    central = codec.sample(parameters, top_p=0.5)[:, 0, 0]
    assert low - 1e-9 <= central.min() <= central.max() <= high + 1e-9


def test_draws_embed_as_in_the_frame_of_their_sequence():
    """What is sampled in units of the frame is read back as the same value on the original scale would be."""
    codec = make_codec("student_t")
    drawn = codec.sample(parameters_for(codec, 3))
    assert_close(codec.embed(drawn), codec.embed(make_symbol(5 + 0.1 * drawn[..., 0], 5.0, 0.1)))


def one_step(parameters):
    """Return parameters as a head returns them for a horizon of one step."""
    return parameters.unsqueeze(-2)


@every_density
def test_a_residual_density_is_that_of_the_difference(density):
    """Log p(x) with the last value known is the plain log p of the difference; draws and quantiles add it again."""
    plain = make_codec(density)
    residual = SeriesCodec(16, 1, density, residual=True).double()
    parameters = parameters_for(plain, 6)
    value, last = torch.randn(2, 6, 1, dtype=torch.float64)
    location, scale = 5.0, 0.3
    expected = plain.log_prob(parameters, make_symbol(value - last, 0.0, scale))
    assert_close(
        residual.log_prob(parameters, make_symbol(value, location, scale, last=last)), expected
    )
    before = make_symbol(last, location, scale, last=99.0)
    missing = make_symbol(torch.full_like(last, math.nan), location, scale, last=last)
    for symbol in (before, missing):
        ahead = make_symbol(value, location, scale, last=77.0)[:, None]
        assert_close(residual._direct_log_prob(one_step, parameters, symbol, ahead)[:, 0], expected)
    draws = [
        codec.sample(parameters, generator=torch.Generator().manual_seed(0), **more)
        for codec, more in ((residual, {"after": before}), (plain, {}))
    ]
    assert_close(draws[0][..., 0], draws[1][..., 0] + (last - location) / scale)
    assert_close(residual.base(draws[0]), draws[0][..., 0])


def test_only_residual_densities_read_the_last_value():
    codec = make_codec("student_t")
    parameters = parameters_for(make_codec("student_t"), 3)
    one, other = (make_symbol(torch.ones(3, 1), last=last) for last in (0.0, 4.0))
    assert torch.equal(codec.log_prob(parameters, one), codec.log_prob(parameters, other))
    ahead = codec._direct_log_prob(one_step, parameters, one, one[:, None])[:, 0]
    assert torch.equal(ahead, codec.log_prob(parameters, one))
    assert not codec.base(other).any()


@every_density
def test_likelihoods_are_computed_in_float32_or_finer(density):
    codec = SeriesCodec(16, 1, density)
    parameters = torch.randn(3, codec.num_parameters)
    symbol = make_symbol(torch.randn(3, 1))
    assert codec.log_prob(parameters.bfloat16(), symbol).dtype == torch.float32
    assert codec.entropy(parameters.bfloat16()).dtype == torch.float32
    assert codec.log_prob(parameters.double(), symbol).dtype == torch.float64
    assert codec.embed(symbol).dtype == torch.float32


def test_a_model_writes_on():
    from tokenv.agents.fixed import Uniform

    lm = UNet(
        UNetConfig(width=16, heads=2, down_layers=1, mid_layers=1, up_layers=1), SeriesCodec(16, 2)
    )
    prompt = make_symbol(torch.randn(2, 5, 2))
    written = generate(lm, Uniform(0.3, 12), prompt, 7, generator=torch.Generator().manual_seed(0))
    assert written.symbol_BN.shape == (2, 12, 2, 5)
    assert written.symbol_BN.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": "cauchy"}, r"codec.density = 'cauchy' is unknown: known are bins, gaussian"),
        ({"channels": 0}, "codec.channels = 0"),
        ({"density": "logistic_mixture", "components": 0}, "codec.components = 0"),
        ({"density": "bins", "bins": 0}, "codec.bins = 0"),
        ({"density": "bins", "reach": -1.0}, r"codec.reach = -1.0"),
    ],
)
def test_impossible_codecs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SeriesCodec(16, **options)


def test_impossible_questions_are_refused():
    codec = make_codec("gaussian")
    with pytest.raises(ValueError, match=r"q = 1.0: expected probabilities strictly between"):
        codec.quantile(parameters_for(codec, 2), 1.0)
    with pytest.raises(ValueError, match="temperature = -1"):
        codec.sample(parameters_for(codec, 2), temperature=-1.0)
    with pytest.raises(ValueError, match="top_p = 0"):
        codec.sample(parameters_for(codec, 2), top_p=0.0)
