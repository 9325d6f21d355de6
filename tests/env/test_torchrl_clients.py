"""TorchRL's own collectors, losses, transforms and value functions work on the environment and the agent."""

import pytest
import torch
import torch.nn.functional as F
from tensordict.nn import TensorDictModule
from torch import nn
from torch.testing import assert_close
from torchrl.envs import Compose, RewardSum, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type

from tokenv.agents.learned import Learned
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.data.corpus import TensorSource
from tokenv.env.stepping import TokenizationEnv
from tokenv.estimators.credit import discounted_sum

# TorchRL warns of its own classes when its collectors are imported, hence the imports inside of functions.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:Creating .* which inherits from WeightUpdaterBase:DeprecationWarning"
    ),
]

WIDTH, BATCH, LENGTH = 16, 3, 12
STEPS = LENGTH - 1


@pytest.fixture
def env(tiny_lm):
    return TokenizationEnv(tiny_lm, TensorSource(torch.randint(256, (7, LENGTH))), BATCH)


@pytest.fixture
def agent():
    agent = Learned(WIDTH, scale=1.0).double()
    nn.init.normal_(agent.projection.weight, std=0.2)
    return agent


@pytest.fixture
def critic():
    return TensorDictModule(
        nn.Linear(WIDTH, 1).double(), in_keys=[keys.ENCODING], out_keys=["state_value"]
    )


def collect(env, agent, batches=1):
    from torchrl.collectors import Collector

    frames = BATCH * STEPS
    collector = Collector(
        env,
        agent,
        frames_per_batch=frames,
        total_frames=batches * frames,
        auto_register_policy_transforms=False,
        exploration_type=ExplorationType.RANDOM,
    )
    try:
        return [td.clone() for td in collector]
    finally:
        collector.shutdown()


def credited(td, gamma=0.9):
    """Return centred discounted rewards; TorchRL's losses require a trailing dimension of one."""
    gain_BT = discounted_sum(td[keys.REWARD][..., 0], gamma)
    return td.set(keys.ADVANTAGE, (gain_BT - gain_BT.mean(0)).unsqueeze(-1))


def moved(agent):
    """Return the agent after some training."""
    with torch.no_grad():
        agent.projection.weight += 0.3 * torch.randn_like(agent.projection.weight)
    return agent


def scores_by_hand(agent, td):
    """Equations 21 to 23 on stored observations and actions: log pi(a), [B, T]."""
    earlier = torch.cat(
        [torch.ones_like(td[keys.LAST_ACTIONS][..., :1]), td[keys.LAST_ACTIONS]], -1
    ).double()
    raw = (td[keys.ENCODING] @ agent.projection.weight.T * earlier).sum(
        -1
    ) / agent.scale + agent.bias
    logits = agent.softcap * torch.tanh(raw / agent.softcap)
    score = -F.binary_cross_entropy_with_logits(logits, td[keys.ACTION].double(), reduction="none")
    return torch.where(td[keys.DECISION_MASK], score, 0.0)


def test_a_collector_collects(env, agent):
    first, second = collect(env, agent, batches=2)
    for td in (first, second):
        assert td.batch_size == (BATCH, STEPS)
        assert td[keys.DONE][:, -1].all()
        assert td[keys.POSITION].tolist() == [list(range(STEPS))] * BATCH
        assert_close(td[keys.ACTION_LOG_PROB], scores_by_hand(agent, td).detach())
        assert td[keys.ACTION][:, 1:].unique().tolist() == [0, 1]
    assert not torch.equal(first[keys.SYMBOL], second[keys.SYMBOL])


def test_collected_data_is_what_one_pass_gives(env, agent):
    (td,) = collect(env, agent)
    action_BT = td[keys.ACTION]
    symbol_BN = torch.cat([td[keys.SYMBOL], td["next", keys.SYMBOL][:, -1:]], 1)
    late = env.lm.codec.log_prob(env.lm(symbol_BN[:, :-1], action_BT), symbol_BN[:, 1:])
    assert_close(td[keys.LOG_LIKELIHOOD], late.detach())


def test_exploration_type_decides_between_draw_and_mode(env, agent):
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        td = env.rollout(100, agent)
    decided = td[keys.DECISION_MASK]
    assert torch.equal(td[keys.ACTION][decided], (td[keys.BOUNDARY_LOGITS][decided] > 0).long())


def test_a2c_scores_stored_actions(env, agent, critic):
    from torchrl.objectives import A2CLoss

    (td,) = collect(env, agent)
    credited(td)["value_target"] = torch.randn(BATCH, STEPS, 1).double()
    loss = A2CLoss(
        moved(agent), critic, entropy_coeff=0.01, critic_coeff=1.0, loss_critic_type="l2"
    )
    action_BT = td[keys.ACTION].clone()
    losses = loss(td)
    assert torch.equal(td[keys.ACTION], action_BT)
    score = scores_by_hand(agent, td)
    by_hand = -(score * td[keys.ADVANTAGE][..., 0]).mean()
    assert_close(losses["loss_objective"], by_hand)
    assert_close(losses["loss_entropy"], -0.01 * agent.get_dist(td).entropy().mean())
    assert_close(
        losses["loss_critic"],
        (critic.module(td[keys.ENCODING]) - td["value_target"]).square().mean(),
    )
    assert_one_update_is_by_hand(loss, losses["loss_objective"], by_hand, agent)


@pytest.mark.parametrize("with_critic", [False, True])
def test_ppo_scores_stored_actions(env, agent, critic, with_critic):
    from torchrl.objectives import ClipPPOLoss

    (td,) = collect(env, agent)
    credited(td)["value_target"] = torch.randn(BATCH, STEPS, 1).double()
    loss = ClipPPOLoss(
        moved(agent),
        critic if with_critic else None,
        clip_epsilon=0.2,
        entropy_coeff=0.01,
        critic_coeff=1.0 if with_critic else None,
        loss_critic_type="l2",
    )
    losses = loss(td)
    ratio = (scores_by_hand(agent, td) - td[keys.ACTION_LOG_PROB]).exp()
    advantage = td[keys.ADVANTAGE][..., 0]
    by_hand = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    assert (ratio < 0.8).any()
    assert (ratio > 1.2).any()
    assert_close(losses["loss_objective"], by_hand)
    assert_close(losses["loss_entropy"], -0.01 * agent.get_dist(td).entropy().mean())
    if with_critic:
        assert_close(
            losses["loss_critic"],
            (critic.module(td[keys.ENCODING]) - td["value_target"]).square().mean(),
        )
    assert_one_update_is_by_hand(loss, losses["loss_objective"], by_hand, agent)


def assert_one_update_is_by_hand(loss, objective, by_hand, agent):
    weight = agent.projection.weight
    (expected,) = torch.autograd.grad(by_hand, weight)
    before = weight.detach().clone()
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.1)
    objective.backward()
    optimizer.step()
    assert expected.any()
    assert_close(weight.detach(), before - 0.1 * expected)


def test_a2c_estimates_advantages_itself(env, agent, critic):
    from torchrl.objectives import A2CLoss, ValueEstimators

    (td,) = collect(env, agent)
    loss = A2CLoss(agent, critic)
    loss.make_value_estimator(ValueEstimators.GAE, gamma=0.9, lmbda=0.8)
    losses = loss(td)
    value = critic.module(td[keys.ENCODING])
    following = critic.module(td["next", keys.ENCODING])
    surprise = td[keys.REWARD] + 0.9 * following * ~td[keys.DONE] - value
    advantage = discounted_sum(surprise[..., 0], 0.9 * 0.8).detach()
    assert_close(losses["loss_objective"], -(scores_by_hand(agent, td) * advantage).mean())


def test_transforms_sum_rewards_and_count_steps(env, agent):
    env = TransformedEnv(env, Compose(RewardSum(), StepCounter()))
    check_env_specs(env)
    td = env.rollout(100, agent)
    assert td.batch_size == (BATCH, STEPS)
    assert_close(td["next", "episode_reward"], td[keys.REWARD].cumsum(1))
    assert td["next", "step_count"][..., 0].tolist() == [list(range(1, STEPS + 1))] * BATCH


# TorchRL cuts the powers of smaller ones short
@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99, 1.0])
def test_reward2go_is_discounted_sum(env, agent, gamma):
    from torchrl.objectives.value.functional import reward2go

    td = env.one_pass(agent)
    theirs = reward2go(td[keys.REWARD], td[keys.DONE], gamma)
    assert_close(theirs[..., 0], discounted_sum(td[keys.REWARD][..., 0], gamma))


def test_the_distribution_takes_stored_data_of_any_shape(env, agent):
    td = env.one_pass(agent, Sampling(num_samples=2)).detach()
    flat = td.reshape(-1)
    assert_close(
        agent.get_dist(td).log_prob(td[keys.ACTION]), td[keys.ACTION_LOG_PROB], check_dtype=False
    )
    scores = agent.get_dist(flat).log_prob(flat[keys.ACTION])
    assert_close(scores.view(td.shape), scores_by_hand(agent, td), check_dtype=False)
