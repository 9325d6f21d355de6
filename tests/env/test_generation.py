"""Generation equals one pass over the generated sequence."""

import copy

import pytest
import torch
from hypothesis import given as hypothesis_given
from hypothesis import settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.agents.base import BoundaryDistribution
from tokenv.agents.boundary_predictors import HNet
from tokenv.agents.fixed import Random, RandomRate, Uniform
from tokenv.agents.heuristic import Entropy
from tokenv.agents.learned import Learned
from tokenv.agents.pretrained import PretrainedAgent
from tokenv.core import keys
from tokenv.env import generation
from tokenv.env.generation import generate
from tokenv.lm.codecs.base import ByteCodec
from tokenv.lm.config import UNetConfig
from tokenv.lm.incremental import EncoderStepper
from tokenv.lm.unet import UNet
from tokenv.series.codec import SeriesCodec


@pytest.fixture
def agent():
    agent = Learned(16, rate=0.4, window=3, scale=1.0).double().eval()
    with torch.no_grad():
        agent.projection.weight.normal_()
    return agent


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def observation(lm, symbol_BN):
    position_N = torch.arange(symbol_BN.shape[1])
    return TensorDict(
        {
            keys.ENCODING: lm.encode(symbol_BN),
            keys.POSITION: position_N.expand(symbol_BN.shape),
            keys.DECISION_MASK: (position_N > 0).expand(symbol_BN.shape),
        },
        batch_size=symbol_BN.shape,
    )


@pytest.mark.parametrize("kind", ["learned", "uniform", "random"])
def test_generation_equals_one_pass_over_the_result(tiny_lm, agent, kind):
    agent = {"learned": agent, "uniform": Uniform(0.3, 26), "random": Random(0.3, 26)}[kind]
    prompt = torch.randint(256, (3, 6))
    done = generate(tiny_lm, agent, prompt, 20, temperature=0, generator=seeded())
    assert done.symbol_BN.shape == (3, 26)
    assert torch.equal(done.symbol_BN[:, :6], prompt)
    assert done.length_B.tolist() == [26] * 3
    noise_BN = torch.rand(3, 26, generator=seeded())
    drawn = agent.draw(observation(tiny_lm, done.symbol_BN), noise_BN)
    assert torch.equal(done.action_BN, drawn[keys.ACTION])
    torch.testing.assert_close(done.boundary_prob_BN, drawn[keys.BOUNDARY_PROB])
    assert 1 < done.action_BN.float().mean(1).min() * 26 < 26
    parameters_BNP = tiny_lm(done.symbol_BN, done.action_BN)
    assert torch.equal(parameters_BNP[:, 5:-1].argmax(-1), done.symbol_BN[:, 6:])


def test_draws_follow_the_generator(tiny_lm, agent):
    prompt = torch.randint(256, (2, 1))
    first, again, other = (
        generate(tiny_lm, agent, prompt, 12, generator=seeded(s)) for s in (1, 1, 2)
    )
    assert torch.equal(first.symbol_BN, again.symbol_BN)
    assert torch.equal(first.action_BN, again.action_BN)
    assert not torch.equal(first.symbol_BN, other.symbol_BN)
    assert len(first.symbol_BN.unique()) > 5


class Script(ByteCodec):
    """A codec which returns symbols given by the test as samples."""

    def __init__(self, width, lines):
        super().__init__(width)
        self.lines = iter(zip(*lines, strict=True))

    def sample(self, parameters, **options):
        return torch.tensor(next(self.lines))


def test_rows_stop_where_their_continuation_does(tiny_lm, agent):
    """Stop sequences in the prompt, or which begin in it, are ignored."""
    tiny_lm.codec = Script(16, [b"\nabc\n\nxyz", b"hello\nab\n", b"one \n\ntwo"]).double()
    prompt = torch.tensor([list(b"a\n\nb\n"), list(b"first"), list(b"thing")])
    done = generate(tiny_lm, agent, prompt, 9, stop=b"\n\n")
    assert bytes(done.symbol_BN[0].tolist()) == b"a\n\nb\n\nabc\n\nxyz"
    assert done.length_B.tolist() == [11, 14, 11]


def test_generation_ends_when_every_row_has_stopped(tiny_lm, agent):
    tiny_lm.codec = Script(16, [b"ab.......", b"abcd.....", b".x......."]).double()
    done = generate(tiny_lm, agent, torch.full((3, 2), 65), 9, stop=[46])
    assert done.length_B.tolist() == [5, 7, 3]
    assert done.symbol_BN.shape == done.action_BN.shape == done.boundary_prob_BN.shape == (3, 7)


def test_prompts_of_small_integers_are_taken(tiny_lm, agent):
    prompt = torch.tensor([list(b"abc")], dtype=torch.uint8)
    assert generate(tiny_lm, agent, prompt, 1).symbol_BN.dtype == torch.int64


class Given(Learned):
    """Draws the boundaries of the prompt at 1/2, whatever the noise."""

    def forward(self, tensordict):
        late = tensordict[keys.POSITION] >= 6
        tensordict.set(keys.NOISE, torch.where(late, tensordict[keys.NOISE], 0.5))
        return super().forward(tensordict)


def given(width=16):
    agent = Given(width, rate=0.4, window=3, scale=1.0).double().eval()
    with torch.no_grad():
        agent.projection.weight.normal_()
    return agent


def loaded(lm):
    return PretrainedAgent(given(), copy.deepcopy(lm), lambda rows: EncoderStepper(lm, rows))


@pytest.mark.parametrize("pooling", ["select", "mean", "smooth"])
@pytest.mark.parametrize("kind", ["given", "uniform", "entropy", "loaded", "hnet"])
def test_a_prompt_that_is_read_once_continues_as_one_read_for_every_sample(kind, pooling):
    torch.manual_seed(1)
    size = UNetConfig(
        width=16, heads=2, down_layers=1, mid_layers=2, up_layers=1, window=4, pooling=pooling
    )
    lm = UNet(size).double().eval()
    agents = {
        "given": given,
        "uniform": lambda: Uniform(0.3, 20),
        "entropy": lambda: Entropy(0.3, mode="monotonic"),
        "loaded": lambda: loaded(lm),
        "hnet": lambda: HNet(16).double(),
    }
    agent = agents[kind]()
    if kind == "entropy":
        agent.theta.fill_(0.0)
    prompt = torch.randint(256, (3, 6))
    once = generate(lm, agent, prompt, 14, samples=4, generator=seeded())
    each = generate(lm, agent, prompt.repeat_interleave(4, 0), 14, generator=seeded())
    assert torch.equal(once.symbol_BN, each.symbol_BN)
    assert torch.equal(once.action_BN, each.action_BN)
    torch.testing.assert_close(once.boundary_prob_BN, each.boundary_prob_BN)
    assert len(once.symbol_BN[:4, 6:].unique(dim=0)) == 4
    assert once.action_BN.sum(1).min() > 1


@settings(max_examples=15)
@hypothesis_given(
    kind=st.sampled_from(
        [
            "learned",
            "given",
            "uniform",
            "random",
            "random rate",
            "entropy",
            "loaded",
            "hnet",
            "series",
        ]
    ),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    samples=st.integers(1, 2),
    max_new_tokens=st.integers(1, 12),
    steps=st.sampled_from([1, 4, 32]),
    stopped=st.booleans(),
)
def test_prompts_of_any_lengths_continue_as_each_alone(
    kind, lengths, samples, max_new_tokens, steps, stopped
):
    torch.manual_seed(1)
    size = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=2, up_layers=1, window=4)
    lm = UNet(size, SeriesCodec(16, 1) if kind == "series" else None).double().eval()
    agents = {
        "given": given,
        "uniform": lambda: Uniform(0.3, 20),
        "random": lambda: Random(0.3, 20, rounding="random"),
        "random rate": lambda: RandomRate(0.2, 0.8),
        "entropy": lambda: Entropy(0.3, mode="monotonic"),
        "loaded": lambda: loaded(lm),
        "hnet": lambda: HNet(16).double(),
    }
    agent = agents.get(kind, lambda: Learned(16, rate=0.4, window=3).double().eval())()
    if kind == "entropy":
        agent.theta.fill_(0.0)
    if lengths != [lengths[0]] * len(lengths):
        samples = 1
    whole = torch.randint(256, (len(lengths), 9))
    if kind == "series":
        frame = torch.tensor([0.0, 1.0, 1.0, 0.0])
        whole = torch.cat(
            [torch.randn(len(lengths), 9, 1, 1), frame.expand(len(lengths), 9, 1, 4)], -1
        )
    prompts = [row[:length] for row, length in zip(whole, lengths, strict=True)]
    options = {"samples": samples, "temperature": 0.9, "top_p": 0.9}
    if stopped and kind != "series":
        first = generate(lm, agent, prompts[0][None], max_new_tokens, generator=seeded(), **options)
        options["stop"] = first.symbol_BN[0, -1:].tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "NOISE_STEPS", steps)
        together = generate(
            lm,
            agent,
            prompts,
            max_new_tokens,
            generator=list(map(seeded, range(len(prompts)))),
            **options,
        )
    for b, prompt in enumerate(prompts):
        alone = generate(lm, agent, prompt[None], max_new_tokens, generator=seeded(b), **options)
        for row, expected in enumerate(alone.length_B.tolist(), b * samples):
            assert together.length_B[row] == expected
            for actual, one in zip(together[:3], alone[:3], strict=True):
                torch.testing.assert_close(
                    actual[row, :expected], one[row - b * samples, :expected]
                )


def test_random_numbers_of_several_steps_are_those_of_multinomial():
    codec = ByteCodec(4, vocabulary=50)
    prob = torch.randn(5, 3, 50).softmax(-1)
    noise = -torch.log1p(-codec.sample_noise(15, seeded()).view(5, 3, 50)).float()
    each = seeded()
    expected = torch.stack([torch.empty(3, 50).exponential_(generator=each) for _ in range(5)])
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=0)
    each = seeded()
    chosen = (prob / noise).argmax(-1)
    assert torch.equal(
        chosen, torch.stack([torch.multinomial(p, 1, generator=each)[:, 0] for p in prob])
    )


@pytest.mark.parametrize("top_p", [0.3, 0.95, 1.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_compiled_draws_are_those_of_torch_in_float64(top_p, scale):
    """Whether all probabilities are alike, or some are equal, or one symbol has all."""
    codec = ByteCodec(4)
    parameters = scale * torch.randn(300, 256).round(decimals=1)
    noise = codec.sample_noise(300, seeded())
    options = {"temperature": 0.9, "top_p": top_p, "noise": noise}
    assert torch.equal(
        codec.sample(parameters, **options), codec.sample(parameters.double(), **options)
    )


def test_a_subclass_with_a_distribution_of_its_own_is_asked_for_it(tiny_lm):
    class Never(Learned):
        def get_dist(self, tensordict):
            dist = super().get_dist(tensordict)
            return BoundaryDistribution(dist.logits - 100.0, dist.decision_mask, dist.forced)

    agent = Never(tiny_lm.config.width, rate=0.9).to(tiny_lm.head.weight.dtype).eval()
    assert (
        generate(
            tiny_lm, agent, torch.ones(2, 3, dtype=torch.long), 9, generator=seeded()
        ).action_BN.sum()
        == 2
    )


def test_generators_must_fit_the_prompts(tiny_lm, agent):
    prompts = [torch.tensor([1, 2]), torch.tensor([3])]
    for generator in (seeded(), [seeded()] * 3):
        with pytest.raises(ValueError, match="expected one for each"):
            generate(tiny_lm, agent, prompts, 2, generator=generator)
    with pytest.raises(ValueError, match="prompts of one length"):
        generate(tiny_lm, agent, prompts, 2, generator=[seeded()] * 2, samples=2)


@pytest.mark.parametrize(
    ("shape", "max_new_tokens", "options", "message"),
    [
        ((2, 0), 3, {}, "at least one row and one symbol"),
        ((0, 2), 3, {}, "at least one row and one symbol"),
        ((2,), 3, {}, "prompt of shape"),
        ((2, 3, 1), 3, {}, "prompt of shape"),
        ((2, 3), 0, {}, "max_new_tokens"),
        ((2, 3), 1, {"samples": 0}, "samples"),
        ((2, 3), 1, {"temperature": -0.5}, "temperature"),
        ((2, 3), 1, {"top_p": 0.0}, "top_p"),
        ((2, 3), 1, {"stop": b""}, "stop is empty"),
    ],
)
def test_impossible_requests_are_refused(tiny_lm, agent, shape, max_new_tokens, options, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_lm, agent, torch.zeros(shape, dtype=torch.long), max_new_tokens, **options)
