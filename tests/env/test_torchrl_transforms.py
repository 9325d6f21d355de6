"""TorchRL's transforms of the environment, with and without our agents; and its GymEnv for gymnasium's ids."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from episodes import Noise, random_noise, seeded_source
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tensordict.nn import TensorDictSequential
from torch.testing import assert_close
from torchrl.envs import (
    ActionMask,
    CatFrames,
    CatTensors,
    ClipTransform,
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    GymEnv,
    GymWrapper,
    ObservationNorm,
    RenameTransform,
    RewardSum,
    SignTransform,
    StepCounter,
    Transform,
    TransformedEnv,
    UnaryTransform,
    UnsqueezeTransform,
    VecNorm,
    VecNormV2,
)
from torchrl.envs.utils import check_env_specs

from tokenv.agents.boundary_predictors import HNet, Nawrot
from tokenv.agents.fixed import Uniform
from tokenv.agents.heuristic import Entropy, Whitespace
from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.rates import RateRange
from tokenv.data.corpus import TensorSource
from tokenv.env import BYTES_ID
from tokenv.env.gym import BytesEnv, BytesVectorEnv
from tokenv.env.stepping import TokenizationEnv
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

WIDTH, BATCH, LENGTH = 16, 3, 12
STEPS = LENGTH - 1


def make_env(pooling="select", **options):
    torch.manual_seed(0)
    sizes = {
        "width": WIDTH,
        "heads": 2,
        "down_layers": 1,
        "mid_layers": 1,
        "up_layers": 1,
        "window": 4,
    }
    lm = UNet(UNetConfig(**sizes, pooling=pooling)).double()
    return TokenizationEnv(lm, TensorSource(torch.randint(256, (BATCH, LENGTH))), BATCH, **options)


def entropy():
    agent = Entropy(mode="global").eval()
    agent.theta.fill_(5.07)
    return agent


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: Learned(WIDTH, scale=0.1).double(), {}),
        (lambda: Nawrot(WIDTH).double(), {"pooling": "mean"}),
        (lambda: HNet(WIDTH).double(), {"pooling": "smooth"}),
        (lambda: Uniform(0.3, LENGTH), {}),
        (Whitespace, {}),
        (entropy, {"optional_keys": ["early_entropy"]}),
    ],
    ids=["learned", "nawrot", "hnet", "uniform", "whitespace", "entropy"],
)
def test_agents_draw_in_a_transformed_environment_as_in_one_pass(make, options):
    agent = make()
    env = make_env(**options)
    noise_BT = random_noise(BATCH, STEPS)
    one_pass = env.one_pass(agent, noise=noise_BT).detach()
    transformed = TransformedEnv(env, Compose(RewardSum(), StepCounter()))
    check_env_specs(transformed)
    env.source.position = 0
    stepped = transformed.rollout(STEPS, TensorDictSequential(Noise(noise_BT), agent)).detach()
    for key in one_pass.keys(True, True):
        assert_close(stepped[key], one_pass[key], rtol=1e-9, atol=1e-9)
    assert_close(stepped["next", "episode_reward"], one_pass[keys.REWARD].cumsum(1))
    # In one pass there are no steps that a transform could change: it is the environment's own.
    env.source.position = 0
    again = transformed.one_pass(agent, noise=noise_BT).detach()
    assert_close(again[keys.REWARD], one_pass[keys.REWARD])


def test_torchrls_action_mask_masks_what_nobody_decides():
    def allowed(decision_mask_B):
        """At the first symbol, always a token's end, only 1: [B, 2]."""
        return torch.stack([decision_mask_B, torch.ones_like(decision_mask_B)], -1)

    masks = UnaryTransform([keys.DECISION_MASK], ["action_mask"], [], [], fn=allowed)
    env = TransformedEnv(make_env(), Compose(masks, ActionMask()))
    check_env_specs(env)
    drawn = []
    for _ in range(8):
        td = env.rollout(STEPS)
        assert td["action_mask"].shape == (BATCH, STEPS, 2)
        assert not td["action_mask"][:, 0, 0].any()
        assert td["action_mask"][:, 1:].all()
        assert td["action_mask"][..., 1].all()
        drawn.append(td[keys.ACTION])
    action = torch.cat(drawn)
    assert (action[:, 0] == 1).all()  # 24 rows at random
    assert action[:, 1:].unique().tolist() == [0, 1]


# --- transforms change what agents see, never what is rewarded ---


class Overwrite(Transform):
    """Fills the tensors of an observation themselves, not only their place in the TensorDict."""

    def _call(self, next_tensordict):
        for key in self.in_keys:
            next_tensordict[key].fill_(1)
        return next_tensordict

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)


NORMALIZED = [
    lambda key: ObservationNorm(0.0, 0.5, in_keys=[key], out_keys=[key]),
    lambda key: ObservationNorm(0.0, 0.0, in_keys=[key], out_keys=[key]),
    lambda key: CatFrames(2, -1, in_keys=[key]),
    lambda key: UnsqueezeTransform(-1, in_keys=[key]),
    lambda key: ClipTransform(in_keys=[key], low=-0.1, high=0.1),
    lambda key: SignTransform(in_keys=[key]),
    lambda key: VecNorm(in_keys=[key]),
    lambda key: VecNormV2(in_keys=[key]),
    lambda key: DoubleToFloat(in_keys=[key]),
    lambda key: CatTensors([key, keys.LAST_ACTIONS], "both"),
]
ANY = [
    lambda key: Overwrite(in_keys=[key]),
    lambda key: ExcludeTransform(key),
    lambda key: RenameTransform([key], ["other"]),
    lambda key: UnaryTransform([key], [key], [], [], fn=torch.zeros_like),
]
OBSERVED = [
    *(
        keys.SYMBOL,
        keys.ENCODING,
        keys.LAST_ACTIONS,
        keys.POSITION,
        keys.TOKEN_COUNT,
        keys.DECISION_MASK,
    ),
    *(keys.LOG_LIKELIHOOD[1], keys.LOG_LIKELIHOOD_EARLY[1], keys.EARLY_ENTROPY, keys.TARGET_RATE),
]


def rewards_of(env, action_BT):
    """Return two consecutive episodes, [B, 2 T]."""
    env.base_env.set_seed(0)
    env.base_env.source.position = 0
    return torch.cat([play(env, action_BT.T) for _ in range(2)], -1)


# TorchRL's
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
@settings(max_examples=20)
@given(
    transform=st.one_of(
        st.tuples(st.sampled_from(NORMALIZED), st.just(keys.ENCODING)),
        st.tuples(st.sampled_from(ANY), st.sampled_from(OBSERVED)),
    ),
    pooling=st.sampled_from(["select", "mean", "smooth"]),
    seed=st.integers(0, 100),
)
def test_no_transform_of_observations_changes_rewards(transform, pooling, seed):
    make, key = transform
    env = make_env(pooling, optional_keys=["early_entropy"], rates=RateRange(0.2, 0.4))
    action_BT = torch.randint(2, (BATCH, STEPS), generator=torch.Generator().manual_seed(seed))
    expected = rewards_of(TransformedEnv(env), action_BT)
    assert torch.equal(rewards_of(TransformedEnv(env, make(key)), action_BT), expected)


def test_target_rates_stay_whatever_a_transform_does_to_them():
    env = make_env(rates=RateRange(0.2, 0.4))
    changed = TransformedEnv(
        env, Compose(UnaryTransform([keys.TARGET_RATE], ["kept"], [], [], fn=torch.clone))
    )
    changed.append_transform(Overwrite(in_keys=[keys.TARGET_RATE]))
    td = changed.rollout(STEPS)
    assert torch.equal(td["kept"], td["kept"][:, :1].expand(BATCH, STEPS))
    assert (td["kept"] < 0.5).all()


# --- TorchRL's wrapper of gymnasium ---

torchrls_own = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"
)


seeded = partial(seeded_source, LENGTH)


def play(env, actions_T):
    """Rewards [.., T] of one sequence a row, by TorchRL's steps."""
    td = env.reset()
    rewards = []
    for action in actions_T:
        td = env.step(td.set("action", action))["next"]
        rewards.append(td["reward"].squeeze(-1).clone())
    assert td["done"].all()
    return torch.stack(rewards, -1)


@torchrls_own
def test_torchrl_makes_it_by_its_id():
    lm = make_env().lm
    env = GymEnv(f"tokenv.env:{BYTES_ID}", lm=lm, source=seeded, categorical_action_encoding=True)
    check_env_specs(env)
    env.set_seed(3)
    actions = torch.randint(2, (STEPS,))
    rewards = play(env, actions)
    plain = BytesEnv(lm, seeded)
    plain.reset(seed=3)  # which is what TorchRL's set_seed does
    plain.reset()
    assert_allclose(rewards, [plain.step(int(action))[1] for action in actions], rtol=1e-5)


@torchrls_own
@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_torchrl_wraps_many_rows(mode):
    lm = make_env().lm
    envs = gymnasium.make_vec(BYTES_ID, num_envs=BATCH, lm=lm, source=seeded, autoreset_mode=mode)
    env = GymWrapper(envs, categorical_action_encoding=True)
    assert env.batch_size == (BATCH,)
    env.set_seed(3)
    td = env.rollout(2 * STEPS + 1, break_when_any_done=False)
    assert td["next", "done"][..., 0].sum(1).tolist() == [2] * BATCH
    assert td["next", "done"][:, STEPS - 1].all()
    first = td["encoding"][:, [0, STEPS, 2 * STEPS]]
    assert not torch.equal(first[:, 0], first[:, 1])
    plain = BytesVectorEnv(BATCH, lm, seeded, autoreset_mode="SameStep")
    plain.reset(seed=3)
    plain.reset()
    expected = []
    for action in td["action"].unbind(1):
        _, reward, terminated, *_ = plain.step(np.asarray(action))
        expected.append(reward)
        if mode == "SameStep" and terminated.all():
            plain.reset()  # TorchRL resets once more where all rows have ended
    assert_allclose(td["next", "reward"][..., 0].T, expected, rtol=1e-5)


@pytest.mark.slow
@torchrls_own
def test_torchrl_makes_several_by_the_id():
    """Every environment has its own process and seed."""
    env = GymEnv(
        f"tokenv.env:{BYTES_ID}", num_envs=2, seq_len=LENGTH, categorical_action_encoding=True
    )
    try:
        assert env.batch_size == (2,)
        env.set_seed(3)
        actions = torch.randint(2, (STEPS, 2))
        rewards = play(env, actions)
    finally:
        env.close()
    assert not np.allclose(rewards[0], rewards[1])
