"""Agents that follow rules: SpaceByte's byte classes and BLT's entropy, whole sequences and step by step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tokenv.agents.heuristic import Entropy, Events, Whitespace
from tokenv.core import keys
from tokenv.data.corpus import TensorSource
from tokenv.env.generation import generate
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.codecs.base import Codec

seeds = st.integers(0, 1000)


def observe(**values):
    """Sequences of which the last is shorter than the others."""
    shape = next(iter(values.values())).shape
    position_BT = torch.arange(shape[1]).expand(shape)
    valid_BT = (
        position_BT < torch.tensor([shape[1]] * (shape[0] - 1) + [max(shape[1] - 2, 1)])[:, None]
    )
    masks = {keys.POSITION: position_BT, keys.DECISION_MASK: valid_BT & (position_BT > 0)}
    return TensorDict(values | masks, batch_size=shape)


def marked(text, agent):
    """Return the text with a bar before every boundary's byte."""
    data = text.encode() if isinstance(text, str) else text
    symbol_BT = torch.tensor([list(data), list(data)])
    action_T = agent.draw(observe(symbol=symbol_BT), torch.rand(symbol_BT.shape))[keys.ACTION][
        0
    ].tolist()
    return b"".join(b"|" * a + bytes([x]) for a, x in zip(action_T, data, strict=True))


def test_whitespace_draws_at_the_first_byte_after_a_word():
    expected = "|the| quick-2nd| (fox)| \n  über".encode().replace(b" \xc3", b" |\xc3")
    assert marked("the quick (fox)", Whitespace()) == b"|the| quick| (fox|)"
    assert marked("a_b2 = [c]\n\n  d", Whitespace()) == b"|a|_b2| = [c|]\n\n  d"
    # after a blank the first byte is no change
    assert marked("x über é", Whitespace()) == "|x| über| é".encode()
    assert marked("aé", Whitespace()) == b"|a|\xc3\xa9"
    assert expected.count(b"|") == 5


def test_whitespace_cuts_tokens_which_are_too_long():
    assert marked("the quickest (fox)", Whitespace(longest=4)) == b"|the| qui|ckes|t| (fo|x|)"
    assert marked("the quickest (fox)", Whitespace(longest=1)).count(b"|") == 18
    assert marked("the quickest", Whitespace(longest=99)) == b"|the| quickest"
    with pytest.raises(ValueError, match=r"agent.longest = -1: expected a token's most symbols"):
        Whitespace(longest=-1)


@settings(max_examples=30)
@given(st.integers(1, 9), seeds)
def test_tokens_are_at_most_as_long_as_asked_and_keep_the_rules_boundaries(longest, seed):
    generator = torch.Generator().manual_seed(seed)
    symbol_BT = torch.randint(97, 123, (2, 60), generator=generator)
    symbol_BT[torch.rand(2, 60, generator=generator) < 0.15] = ord(" ")
    noise_BT = torch.rand(2, 60)
    rule_T = Whitespace().draw(observe(symbol=symbol_BT), noise_BT)[keys.ACTION][0]
    cut_T = Whitespace(longest=longest).draw(observe(symbol=symbol_BT), noise_BT)[keys.ACTION][0]
    since = longest
    for i in range(60):
        since += 1
        if rule_T[i] or since == longest:
            since = 0
        assert cut_T[i] == (since == 0), i


def test_spacelike_bytes_are_spacebytes():
    spacelike = [
        *range(0x30),
        *range(0x3A, 0x41),
        *range(0x5B, 0x61),
        *range(0x7B, 0x80),
        *range(0xC0, 0x100),
    ]
    symbol_BT = torch.tensor([[ord("a"), byte] for byte in range(256)] + [[0, 0]])
    drawn = Whitespace().draw(observe(symbol=symbol_BT), torch.rand(symbol_BT.shape))
    assert drawn[keys.ACTION][:-1, 1].nonzero().flatten().tolist() == spacelike
    after_blank = torch.tensor([[ord(" "), byte] for byte in range(256)] + [[0, 0]])
    assert (
        not Whitespace()
        .draw(observe(symbol=after_blank), torch.rand(257, 2))[keys.ACTION][:, 1]
        .any()
    )


def fitted(mode, theta=0.5):
    agent = Entropy(0.3, mode).eval()
    agent.theta.fill_(theta)
    return agent


def test_entropys_rules_are_blts():
    entropy_BT = torch.tensor([[3.0, 1.0, 2.0, 4.0, 4.1, 0.1], [0.0] * 6])
    for mode, theta, expected in (
        ("global", 1.5, [1, 0, 1, 1, 1, 0]),
        ("global", 4.0, [1, 0, 0, 0, 1, 0]),
        ("monotonic", 0.5, [1, 0, 1, 1, 0, 0]),
        ("monotonic", -2.0, [1, 0, 1, 1, 1, 0]),
    ):
        drawn = fitted(mode, theta).draw(observe(early_entropy=entropy_BT), torch.rand(2, 6))
        assert drawn[keys.ACTION][0].tolist() == expected, (mode, theta)


@pytest.mark.parametrize("mode", ["global", "monotonic"])
@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_theta_comes_to_the_rate_and_is_used_before_it_is_moved(mode, rate):
    agent = Entropy(rate, mode)
    batches = [torch.rand(20, 100) * 3 + 1 for _ in range(30)]
    actions = []
    for batch in batches:
        before = agent.theta.clone()
        actions.append(agent.draw(observe(early_entropy=batch), torch.rand(20, 100))[keys.ACTION])
        agent.theta.copy_(before)
        again = agent.eval().draw(observe(early_entropy=batch), torch.rand(20, 100))[keys.ACTION]
        assert torch.equal(actions[-1], again)
        assert torch.equal(agent.theta, before)
        agent.train().draw(observe(early_entropy=batch), torch.rand(20, 100))
    assert actions[0].sum() == 20  # the first symbols alone
    late = torch.stack(actions[1:])[..., 1:].double().mean().item()
    assert late == pytest.approx(rate, abs=0.02)


def test_theta_is_arunning_mean_of_quantiles_over_what_is_decided():
    agent = Entropy(0.25, momentum=0.75)
    first = torch.tensor([[9.0, 1, 2, 3, 4, 5]])
    second = torch.tensor([[0.0, 6, 7, 8, 9, 10]])
    for entropy_BT in (first, second):
        decided = torch.arange(6) > 0
        td = TensorDict({keys.EARLY_ENTROPY: entropy_BT}, batch_size=(1, 6))
        td.update({keys.POSITION: torch.arange(6)[None], keys.DECISION_MASK: decided[None]})
        agent.draw(td, torch.rand(1, 6))
    assert agent.theta.item() == pytest.approx(0.75 * 4 + 0.25 * 9)
    other = Entropy(0.25)
    other.load_state_dict(agent.state_dict())
    assert other.theta == agent.theta
    nothing = td.set(keys.DECISION_MASK, torch.zeros(1, 6, dtype=torch.bool))
    agent.draw(nothing, torch.rand(1, 6))
    assert other.theta == agent.theta


@settings(max_examples=30)
@given(
    st.sampled_from(["whitespace", "whitespace, longest 3", "global", "monotonic"]),
    st.integers(1, 15),
    st.none() | st.just(2),
    seeds,
)
def test_one_position_at_a_time_equals_one_pass(kind, length, samples, seed):
    torch.manual_seed(seed)
    if kind == "whitespace":
        agent = Whitespace()
    elif kind == "whitespace, longest 3":
        agent = Whitespace(longest=3)
    else:
        agent = fitted(kind)
    td = observe(symbol=torch.randint(256, (3, length)), early_entropy=torch.rand(3, length))
    noise = torch.rand(*(() if samples is None else (samples,)), 3, length, dtype=torch.float64)
    drawn = agent.draw(td, noise)
    assert drawn.batch_size == noise.shape
    assert set(drawn.keys()) == set(agent.out_keys)
    assert not drawn[keys.ACTION_LOG_PROB].any()
    assert not drawn[keys.ENTROPY].any()
    assert torch.equal(drawn[keys.BOUNDARY_PROB], drawn[keys.ACTION].double())
    undecided = ~td[keys.DECISION_MASK][:, 1:]
    assert (drawn[keys.ACTION][..., 0] == 1).all()
    assert not (drawn[keys.ACTION][..., 1:] * undecided).any()
    for _ in range(2):  # and once more from the start
        for i in range(length):
            acted = agent(td[:, i].clone())
            assert torch.equal(
                acted[keys.ACTION].expand(drawn.shape[:-1]), drawn[keys.ACTION][..., i]
            )
            assert acted[keys.BOUNDARY_PROB].dtype == torch.float32


def test_neighbours_are_compared_in_order_only():
    td = observe(symbol=torch.randint(256, (2, 6)))
    with pytest.raises(ValueError, match="expected the next position or 0"):
        Whitespace()(td[:, 3].clone())


def test_generation_equals_one_pass_over_the_result(tiny_lm):
    prompt = torch.randint(256, (2, 5))
    with torch.no_grad():
        tiny_lm.early_head.weight.normal_()
    agent = fitted("global", tiny_lm.early_entropy(tiny_lm.encode(prompt)).median())
    written = generate(tiny_lm, agent, prompt, 12, generator=torch.Generator().manual_seed(0))
    action_BT = rollout(tiny_lm, agent, written.symbol_BN)[keys.ACTION]
    assert torch.equal(written.action_BN[:, :-1], action_BT)
    assert 2 < action_BT.sum() < action_BT.numel()


def series(value_BT):
    """Symbols of one channel with location 0 and scale 1, as ``normalise_window`` writes them."""
    last_BT = torch.cat([torch.zeros_like(value_BT[:, :1]), value_BT[:, :-1]], 1)
    one = torch.ones_like(value_BT)
    return torch.stack([value_BT, 0 * one, one, one, last_BT], -1).unsqueeze(2)


def events_of(values, refractory):
    events = [0]
    for i in range(1, len(values)):
        if abs(values[i] - values[i - 1]) > 1 and i - events[-1] >= refractory:
            events.append(i)
    return events


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
    st.integers(1, 6),
    st.integers(0, 5),
    st.integers(0, 4),
    seeds,
)
def test_events_are_answered_after_their_delay(values, refractory, delay, period, seed):
    """Compared with the definition; one position at a time gives the same."""
    expected = {0}
    begins = events_of(values, refractory)
    for begin, end in zip(begins, [*begins[1:], len(values)], strict=True):
        after = range(begin + delay, end, period) if period else (begin + delay,)
        expected |= {i for i in after if i < end}
    agent = Events(threshold=1.0, refractory=refractory, delay=delay, period=period)
    value_BT = torch.tensor([values, values], dtype=torch.float64)
    td = observe(value=value_BT).set(keys.SYMBOL, series(value_BT))
    noise = torch.rand(3, *td.batch_size, generator=torch.Generator().manual_seed(seed))
    drawn = agent.draw(td, noise)
    assert drawn.batch_size == noise.shape
    assert set(drawn[keys.ACTION][2, 0].nonzero().flatten().tolist()) == expected
    for _ in range(2):  # and once more from the start
        for i in range(len(values)):
            assert torch.equal(agent(td[:, i].clone())[keys.ACTION], drawn[keys.ACTION][0, :, i])


def test_a_missing_value_is_no_event():
    value_BT = torch.tensor([[0.0, torch.nan, 5.0, 0.0]] * 2)
    symbol = series(value_BT)
    symbol[:, 2, 0, 4] = 5.0  # the last value that is known
    drawn = Events(refractory=1).draw(
        observe(value=value_BT).set(keys.SYMBOL, symbol), torch.rand(2, 4)
    )
    assert drawn[keys.ACTION][0].tolist() == [1, 0, 0, 1]


class Mute(Codec):
    """Has no entropy."""

    embed = log_prob = sample = None


def test_mistakes_are_reported(tiny_lm):
    for options, message in (
        ({"rate": 0.0}, r"agent\.rate = 0\.0"),
        ({"rate": 1.0}, r"agent\.rate = 1\.0"),
        ({"mode": "local"}, r"agent\.mode = 'local': expected global or monotonic"),
        ({"momentum": 1.0}, r"agent\.momentum = 1\.0"),
    ):
        with pytest.raises(ValueError, match=message):
            Entropy(**options)
    for name, wrong in (("threshold", 0.0), ("refractory", 0), ("delay", -1), ("period", -1)):
        with pytest.raises(ValueError, match=rf"agent\.{name} = {wrong}"):
            Events(**{name: wrong})
    with pytest.raises(
        ValueError, match=r"reads the values of a series, not bytes: set data\.kind=series"
    ):
        Events().draw(observe(symbol=torch.zeros(2, 3, dtype=torch.long)), torch.rand(2, 3))
    env = TokenizationEnv(tiny_lm, TensorSource(torch.zeros(1, 4, dtype=torch.long)), 1)
    with pytest.raises(
        ValueError, match=r'make the environment with optional_keys=\["early_entropy"\]'
    ):
        env.rollout(3, Entropy())
    with pytest.raises(
        ValueError, match=r"Mute has no entropy: write its method entropy\(parameters\)"
    ):
        Mute().entropy(torch.zeros(1))


def test_an_unfitted_threshold_is_infinite():
    assert Entropy().theta.item() == math.inf
