"""A new observation key touches two places: its name in ``core/keys.py``, and its entry in ``env/observation.py``."""

import pytest
import torch
from episodes import Noise, random_noise
from tensordict.nn import TensorDictSequential
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from tokenv.agents.base import BoundaryDistribution, Policy, forced_action
from tokenv.core import keys
from tokenv.data.corpus import TensorSource
from tokenv.env import observation
from tokenv.env.generation import generate
from tokenv.env.observation import HISTORY_KEYS, STATIC_KEYS, HistoryKey, Observer, StaticKey
from tokenv.env.rescoring import rescore, rescore_head
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv

IS_DIGIT = "is_digit"  # whether x_i is one of 0 to 9: float [.., T]
TOKEN_LENGTH = "token_length"  # symbols since the last boundary before i: int64 [.., T]
EXACT = {"rtol": 0, "atol": 0}


def is_digit(at):
    return ((at.symbol >= ord("0")) & (at.symbol <= ord("9"))).float()


def token_lengths(action, window):
    index = torch.arange(action.shape[-1], device=action.device)
    boundary = torch.where(action.bool(), index, 0).cummax(-1).values
    return index - torch.nn.functional.pad(boundary, (1, 0))[..., :-1]


@pytest.fixture(autouse=True)
def added_keys(monkeypatch):
    """Add both keys as a change of the two files would."""
    monkeypatch.setattr(keys, "IS_DIGIT", IS_DIGIT, raising=False)
    monkeypatch.setattr(keys, "TOKEN_LENGTH", TOKEN_LENGTH, raising=False)
    digit = StaticKey(is_digit, lambda of: of.bounded(1, torch.float32), optional=True)
    length = HistoryKey(
        initial=lambda batch, window, device: torch.zeros(batch, dtype=torch.long, device=device),
        append=lambda length_B, action_B: torch.where(action_B.bool(), 0, length_B) + 1,
        parallel=token_lengths,
        spec=lambda of: of.bounded(of.length, torch.int64),
        optional=True,
    )
    monkeypatch.setitem(observation.STATIC_KEYS, IS_DIGIT, digit)
    monkeypatch.setitem(observation.HISTORY_KEYS, TOKEN_LENGTH, length)


class DigitPolicy(Policy):
    """Boundaries are more probable at digits, and the longer the token is."""

    in_keys = [keys.SYMBOL, keys.POSITION, keys.DECISION_MASK, IS_DIGIT, TOKEN_LENGTH]

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([3.0, 0.5], dtype=torch.float64))

    def get_dist(self, tensordict):
        logits = self.weight[0] * tensordict[IS_DIGIT] + self.weight[1] * (
            tensordict[TOKEN_LENGTH] - 4
        )
        return BoundaryDistribution(
            logits, tensordict[keys.DECISION_MASK], forced_action(tensordict)
        )

    def draw(self, observation, noise):
        length = HISTORY_KEYS[TOKEN_LENGTH].initial(noise.shape[0], 0, noise.device)
        actions = []
        for i in range(noise.shape[-1]):
            dist = self.get_dist(observation[..., i].copy().set(TOKEN_LENGTH, length))
            actions.append(dist.from_noise(noise[..., i]))
            length = HISTORY_KEYS[TOKEN_LENGTH].append(length, actions[-1])
        return self.score(observation, torch.stack(actions, -1))

    def score(self, observation, action):
        dist = self.get_dist(observation.copy().set(TOKEN_LENGTH, token_lengths(action, 0)))
        return dist.to_tensordict(action)


def digits_and_letters(batch=3, length=24):
    return torch.randint(ord("0"), ord("a"), (batch, length))


def make_env(lm, symbol_BN):
    source = TensorSource(symbol_BN)
    return TokenizationEnv(lm, source, len(symbol_BN), optional_keys=[IS_DIGIT, TOKEN_LENGTH])


def test_stepping_equals_one_pass(tiny_lm):
    lm = tiny_lm.double()
    agent = DigitPolicy()
    noise_BT = random_noise(3, 23)
    env = make_env(lm, digits_and_letters())
    stepped = env.rollout(23, TensorDictSequential(Noise(noise_BT), agent)).detach()
    one_pass = env.one_pass(agent, noise=noise_BT).detach()
    assert set(stepped.keys(True, True)) == set(one_pass.keys(True, True))
    assert {IS_DIGIT, TOKEN_LENGTH} <= set(stepped.keys()) & set(stepped["next"].keys())
    for name in (IS_DIGIT, TOKEN_LENGTH, keys.ACTION, ("next", IS_DIGIT), ("next", TOKEN_LENGTH)):
        assert_close(stepped[name], one_pass[name], **EXACT)
    for name in (keys.ACTION_LOG_PROB, keys.REWARD):
        assert_close(stepped[name], one_pass[name], rtol=1e-9, atol=1e-9)
    assert stepped[IS_DIGIT].any()
    assert stepped[TOKEN_LENGTH].max() > 1


def test_the_specs_hold_it_and_rows_start_anew_alone(tiny_lm):
    env = make_env(tiny_lm, digits_and_letters())
    check_env_specs(env)
    td = env.step(env.reset().set(keys.ACTION, torch.ones(3, dtype=torch.long)))["next"]
    rows_B1 = torch.tensor([[True], [False], [False]])
    assert env.reset(td.clone().set("_reset", rows_B1))[TOKEN_LENGTH].tolist() == [0, 1, 1]


def test_it_is_absent_unless_an_agent_or_an_environment_asks_for_it(tiny_lm):
    symbol_BN = digits_and_letters()
    assert IS_DIGIT in rollout(tiny_lm, DigitPolicy(), symbol_BN)
    env = TokenizationEnv(tiny_lm, TensorSource(symbol_BN), 3)
    assert IS_DIGIT not in env.reset()
    assert IS_DIGIT in env.one_pass(DigitPolicy())
    with pytest.raises(
        ValueError, match=r"optional_keys = \['colour'\]: expected some of early_entropy, is_digit"
    ):
        Observer(8, frozenset({"colour"}))


def test_generation_and_rescoring_read_it(tiny_lm):
    lm = tiny_lm.double()
    agent = DigitPolicy()
    prompt = digits_and_letters(2, 6)
    generated = generate(
        lm, agent, prompt, 10, samples=2, generator=torch.Generator().manual_seed(0)
    )
    noise_BN = torch.rand(4, 16, generator=torch.Generator().manual_seed(0))
    noise_BN[:, :6] = noise_BN[::2, :6].repeat_interleave(2, 0)
    drawn = rollout(lm, agent, generated.symbol_BN, noise=noise_BN[:, :-1])
    assert_close(drawn[keys.ACTION], generated.action_BN[:, :-1], **EXACT)
    for again in (rescore(lm, agent, drawn.detach()), rescore_head(agent, drawn.detach())):
        assert_close(again[keys.ACTION_LOG_PROB], drawn[keys.ACTION_LOG_PROB])
        assert_close(again[TOKEN_LENGTH], drawn[TOKEN_LENGTH], **EXACT)
    assert IS_DIGIT in STATIC_KEYS
