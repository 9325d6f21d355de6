"""Generation equals one pass over the generated sequence."""

import copy

import pytest
import torch
from tensordict import TensorDict

from tokenv.agents.boundary_predictors import HNet
from tokenv.agents.fixed import Random, Uniform
from tokenv.agents.heuristic import Entropy
from tokenv.agents.learned import Learned
from tokenv.agents.pretrained import PretrainedAgent
from tokenv.core import keys
from tokenv.env.generation import generate
from tokenv.lm.codecs.base import ByteCodec
from tokenv.lm.config import UNetConfig
from tokenv.lm.incremental import EncoderStepper
from tokenv.lm.unet import UNet


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
    first, again, other = (generate(tiny_lm, agent, prompt, 12, generator=seeded(s)) for s in (1, 1, 2))
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
    size = UNetConfig(width=16, heads=2, down_layers=1, mid_layers=2, up_layers=1, window=4, pooling=pooling)
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


@pytest.mark.parametrize(
    ("shape", "max_new", "options", "message"),
    [
        ((2, 0), 3, {}, "at least one row and one symbol"),
        ((0, 2), 3, {}, "at least one row and one symbol"),
        ((2,), 3, {}, "prompt of shape"),
        ((2, 3, 1), 3, {}, "prompt of shape"),
        ((2, 3), 0, {}, "max_new"),
        ((2, 3), 1, {"samples": 0}, "samples"),
        ((2, 3), 1, {"temperature": -0.5}, "temperature"),
        ((2, 3), 1, {"top_p": 0.0}, "top_p"),
        ((2, 3), 1, {"stop": b""}, "stop is empty"),
    ],
)
def test_impossible_requests_are_refused(tiny_lm, agent, shape, max_new, options, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_lm, agent, torch.zeros(shape, dtype=torch.long), max_new, **options)
