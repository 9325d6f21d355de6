"""What an update logs of its policy gradient, against the definitions."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import Enumeration
from tensordict import TensorDictBase
from tiny import settings
from torch import Tensor

from tokenv.config.components import build_components
from tokenv.config.files import resolve
from tokenv.core import keys
from tokenv.env.rescoring import rescore_head
from tokenv.env.rollout import rollout
from tokenv.estimators import Chain, recipes
from tokenv.estimators.credit import Discount, EarlyExit
from tokenv.training.losses import compute_losses, rollout_metrics
from tokenv.training.trainer import train

CREDITED: dict[str, Chain] = {
    "reinforce": recipes.reinforce(gamma=0.9),
    "leave_one_out": recipes.leave_one_out(gamma=0.9),
    "moving_average": recipes.moving_average(5, gamma=0.9),
    "rloo": recipes.rloo(gamma=0.9, num_samples=3),
    "critic of samples": recipes.text_critic(8, gamma=0.9, num_samples=3),
    "reinpatch": recipes.reinpatch(gamma=0.9, num_samples=3, centred_only=True),
}


def drawn(samples: int | None = None) -> tuple[Enumeration, TensorDictBase]:
    torch.manual_seed(1)
    world = Enumeration(2)
    noise = torch.rand(*([samples] if samples else []), 2, 4, dtype=torch.float64)
    return world, rollout(world.lm, world.agent, world.symbol_BN, noise=noise)


def explained(target: Tensor, residual: Tensor, mask: Tensor) -> float:
    return 1 - float(residual[mask].var(correction=0) / target[mask].var(correction=0))


@pytest.mark.parametrize("name", CREDITED)
def test_the_explained_variance_is_that_of_the_credits(name: str) -> None:
    estimator = CREDITED[name].double()
    _, td = drawn(estimator.sampling.num_samples)
    for _ in range(3):  # a running mean has learned something
        estimator(td := td.detach())
    credit = Discount(0.9)(EarlyExit()(td.clone()))[keys.ADVANTAGE]
    logged = td[keys.DIAGNOSTICS, "explained_variance"]
    assert logged.unique().item() == pytest.approx(
        explained(credit, td[keys.ADVANTAGE], td[keys.DECISION_MASK])
    )


def test_a_lambda_returns_critic_is_the_other_texts_mean() -> None:
    _, td = drawn()
    recipes.lambda_return(gamma=0.9)(td)
    credit = Discount(0.9)(EarlyExit()(td.clone()))[keys.ADVANTAGE]
    logged = td[keys.DIAGNOSTICS, "explained_variance"].unique().item()
    assert logged == pytest.approx(
        explained(credit, credit - credit.flip(0), td[keys.DECISION_MASK])
    )


def test_a_critic_which_is_right_explains_all() -> None:
    _, td = drawn()
    critic = recipes.text_critic(8, warmup=0).double()
    critic(td)
    assert td[keys.DIAGNOSTICS, "explained_variance_critic"].unique().item() == 0  # it begins at 0
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    shares = []
    for _ in range(200):
        critic(td := td.detach())
        td[keys.LOSS_CRITIC].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        shares.append(td[keys.DIAGNOSTICS, "explained_variance_critic"].unique().item())
    assert 0.9 < shares[-1] <= 1
    constant = td.detach().set(keys.REWARD, torch.ones_like(td[keys.REWARD]))
    assert (
        critic.stages[1](constant)[keys.DIAGNOSTICS, "explained_variance_critic"].unique().item()
        == 0
    )


def test_the_divergence_is_right_in_expectation_and_clipped_decisions_are_counted() -> None:
    world = Enumeration(2)
    estimator = recipes.ppo(epsilon=0.05)
    td, prob_K = world.rollout()
    td = estimator(td).detach()
    # nothing has moved yet
    assert keys.DIAGNOSTICS not in td or "kl_approx" not in td[keys.DIAGNOSTICS]
    with torch.no_grad():
        for parameter in world.policy:
            parameter.add_(0.3 * torch.randn_like(parameter))
        again = estimator.replay(rescore_head(world.agent, td))
    log_ratio = again[keys.ACTION_LOG_PROB] - td[keys.ACTION_LOG_PROB]
    divergence = -(prob_K * log_ratio.sum((1, 2))).sum()  # sum_a pi_old(a) log(pi_old(a) / pi(a))
    estimate = again[keys.DIAGNOSTICS, "kl_approx"]
    assert (estimate >= 0).all()
    assert (prob_K * estimate.sum((1, 2))).sum().item() == pytest.approx(divergence.item())
    clipped = again[keys.DIAGNOSTICS, "clip_fraction"]
    assert torch.equal(clipped, ((log_ratio.exp() - 1).abs() > 0.05).double())
    assert 0 < clipped.mean() < 1


def test_boundary_enrichment_is_the_loss_after_boundaries_minus_that_elsewhere() -> None:
    torch.manual_seed(0)
    components = build_components(resolve([], settings(estimator={"name": "rloo"})))
    td = rollout(components.lm, components.agent, torch.randint(9, (2, 32)), components.sampling)
    losses = compute_losses(td, components)
    metrics = rollout_metrics(td, losses, components)
    for name, key in (
        ("boundary_enrichment", keys.LOG_LIKELIHOOD),
        ("boundary_enrichment_early", keys.LOG_LIKELIHOOD_EARLY),
    ):
        after = []
        elsewhere = []
        for a, bits, decided in zip(
            td[keys.ACTION].flatten(),
            (-td[key] / math.log(2)).flatten(),
            td[keys.DECISION_MASK].flatten(),
            strict=True,
        ):
            if decided:
                (after if a else elsewhere).append(bits.item())
        assert metrics[name].item() == pytest.approx(
            sum(after) / len(after) - sum(elsewhere) / len(elsewhere), abs=1e-6
        )
    td[keys.ACTION] = td[keys.ACTION] * (td[keys.POSITION] == 0)
    assert rollout_metrics(td, losses, components)["boundary_enrichment"].item() == 0


def test_advantages_are_zero_where_samples_agree() -> None:
    torch.manual_seed(0)
    components = build_components(resolve([], settings(estimator={"name": "rloo"})))
    noise = torch.rand(2, 4, 31)
    noise[1, :2] = noise[0, :2]  # of two texts both samples are the same
    td = rollout(
        components.lm, components.agent, torch.randint(9, (4, 32)), components.sampling, noise=noise
    )
    fraction = rollout_metrics(td, compute_losses(td, components), components)[
        "advantage_zero_fraction"
    ].item()
    advantage = td[keys.ADVANTAGE][td[keys.DECISION_MASK]]
    assert fraction == pytest.approx((advantage.abs() < 1e-5).double().mean().item())
    assert 0.5 <= fraction < 1


@pytest.mark.parametrize(
    ("estimator", "further"),
    [
        ({"name": "ppo"}, True),
        ({"name": "rloo", "head_epochs": 2}, True),
        ({"name": "rloo"}, False),
    ],
)
def test_every_update_logs_them(tmp_path: Path, estimator: dict[str, Any], further: bool) -> None:
    logged: dict[str, list[float]] = {}
    config = resolve([], settings(estimator=estimator, train={"learning_rate": 0.05}))
    train(config, tmp_path, lambda name, value, _: logged.setdefault(name, []).append(value))
    updates = len(logged["train/bits_per_byte"])
    always = (
        "boundary_enrichment",
        "boundary_enrichment_early",
        "advantage_zero_fraction",
        "explained_variance",
    )
    assert {len(logged[f"train/{name}"]) for name in always} == {updates}
    for name in ("clip_fraction", "kl_approx"):
        assert len(logged.get(f"train/{name}", [])) == updates * further
    if further:
        assert max(logged["train/kl_approx"]) > 0
        assert all(0 <= value <= 1 for value in logged["train/clip_fraction"])
