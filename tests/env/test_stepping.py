"""Stepping through the environment and rolling out in one pass are the same, and nothing reads the future."""

import math

import pytest
import torch
from episodes import Noise, Scripted, random_noise
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensordict.nn import TensorDictSequential
from torch.testing import assert_close
from torchrl.envs.utils import check_env_specs

from tokenv.agents.boundary_predictors import HNet, Nawrot
from tokenv.agents.exact_count import ExactCount
from tokenv.agents.fixed import Random, Uniform
from tokenv.agents.heuristic import Entropy, Whitespace
from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.data.corpus import TensorSource
from tokenv.env.rollout import observe, rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

WIDTH = 16
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def make_lm(window=8, pooling="select"):
    sizes = {"width": WIDTH, "heads": 2, "down_layers": 1, "mid_layers": 2, "up_layers": 1}
    return UNet(UNetConfig(**sizes, window=window, pooling=pooling)).double()


def make_learned(window=8, spread=3.0):
    """Build a policy with weights so large that earlier boundaries matter."""
    agent = Learned(WIDTH, window=window, scale=1.0).double()
    with torch.no_grad():
        agent.projection.weight.normal_(std=spread / WIDTH)
    return agent


def make_entropy(mode, theta):
    """Build a fitted agent, which draws boundaries at some positions only."""
    agent = Entropy(mode=mode).eval()
    agent.theta.fill_(theta)
    return agent


def make_env(symbol_BN, lm=None, **options):
    return TokenizationEnv(
        make_lm() if lm is None else lm, TensorSource(symbol_BN), len(symbol_BN), **options
    )


def random_symbols(batch, length):
    return torch.randint(256, (batch, length))


def step_through(env, agent, noise_BT):
    return env.rollout(noise_BT.shape[1], TensorDictSequential(Noise(noise_BT), agent))


def assert_same(actual, expected):
    """Assert equal keys, shapes, dtypes, and values up to rounding."""
    assert actual.batch_size == expected.batch_size
    assert set(actual.keys(True, True)) == set(expected.keys(True, True))
    for key in expected.keys(True, True):
        assert_close(
            actual[key], expected[key], **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}"
        )


def agents(length):
    return {
        "learned, w = 0": make_learned(0),
        "learned, w = 1": make_learned(1),
        "learned, w = 8": make_learned(8),
        "learned, evaluating": make_learned(8).eval(),
        "uniform": Uniform(0.3, length),
        "random": Random(0.4, length),
        "uniform, rounding at random": Uniform(0.37, length, rounding="random"),
        "random, rounding at random": Random(0.37, length, rounding="random"),
        "scripted": Scripted(),
        "exact_count, w = 2": ExactCount(WIDTH, length, rate=0.4, window=2, scale=1.0).double(),
        "nawrot": Nawrot(WIDTH).double(),
        "hnet": HNet(WIDTH).double(),
        "whitespace": Whitespace(),
        "entropy, global": make_entropy("global", 5.07),
        # Not 0: a symbol that repeats has the entropy of the one before, to rounding.
        "entropy, monotonic": make_entropy("monotonic", 1e-6),
    }


POOLING = {"nawrot": "mean", "hnet": "smooth"}


# --- stepping is rolling out ---


@pytest.mark.parametrize("name", agents(8))
@settings(max_examples=8)
@given(st.data())
def test_stepping_equals_one_pass(name, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    batch = data.draw(st.integers(1, 3))
    length = data.draw(st.integers(4, 24))
    window = data.draw(st.sampled_from([8, 9]))
    attended = data.draw(st.sampled_from([1, 4, 32]))
    probability = st.floats(1e-6, 1 - 1e-6)
    row = st.lists(probability, min_size=length - 1, max_size=length - 1)
    noise_BT = torch.tensor(
        data.draw(st.lists(row, min_size=batch, max_size=batch)), dtype=torch.float64
    )
    lm = make_lm(attended, POOLING.get(name, "select"))
    agent = agents(length)[name]
    optional = [keys.EARLY_ENTROPY] if keys.EARLY_ENTROPY in agent.in_keys else []
    env = make_env(random_symbols(batch, length), lm, window=window, optional_keys=optional)
    stepped = step_through(env, agent, noise_BT)
    one_pass = env.one_pass(agent, noise=noise_BT)
    assert stepped.batch_size == (batch, length - 1)
    assert_same(stepped.detach(), one_pass.detach())


@pytest.mark.parametrize("window", [0, 1, 3])
def test_the_observation_holds_w_actions(window):
    env = make_env(random_symbols(2, 10), window=window)
    agent = make_learned(window)
    noise_BT = random_noise(2, 9)
    stepped = step_through(env, agent, noise_BT)
    assert stepped[keys.LAST_ACTIONS].shape == (2, 9, window)
    assert_same(stepped.detach(), env.one_pass(agent, noise=noise_BT).detach())


def test_the_early_entropy_costs_nothing_unless_an_agent_reads_it(monkeypatch):
    lm = make_lm()
    symbol_BN = random_symbols(2, 10)
    noise_BT = random_noise(2, 9)
    env = make_env(symbol_BN, lm, optional_keys=["early_entropy"])
    check_env_specs(env)
    env.source.position = 0
    stepped = step_through(env, Scripted(), noise_BT)
    env.source.position = 0
    assert_same(stepped.detach(), env.one_pass(Scripted(), noise=noise_BT).detach())
    prob = lm.codec.logits(lm.early_exit(lm.encode(symbol_BN))).softmax(-1)
    entropy_BN = -(prob * prob.log()).sum(-1)
    assert_close(stepped[keys.EARLY_ENTROPY], entropy_BN[:, :-1], **TOLERANCE)
    assert_close(stepped["next", keys.EARLY_ENTROPY], entropy_BN[:, 1:], **TOLERANCE)
    monkeypatch.setattr(lm, "early_entropy", lambda x: pytest.fail("nobody asked"))
    plain = make_env(symbol_BN, lm)
    assert keys.EARLY_ENTROPY not in step_through(plain, Scripted(), noise_BT)
    plain.source.position = 0
    assert keys.EARLY_ENTROPY not in plain.one_pass(Scripted(), noise=noise_BT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_shapes_and_dtypes_agree_in_other_precisions(dtype):
    lm = UNet(
        UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=4),
        compute_dtype=None if dtype == torch.float32 else dtype,
    )
    env = make_env(random_symbols(2, 10), lm)
    check_env_specs(env)
    agent = Learned(WIDTH)
    noise_BT = torch.rand(2, 9)
    stepped = step_through(env, agent, noise_BT)
    one_pass = env.one_pass(agent, noise=noise_BT)
    assert all(
        x.dtype in (torch.float32, torch.int64, torch.bool)
        for x in one_pass.detach().values(True, True)
    )

    def layout(td):
        return {key: (td[key].shape, td[key].dtype) for key in td.keys(True, True)}

    assert layout(stepped) == layout(one_pass)


def test_the_reward_is_what_beats_the_early_exit():
    lm = make_lm()
    symbol_BN = random_symbols(2, 12)
    td = step_through(make_env(symbol_BN, lm), Scripted(), random_noise(2, 11))
    late = lm.codec.log_prob(lm(symbol_BN[:, :-1], td[keys.ACTION]), symbol_BN[:, 1:])
    early = lm.codec.log_prob(lm.early_exit(lm.encode(symbol_BN[:, :-1])), symbol_BN[:, 1:])
    assert_close(td[keys.LOG_LIKELIHOOD], late, **TOLERANCE)
    assert_close(td[keys.LOG_LIKELIHOOD_EARLY], early, **TOLERANCE)
    assert_close(td[keys.REWARD], (late - early)[..., None], **TOLERANCE)


def test_without_noise_a_generator_decides():
    env = make_env(random_symbols(2, 12))
    agent = Random(0.3, 12)
    env.set_seed(3)
    first = env.one_pass(agent)
    env.set_seed(3)
    assert_same(env.one_pass(agent), first)
    assert not torch.equal(env.one_pass(agent)[keys.NOISE], first[keys.NOISE])


# --- TorchRL's contract ---


@pytest.mark.parametrize(("batch", "length", "window"), [(1, 2, 8), (3, 9, 0), (2, 12, 3)])
def test_the_specs_hold(batch, length, window):
    env = make_env(random_symbols(batch, length), window=window)
    check_env_specs(env)
    td = env.rollout(100)
    assert td.batch_size == (batch, length - 1)
    assert td[keys.DONE][..., 0].int().sum(1).tolist() == [1] * batch
    assert td[keys.DONE][:, -1].all()


def test_rows_start_anew_alone():
    """Rows which are reset in the middle behave like new environments, without an effect on the others."""
    lm = make_lm()
    symbol_BN = random_symbols(6, 12)
    env = make_env(symbol_BN[:3], lm)
    # the first three, then one more for each row that starts anew
    env.source = TensorSource(symbol_BN)
    action_BT = torch.randint(2, (3, 11))

    def advance(td, i):
        stepped = env.step(td.set(keys.ACTION, action_BT[:, i]))
        return stepped, stepped["next"].exclude("reward")

    td = env.reset()
    log = []
    for i in range(4):
        stepped, td = advance(td, i)
        log.append(stepped)
    mask_B = torch.tensor([False, True, False])
    kept = td.clone()
    td = env.reset(td.set("_reset", mask_B[:, None]))
    for key in kept.sorted_keys:
        assert torch.equal(td[key][~mask_B], kept[key][~mask_B]), key
    assert env.origin == ["sequence 0", "sequence 3", "sequence 2"]
    for i in range(4, 11):
        stepped, td = advance(td, i)
        log.append(stepped)

    def alone(row, actions):
        """Return a new environment of one row."""
        one = make_env(symbol_BN[row : row + 1], lm)
        td = one.reset()
        steps = []
        for action in actions:
            steps.append(one.step(td.set(keys.ACTION, action[None])))
            td = steps[-1]["next"].exclude("reward")
        return torch.cat(steps)

    for row, sequence, first in ((0, 0, 0), (2, 2, 0), (1, 3, 4)):
        actual = torch.stack([stepped[row] for stepped in log[first:]])
        assert_same(actual, alone(sequence, action_BT[row, first:]))


def test_what_reset_returned_stays_as_it_was():
    env = TokenizationEnv(make_lm(), TensorSource(random_symbols(4, 5)), 2)
    first = env.reset()
    kept = first.clone()
    env.rollout(100)
    assert_same(first, kept)


def test_the_first_symbol_closes_a_token_whatever_the_action_says():
    env = make_env(random_symbols(2, 6))
    following = []
    for first in (0, 1):
        env.source.position = 0
        td = env.reset()
        assert not td[keys.DECISION_MASK].any()
        following.append(env.step(td.set(keys.ACTION, torch.full((2,), first)))["next"])
    assert_same(following[0], following[1])
    assert following[0][keys.LAST_ACTIONS][:, 0].tolist() == [1, 1]
    assert following[0][keys.TOKEN_COUNT].tolist() == [1, 1]


def test_nobody_decides_at_either_end():
    td = make_env(random_symbols(2, 6)).one_pass(Random(0.5, 6))
    assert td[keys.DECISION_MASK].tolist() == [[False, True, True, True, True]] * 2
    assert td["next", keys.DECISION_MASK].tolist() == [[True, True, True, True, False]] * 2


def test_origins_follow_the_rows():
    env = TokenizationEnv(make_lm(), TensorSource(random_symbols(5, 4)), 2)
    env.reset()
    assert env.origin == ["sequence 0", "sequence 1"]
    env.one_pass(Random(0.5, 4))
    assert env.origin == ["sequence 2", "sequence 3"]


# --- K samples ---


@pytest.mark.parametrize("name", agents(8))
def test_samples_are_separate_rollouts_that_share_one_encoding(name, monkeypatch):
    lm = make_lm()
    symbol_BN = random_symbols(2, 14)
    noise = random_noise(3, 2, 13)
    agent = agents(14)[name]
    singles = [rollout(lm, agent, symbol_BN, noise=noise_BT) for noise_BT in noise]
    calls = []
    encode = lm.encode

    def counting(symbol_BN):
        calls.append(symbol_BN.shape)
        return encode(symbol_BN)

    monkeypatch.setattr(lm, "encode", counting)
    together = rollout(lm, agent, symbol_BN, noise=noise)
    assert calls == [(2, 14)]
    assert together.batch_size == (3, 2, 13)
    assert_same(together.detach(), torch.stack([td.detach() for td in singles]))


def test_num_samples_draws_fresh_noise_for_each():
    env = make_env(random_symbols(2, 12))
    td = env.one_pass(make_learned(), Sampling(num_samples=3))
    assert td.batch_size == (3, 2, 11)
    assert td[keys.NOISE].unique().numel() == 3 * 2 * 11
    assert env.one_pass(make_learned(), Sampling(num_samples=1)).batch_size == (1, 2, 11)


# --- causality ---


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 15), st.booleans())
def test_a_symbol_moves_nothing_before_it(seed, t, stepping):
    torch.manual_seed(seed)
    lm = make_lm()
    agent = make_learned()
    noise_BT = random_noise(1, 15)
    symbol_BN = random_symbols(1, 16)
    changed_BN = symbol_BN.clone()
    changed_BN[0, t] = (changed_BN[0, t] + 1) % 256

    def roll(x_BN):
        if stepping:
            return step_through(make_env(x_BN, lm), agent, noise_BT).detach()
        return rollout(lm, agent, x_BN, noise=noise_BT).detach()

    before = roll(symbol_BN)
    after = roll(changed_BN)
    # Decisions at t and later may read x_t; the prediction of x_t stands at step t - 1.
    for key in (
        keys.BOUNDARY_LOGITS,
        keys.ACTION,
        keys.ACTION_LOG_PROB,
        keys.ENCODING,
        keys.LAST_ACTIONS,
    ):
        assert_close(after[key][:, :t], before[key][:, :t], **TOLERANCE)
    for key in (keys.REWARD, keys.LOG_LIKELIHOOD, keys.LOG_LIKELIHOOD_EARLY):
        assert_close(after[key][:, : max(t - 1, 0)], before[key][:, : max(t - 1, 0)], **TOLERANCE)
    if t < 15:
        assert (after[keys.BOUNDARY_LOGITS][:, t] != before[keys.BOUNDARY_LOGITS][:, t]).all()
    if t > 0:
        assert (after[keys.REWARD][:, t - 1] != before[keys.REWARD][:, t - 1]).all()


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 14), st.booleans())
def test_an_action_moves_no_prediction_of_what_is_read_already(seed, t, stepping):
    torch.manual_seed(seed)
    lm = make_lm()
    symbol_BN = random_symbols(1, 16)
    noise_BT = random_noise(1, 15)
    # In a run of one and the same symbol all tokens are alike, and one more changes nothing.
    assume(len(symbol_BN[0, : t + 1].unique()) > 1)
    flipped_BT = noise_BT.clone()
    flipped_BT[0, t] = 1 - flipped_BT[0, t]

    def roll(noise_BT):
        if stepping:
            return step_through(make_env(symbol_BN, lm), Scripted(), noise_BT)
        return rollout(lm, Scripted(), symbol_BN, noise=noise_BT).detach()

    before = roll(noise_BT)
    after = roll(flipped_BT)
    assert (after[keys.ACTION] != before[keys.ACTION]).nonzero().tolist() == [[0, t]]
    # Step i predicts x_{i+1}: steps before t predict x_1, ..., x_t.
    for key in (keys.REWARD, keys.LOG_LIKELIHOOD):
        assert_close(after[key][:, :t], before[key][:, :t], **TOLERANCE)
        assert (after[key][:, t] != before[key][:, t]).all()
    for key in (keys.ENCODING, keys.LOG_LIKELIHOOD_EARLY):
        assert_close(after[key], before[key], **TOLERANCE)


# --- padding ---


@pytest.mark.parametrize("name", agents(8))
@pytest.mark.parametrize("samples", [(), (2,)])
def test_padding_changes_nothing(name, samples):
    lm = make_lm()
    symbol_BN = random_symbols(3, 14)
    noise = random_noise(*samples, 3, 13)
    length_B = torch.tensor([14, 2, 9])
    agent = agents(14)[name]
    td = rollout(lm, agent, symbol_BN, noise=noise, length_B=length_B).detach()
    for b, length in enumerate(length_B.tolist()):
        alone = rollout(
            lm, agent, symbol_BN[b : b + 1, :length], noise=noise[..., b : b + 1, : length - 1]
        ).detach()
        assert_same(td[..., b : b + 1, : length - 1], alone)
        padding = td[..., b, length - 1 :]
        for key in (
            keys.DECISION_MASK,
            ("next", keys.DECISION_MASK),
            keys.ACTION,
            keys.ACTION_LOG_PROB,
            keys.ENTROPY,
            keys.LOG_LIKELIHOOD,
            keys.LOG_LIKELIHOOD_EARLY,
            keys.REWARD,
        ):
            if name in ("uniform", "random") and key in (
                keys.ACTION_LOG_PROB,
                keys.ENTROPY,
                keys.ACTION,
            ):
                continue  # their places are those of a full sequence
            assert not padding[key].any(), key
        assert padding[keys.DONE].all()


@pytest.mark.parametrize("agent", [Uniform(0.4, 14), Random(0.4, 14)])
def test_fixed_agents_draw_nothing_in_the_padding(agent):
    td = rollout(
        make_lm(),
        agent,
        random_symbols(1, 14),
        noise=random_noise(1, 13),
        length_B=torch.tensor([6]),
    )
    assert not td[keys.ACTION][:, 5:].any()
    assert not td[keys.ENTROPY][:, 5:].any()


# --- gradients ---


@pytest.mark.parametrize("samples", [None, 2])
def test_the_one_pass_rollout_carries_gradients(samples):
    lm = make_lm()
    agent = make_learned()
    td = rollout(lm, agent, random_symbols(2, 12), Sampling(num_samples=samples))

    def reached(scalar):
        parameters = dict(lm.named_parameters(prefix="lm")) | dict(
            agent.named_parameters(prefix="agent")
        )
        grads = torch.autograd.grad(
            scalar, list(parameters.values()), retain_graph=True, allow_unused=True
        )
        return {
            ".".join(name.split(".")[:2])
            for name, grad in zip(parameters, grads, strict=True)
            if grad is not None and grad.any()
        }

    late = {"lm.codec", "lm.down", "lm.mid", "lm.up", "lm.norm", "lm.head"}
    assert reached(td[keys.LOG_LIKELIHOOD].sum()) == late
    assert reached(td[keys.LOG_LIKELIHOOD_EARLY].sum()) == {
        "lm.codec",
        "lm.down",
        "lm.early_norm",
        "lm.early_head",
    }
    for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY_LOGITS, keys.ENTROPY):
        assert reached(td[key].sum()) == {"lm.codec", "lm.down", "agent.projection"}
    carrying = {
        keys.ACTION_LOG_PROB,
        keys.BOUNDARY_LOGITS,
        keys.ENTROPY,
        keys.LOG_LIKELIHOOD,
        keys.LOG_LIKELIHOOD_EARLY,
    }
    assert {key for key in td.keys(True, True) if td[key].requires_grad} == carrying


def test_with_reward_only_the_model_learns_from_the_first_sample_as_if_it_were_alone():
    lm = make_lm()
    agent = make_learned()
    symbol_BN = random_symbols(2, 9)
    noise = random_noise(3, 2, 8)
    td = rollout(lm, agent, symbol_BN, Sampling(reward_only=True), noise=noise)
    alone = rollout(lm, agent, symbol_BN, noise=noise[0])
    loss = (td[keys.LOG_LIKELIHOOD] * td[keys.SAMPLE_WEIGHT]).sum()
    inputs = [*lm.head.parameters(), *lm.mid.parameters(), *lm.down.parameters()]
    actual = torch.autograd.grad(loss, inputs)
    expected = torch.autograd.grad(alone[keys.LOG_LIKELIHOOD].sum(), inputs)
    for one, other in zip(actual, expected, strict=True):
        assert one.any()
        assert_close(one, other)


def test_stepping_carries_no_gradient_into_the_model():
    lm = make_lm()
    td = make_env(random_symbols(2, 6), lm).rollout(10, make_learned())
    grads = torch.autograd.grad(
        td[keys.ACTION_LOG_PROB].sum(), list(lm.parameters()), allow_unused=True
    )
    assert all(grad is None for grad in grads)
    assert not td[keys.REWARD].requires_grad


# --- errors ---


def test_errors_say_what_was_expected():
    lm = make_lm()
    source = TensorSource(random_symbols(1, 4))
    with pytest.raises(ValueError, match="batch_size = 0: expected a whole number of at least 1"):
        TokenizationEnv(lm, source, 0)
    with pytest.raises(ValueError, match="window = -1: expected 0 or more"):
        TokenizationEnv(lm, source, 1, window=-1)
    with pytest.raises(
        ValueError, match=r"hold 2 earlier actions and the policy reads 3: .* window=3 or more"
    ):
        TokenizationEnv(lm, source, 1, window=2).rollout(5, make_learned(3))


def test_the_reward_is_in_nats():
    """A uniform model has a loss of log 256 per byte."""
    lm = make_lm()
    with torch.no_grad():
        for head in (lm.head, lm.early_head):
            head.weight.zero_()
    td = make_env(random_symbols(2, 6), lm).rollout(100)
    assert_close(td[keys.LOG_LIKELIHOOD], torch.full((2, 5), -math.log(256), dtype=torch.float64))
    assert not td[keys.REWARD].any()


@pytest.mark.parametrize(
    "agent", [make_learned(window=2), make_entropy("global", 0.5)], ids=["learned", "entropy"]
)
def test_what_an_agent_decides_by_needs_no_decision(agent):
    lm = make_lm()
    symbol_BN = random_symbols(2, 12)
    noise_BT = torch.rand(2, 11)
    observation = observe(lm, agent, symbol_BN)
    td = rollout(lm, agent, symbol_BN, noise=noise_BT)
    assert observation.batch_size == td.batch_size
    for key in set(agent.in_keys) - {keys.LAST_ACTIONS}:
        assert_close(observation[key], td[key], rtol=0, atol=0)
    assert agent.draw(observation, noise_BT)[keys.ACTION].equal(td[keys.ACTION])
