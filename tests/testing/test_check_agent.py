"""Every built-in agent keeps to what ``check_agent`` asks, and those that do not are caught."""

import pytest
import torch
from torch import nn

from tokenv.agents.base import Agent, BoundaryDistribution, deterministic_output, forced_action
from tokenv.agents.exact_count import ConditionalBernoulli
from tokenv.agents.fixed import Random
from tokenv.agents.learned import Learned
from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.errors import UserError
from tokenv.core.rates import RateRange
from tokenv.data.config import DataConfig
from tokenv.data.corpus import load_corpus
from tokenv.data.tokenizer import train_bpe
from tokenv.testing import check_agent


@pytest.mark.parametrize("name", sorted(set(registry.AGENTS) - {"bpe", "conditional", "events"}))
def test_every_agent_passes(name):
    check_agent(name)


@pytest.mark.parametrize("name", ["learned", "exact_count", "uniform", "random"])
def test_every_rate_conditioned_agent_passes(name):
    check_agent(name, rates=RateRange(0.3, 0.6))


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"window": 3, "zero_init": True}, {"scale": 0.5}]
)
def test_options_reach_the_agent(options):
    assert check_agent("learned", **options) == []


def conditional(width: int, rate: float, seq_len: int) -> ConditionalBernoulli:
    """One that has learned something: at its start it draws as if it read nothing."""
    agent = ConditionalBernoulli(width, seq_len, rate)
    nn.init.normal_(agent.out.weight)
    return agent


def test_the_conditional_law_passes_as_what_reads_ahead():
    assert check_agent("conditional", reads_ahead=True) == [
        "causality, and acting position by position: it reads ahead"
    ]
    check_agent(conditional, reads_ahead=True)
    with pytest.raises(AssertionError, match="boundaries depend on later symbols"):
        check_agent(conditional)


def test_an_agent_that_reads_ahead_passes_if_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    corpus = load_corpus(
        DataConfig(source="words", seq_len=64, words_documents=40, lexicon_size=10, validation=0.1)
    )
    tokenizer = str(train_bpe(corpus, 300))
    check_agent("bpe", tokenizer=tokenizer)
    with pytest.raises(
        AssertionError, match=r"agent bpe: (forward|boundaries depend on later symbols)"
    ):
        check_agent("bpe", reads_ahead=False, tokenizer=tokenizer)


class Own(Learned):
    """Learned, with something wrong in each of those below."""

    def __init__(self, width: int):
        super().__init__(width, rate=0.4, window=2, scale=1.0)


def draw_changed(change):
    """Return an agent whose ``draw`` is changed."""

    class Changed(Own):
        def draw(self, observation, noise):
            return change(self, observation, noise, super().draw(observation, noise))

    return Changed


def without(key):
    return lambda agent, seen, noise, td: td.exclude(key)


def changed(key, change):
    return lambda agent, seen, noise, td: td.set(key, change(td[key]))


class Ahead(Own):
    """Looks at the symbol that is to be predicted."""

    def draw(self, observation, noise):
        shifted = observation.copy()
        inside = observation[keys.DECISION_MASK].roll(-1, -1).unsqueeze(-1)
        shifted[keys.ENCODING] = observation[keys.ENCODING].roll(-1, -2) * inside
        return super().draw(shifted, noise)


class Batchwise(Own):
    """Centres encodings over the batch."""

    def _project(self, encoding):
        return super()._project(
            encoding - encoding.mean(0, keepdim=True) if encoding.ndim == 3 else encoding
        )


class Padded(Own):
    """Looks at the mean over the sequence, padding included."""

    def _project(self, encoding):
        return super()._project(
            encoding - encoding.mean(-2, keepdim=True) if encoding.ndim == 3 else encoding
        )


class Drunk(Own):
    def _solve_actions(self, projected, noise, observation):
        return super()._solve_actions(projected, torch.rand_like(noise), observation)


class OwnWay(Own):
    """Steps otherwise than it draws."""

    def forward(self, tensordict):
        return super().forward(tensordict.set(keys.NOISE, 1 - tensordict[keys.NOISE]))


class Nearsighted(Own):
    """Says that it reads fewer earlier actions than it does."""

    def __init__(self, width):
        super().__init__(width)
        self.window = 1

    def _earlier(self, action_T):
        self.window = 2
        earlier = super()._earlier(action_T)
        self.window = 1
        return earlier


class Forgetful(Own):
    """Keeps a parameter where no state_dict finds it."""

    def __init__(self, width):
        super().__init__(width)
        self.shift = [torch.zeros(()).double()]

    def _project(self, encoding):
        self.shift[0] = self.shift[0] + (0.5 if self.training else 0.0)
        return super()._project(encoding) + self.projection.weight.sum().sign() * self.shift[0]


class Hidden(Own):
    def _project(self, encoding):
        return super()._project(encoding) + next(iter(self.secret)).abs()

    def __init__(self, width):
        super().__init__(width)
        self.secret = [torch.rand(())]

    def load_state_dict(self, *args, **options):
        self.secret = [torch.tensor(9.0)]
        return super().load_state_dict(*args, **options)


class Improbable(Own):
    """Says that its boundaries are less probable than they are."""

    def _distribution_given(self, projected, action, observation):
        dist = super()._distribution_given(projected, action, observation)
        log_prob = dist.log_prob
        outputs = dist.to_tensordict
        dist.to_tensordict = lambda action: outputs(action).set(
            keys.ACTION_LOG_PROB, log_prob(action) - 0.1 * dist.decision_mask
        )
        return dist


class Unlearned(Own):
    def _project(self, encoding):
        return super()._project(encoding).detach()


class Scores(Own):
    def score(self, observation, action):
        return super().score(observation, 1 - action)


class Stored(Own):
    def get_dist(self, tensordict):
        dist = super().get_dist(tensordict)
        sign = -1 if tensordict.ndim == 2 else 1
        return BoundaryDistribution(sign * dist.logits, dist.decision_mask, dist.forced)


class Broken(Own):
    def draw(self, observation, noise):
        return super().draw(observation, noise[9])


class Breaks(Own):
    def forward(self, tensordict):
        return super().forward(tensordict[["encoding"]])


class Unforced(Agent):
    in_keys = [keys.POSITION, keys.DECISION_MASK]

    def draw(self, observation, noise):
        return deterministic_output(observation, noise > 2, noise.dtype).set(
            keys.ACTION, torch.zeros(noise.shape, dtype=torch.int64)
        )

    def forward(self, tensordict):
        return tensordict.update(self.draw(tensordict, tensordict[keys.NOISE]))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (draw_changed(without(keys.ENTROPY)), "answers without 'entropy', one of its out_keys"),
        (
            draw_changed(
                changed(keys.ENTROPY, lambda x: x.sum(-1, keepdim=True).expand(x.shape) * 1.0)
            ),
            "entropy is not 0",
        ),
        (
            draw_changed(changed(keys.ACTION, lambda x: x.double())),
            "action is of type torch.float64",
        ),
        (draw_changed(changed(keys.ACTION, lambda x: 2 * x)), "other numbers than 0 and 1"),
        (
            draw_changed(changed(keys.BOUNDARY_PROB, lambda x: 1.5 * x)),
            r"boundary_prob is outside \[0, 1\]",
        ),
        (
            draw_changed(changed(keys.BOUNDARY_PROB, lambda x: x / 2)),
            "boundary_prob is not 1 at the first symbol",
        ),
        (draw_changed(changed(keys.ACTION_LOG_PROB, lambda x: -x)), "action_log_prob is above 0"),
        (
            draw_changed(changed(keys.ACTION_LOG_PROB, lambda x: x - 1)),
            "action_log_prob is not 0 at the first symbol",
        ),
        (
            draw_changed(changed(keys.ACTION_LOG_PROB, lambda x: x / 0)),
            "action_log_prob is not finite",
        ),
        (
            draw_changed(changed(keys.ACTION, lambda x: x | 1)),
            "action is not 0 in the padding|position by position",
        ),
        (Unforced, "the first symbol does not end a token"),
        (Ahead, "boundaries depend on later symbols: another symbol"),
        (Batchwise, "depend on the other sequences of its batch"),
        (Drunk, "is not what its noise alone gives|the same noise gave two draws"),
        (OwnWay, "position by position it draws other boundaries than at once"),
        (Nearsighted, "fails with|other boundaries than at once|other than at once"),
        (Hidden, "a state_dict does not bring its state back"),
        (Improbable, "sum to 0"),
        (Unlearned, "no gradient of action_log_prob"),
        (Scores, r"score\(\) of drawn boundaries gives another action_log_prob"),
        (Stored, r"get_dist\(\) gives drawn boundaries another log-probability"),
        (
            Broken,
            r"draw\(\), of 3 sequences of 12 symbols, so batch size \[3, 11\], fails with IndexError",
        ),
        (Breaks, r"forward\(\), position by position, fails with"),
    ],
)
def test_broken_agents_are_caught(agent, message):
    with pytest.raises(AssertionError, match=message):
        check_agent(agent)


def test_the_message_names_the_agent():
    with pytest.raises(AssertionError, match=r"^agent Ahead: "):
        check_agent(Ahead)


def test_an_agent_that_reads_ahead_must_not_read_the_padding():
    with pytest.raises(AssertionError, match="symbols in the padding move the boundaries"):
        check_agent(Padded, reads_ahead=True)


def test_an_agent_that_reads_ahead_must_not_step():
    with pytest.raises(
        AssertionError, match="reads ahead, and acts position by position all the same"
    ):
        check_agent(Ahead, reads_ahead=True)


class Plain(Agent):
    """The least that passes: a boundary after every third symbol."""

    in_keys = [keys.POSITION, keys.DECISION_MASK]

    def draw(self, observation, noise):
        boundary = (observation[keys.POSITION] % 3 == 0).expand(noise.shape)
        return deterministic_output(observation, boundary, noise.dtype)

    def forward(self, tensordict):
        return tensordict.update(self.draw(tensordict, tensordict[keys.NOISE]))


class Forced(Plain):
    def draw(self, observation, noise):
        return (
            super()
            .draw(observation, noise)
            .set(keys.ACTION, forced_action(observation).expand(noise.shape))
        )


def test_a_new_agent_passes():
    check_agent(Plain)
    check_agent(lambda rate, seq_len: Random(rate, seq_len))
    check_agent(Forced)


@pytest.mark.parametrize(
    ("agent", "options", "message"),
    [
        ("lerned", {}, "agent.name = 'lerned' is unknown"),
        ("learned", {"windw": 1}, "agent.windw is no option"),
        ("learned", {"window": -1}, r"agent\.window = -1"),
        (nn.Identity, {}, "has built Identity"),
    ],
)
def test_what_cannot_be_built_is_the_users(agent, options, message):
    with pytest.raises(UserError, match=message):
        check_agent(agent, **options)
