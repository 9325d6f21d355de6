"""One loop trains with every estimator; further steps on a rollout score its actions again."""

from dataclasses import replace

import pytest
import torch
from enumeration import EXACT, Enumeration, flat_gradient

from tokenv.agents.boundary_predictors import HNet, Nawrot
from tokenv.agents.learned import Learned
from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.rates import RateRange
from tokenv.data.corpus import TensorSource
from tokenv.env.rescoring import rescore, rescore_head
from tokenv.env.rollout import rollout
from tokenv.env.stepping import TokenizationEnv
from tokenv.estimators import recipes
from tokenv.estimators.base import chain
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.estimators.statistics import masked_mean
from tokenv.estimators.straight_through import StraightThrough
from tokenv.estimators.surrogates import ClippedSurrogate, ScoreFunction
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

LIKELIHOOD = {"straight", "gumbel", "reinmax", "gumbel_rao", "path"}


@pytest.mark.parametrize("rates", [None, RateRange(0.1, 0.6)])
@pytest.mark.parametrize("name", registry.ESTIMATORS)
def test_one_loop_serves_all(name, rates):
    estimator = registry.build(
        "estimator", {"name": name}, registry.ESTIMATORS, width=8, rate=0.3, seq_len=9
    )
    pooling = "smooth" if name == "path" else "select"
    lm = UNet(
        UNetConfig(
            width=8, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=4, pooling=pooling
        )
    )
    agent = HNet(8) if name == "path" else Learned(8, rate=0.3, window=0, rates=rates)
    env = TokenizationEnv(lm, TensorSource(torch.randint(256, (6, 9))), 3, window=0, rates=rates)
    env.set_seed(0)
    td = estimator(env.one_pass(agent, estimator.sampling))
    assert keys.LOSS_POLICY in estimator.out_keys
    assert estimator.trains_through == ("likelihood" if name in LIKELIHOOD else "loss")
    assert td["loss_policy"].shape == td.shape
    assert td["loss_policy"].requires_grad == (name not in LIKELIHOOD)
    loss = -td["next", "log_likelihood"].mean() + td["loss_policy"].mean()
    loss.backward()
    assert sum(p.grad.abs().sum() for p in agent.parameters()) > 0
    if name in LIKELIHOOD:
        assert not td["loss_policy"].any()


def test_a_surrogates_loss_stays_beside_relaxed_boundaries():
    both = chain(StraightThrough(), EarlyExit(), Discount(), ScoreFunction())
    assert both.trains_through == "loss"
    enumeration = Enumeration(0)
    assert both(rollout(enumeration.lm, enumeration.agent, enumeration.symbol_BN, both.sampling))[
        keys.LOSS_POLICY
    ].any()


@pytest.mark.parametrize(
    "recipe", [recipes.reinforce, recipes.leave_one_out, recipes.rloo, recipes.ppo]
)
def test_scaled_credits_are_of_one_size(recipe):
    enumeration = Enumeration(2)
    sampling = recipe().sampling
    td = rollout(
        enumeration.lm,
        enumeration.agent,
        enumeration.symbol_BN,
        sampling,
        noise=torch.rand(*[2] * sampling.samples, 4).double(),
    )
    for gamma in (0.5, 0.9):
        plain, scaled = (
            recipe(gamma, scaled=s)(td.clone())[keys.LOSS_POLICY] for s in (False, True)
        )
        torch.testing.assert_close(scaled, (1 - gamma) * plain)
    with pytest.raises(ValueError, match="scaled = True with gamma = 1 gives advantages of 0"):
        recipe(1.0, scaled=True)


def drawn(enumeration, samples=None):
    shape = (
        *(() if samples is None else (samples,)),
        *enumeration.symbol_BN.shape[:1],
        enumeration.symbol_BN.shape[1] - 1,
    )
    length_B = torch.tensor([5, 3])
    return rollout(
        enumeration.lm,
        enumeration.agent,
        enumeration.symbol_BN,
        noise=torch.rand(shape).double(),
        length_B=length_B,
    )


def moved(enumeration):
    """Return the policy after a step, with the model unchanged."""
    with torch.no_grad():
        enumeration.agent.projection.weight.add_(
            0.3 * torch.randn_like(enumeration.agent.projection.weight)
        )


@pytest.mark.parametrize("samples", [None, 1, 3])
def test_scored_again_a_rollout_stays_what_it_was(samples):
    enumeration = Enumeration(2)
    td = drawn(enumeration, samples)
    for again in (
        rescore(enumeration.lm, enumeration.agent, td.detach()),
        rescore_head(enumeration.agent, td.detach()),
    ):
        assert again.batch_size == td.batch_size
        assert torch.equal(again[keys.OLD_LOG_PROB], td[keys.ACTION_LOG_PROB])
        for key in (keys.ACTION_LOG_PROB, keys.BOUNDARY_LOGITS, keys.ENCODING, keys.ENTROPY):
            torch.testing.assert_close(again[key], td[key], **EXACT)


@pytest.mark.parametrize("samples", [None, 2])
def test_the_heads_score_is_the_whole_score_while_the_model_stays(samples):
    """In value and in the agent's gradient; and no gradient reaches the encoder."""
    enumeration = Enumeration(2)
    td = drawn(enumeration, samples).detach()
    moved(enumeration)
    whole = rescore(enumeration.lm, enumeration.agent, td)
    head = rescore_head(enumeration.agent, td)
    assert not torch.allclose(head[keys.ACTION_LOG_PROB], td[keys.ACTION_LOG_PROB])
    for key in (
        keys.ACTION_LOG_PROB,
        keys.OLD_LOG_PROB,
        keys.BOUNDARY_LOGITS,
        keys.BOUNDARY_PROB,
        keys.ENTROPY,
    ):
        torch.testing.assert_close(head[key], whole[key], **EXACT)
    slopes = [
        flat_gradient(again[keys.ACTION_LOG_PROB].sum(), enumeration.policy, retain_graph=True)
        for again in (whole, head)
    ]
    torch.testing.assert_close(*slopes, **EXACT)
    assert flat_gradient(whole[keys.ACTION_LOG_PROB].sum(), enumeration.encoder).any()
    head[keys.ACTION_LOG_PROB].sum().backward()
    assert all(p.grad is None for p in enumeration.lm.parameters())


def test_any_policys_head_is_scored_again():
    enumeration = Enumeration(0)
    agent = Nawrot(8).double()
    td = rollout(
        enumeration.lm, agent, enumeration.symbol_BN, noise=torch.rand(2, 2, 4).double()
    ).detach()
    torch.testing.assert_close(
        rescore_head(agent, td)[keys.ACTION_LOG_PROB], td[keys.ACTION_LOG_PROB], **EXACT
    )


def test_replaying_clipped_samples_keeps_their_credits():
    """K samples of which one trains the model: the loss is the clipped surrogate's, by its formula."""
    enumeration = Enumeration(2)
    estimator = recipes.rloo_clipped(epsilon=0.05, num_samples=3)
    assert estimator.sampling.reward_only
    assert (estimator.num_epochs, estimator.head_epochs) == (3, 0)
    noise = torch.rand(3, 2, 4).double()
    td = estimator(
        rollout(
            enumeration.lm,
            enumeration.agent,
            enumeration.symbol_BN,
            estimator.sampling,
            noise=noise,
        )
    ).detach()
    moved(enumeration)
    again = estimator.replay(rescore(enumeration.lm, enumeration.agent, td))
    assert torch.equal(again[keys.ADVANTAGE], td[keys.ADVANTAGE])
    assert torch.equal(again[keys.SAMPLE_WEIGHT], td[keys.SAMPLE_WEIGHT])
    ratio = (again[keys.ACTION_LOG_PROB] - td[keys.ACTION_LOG_PROB]).exp()
    advantage = td[keys.ADVANTAGE]
    expected = -torch.minimum(ratio * advantage, ratio.clamp(0.95, 1.05) * advantage)
    torch.testing.assert_close(again[keys.LOSS_POLICY], expected)
    assert ((ratio - 1).abs() > 0.05).any()
    assert flat_gradient(again[keys.LOSS_POLICY].sum(), enumeration.inputs).any()


def text_critic(head_epochs=0):
    torch.manual_seed(0)
    return recipes.text_critic(
        Enumeration(2).lm.config.width, hidden=4, warmup=0, head_epochs=head_epochs
    ).double()


@pytest.mark.parametrize(
    "recipe", [recipes.reinforce, recipes.leave_one_out, recipes.rloo, text_critic]
)
def test_steps_of_the_head_alone(recipe):
    """The first step is the recipe's own; further ones move the agent and nothing else, and lower the policy loss."""
    enumeration = Enumeration(2)
    estimator = recipe(head_epochs=4)
    assert (recipe().head_epochs, recipe().num_epochs, estimator.num_epochs) == (0, 1, 1)
    assert isinstance(recipe().stages[-1], ScoreFunction)
    noise = torch.rand(*[2] * recipe().sampling.samples, 4).double()

    def fresh():
        return rollout(
            enumeration.lm,
            enumeration.agent,
            enumeration.symbol_BN,
            estimator.sampling,
            noise=noise,
        )

    first = estimator(fresh())
    plain = recipe()(fresh())
    slopes = [
        flat_gradient(td[keys.LOSS_POLICY].sum(), enumeration.inputs) for td in (first, plain)
    ]
    torch.testing.assert_close(*slopes, **EXACT)

    kept = first.detach()
    every = [*enumeration.agent.parameters(), *enumeration.lm.parameters()]
    before = [p.detach().clone() for p in enumeration.lm.parameters()]
    optimizer = torch.optim.AdamW(every, lr=1e-2)
    losses = []
    for _ in range(estimator.head_epochs):
        td = estimator.replay(rescore_head(enumeration.agent, kept))
        losses.append(masked_mean(td[keys.LOSS_POLICY], td[keys.DECISION_MASK]))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, q) for p, q in zip(enumeration.lm.parameters(), before, strict=True))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("samples", [2, 3])
def test_without_an_early_exit_the_gradient_of_rloo_is_the_same(window, samples):
    """Samples of one text have one early exit, which cancels."""
    enumeration = Enumeration(window)
    slopes = []
    for early_exit in (True, False):
        estimator = recipes.rloo(gamma=0.9, num_samples=samples, early_exit=early_exit)
        assert estimator.reads_early_exit == early_exit
        td = rollout(
            enumeration.lm,
            enumeration.agent,
            enumeration.symbol_BN,
            replace(estimator.sampling, early_exit=early_exit),
            generator=torch.Generator().manual_seed(window),
        )
        assert (keys.LOG_LIKELIHOOD_EARLY in td) == early_exit
        slopes.append(flat_gradient(estimator(td)[keys.LOSS_POLICY].sum(), enumeration.inputs))
    assert slopes[0].abs().max() > 1e-6
    torch.testing.assert_close(*slopes, **EXACT)


def test_steps_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="head_epochs = -1"):
        ClippedSurrogate(head_epochs=-1)
