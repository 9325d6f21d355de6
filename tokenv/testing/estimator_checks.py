"""``check_estimator``: what every estimator must keep to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from tokenv.config import registry
from tokenv.core import keys
from tokenv.core.contracts import check_compatible
from tokenv.core.expectations import all_boundaries, forcing_noise, policy_objective
from tokenv.env.rollout import rollout
from tokenv.testing.fixture import BATCH, CONTEXT, LENGTH, Checker, TinyProblem, builder

GROUP, GROUPS = 100, 60  # draws of an estimator that draws numbers of its own
STANDARD_ERRORS = 5.0


def check_estimator(
    estimator: str | Callable[..., Any], *, windows: tuple[int, ...] = (0, 2), **options: Any
) -> list[str]:
    """Check an estimator against everything that training and measuring rely on.

    That it declares keys and writes a finite ``loss_policy`` of the rollout's shape; that the
    same noise gives the same loss; that padding never matters; that a gradient reaches the policy; that its state can
    be saved and loaded; that it refuses, or is right for, policies that read their past; and, if it declares itself
    unbiased, that its expected gradient is the true one. Where the estimator draws no numbers of its own this is
    enumerated over all boundaries of all its samples in float64, to 1e-9; else the mean of 6,000 draws must lie within
    5 standard errors of the truth.

    Args:
        estimator: a registered name, or a class or function that builds a ``Chain``.
        windows: windows w of the policies it is tried with.
        options: for the constructor; ``width``, ``rate`` and ``seq_len`` are given where it asks for them.

    Returns:
        What was not checked, and why; empty where everything was.

    Raises:
        AssertionError: names what is wrong, and what to do.
        ValueError: the name or an option is unknown.
    """
    failure = Checker("estimator", estimator)
    build = builder("estimator", estimator, registry.ESTIMATORS, options, CONTEXT)
    left_out = []
    for window in windows:
        world = TinyProblem.make(window)
        if build().requires_factorised_policy and window:
            _check_refusal(failure, build(), world)
            continue
        with failure.during(f"a rollout that it is applied to (policy with window {window}, {BATCH} sequences)"):
            _check_loss(failure, build, world)
            _check_determinism(failure, build, world)
            _check_padding(failure, build, world)
            _check_state(failure, build, world)
            if build().unbiased:
                _check_unbiased(failure, build, world)
            else:
                left_out.append(f"window {window}: the expected gradient, {_why_biased(estimator, options)}")
    return left_out


def _why_biased(estimator: str | Callable[..., Any], options: dict[str, Any]) -> str:
    """Why an estimator that declares itself biased was not held against the truth; discounting may be all."""
    found = registry.find("estimator", estimator, registry.ESTIMATORS) if isinstance(estimator, str) else estimator
    if "gamma" in inspect.signature(found).parameters and options.get("gamma") != 1.0:
        undiscounted = builder("estimator", estimator, registry.ESTIMATORS, options | {"gamma": 1.0}, CONTEXT)
        if undiscounted().unbiased:
            return "for discounting biases it: check it with gamma=1.0, too"
    return "for it declares itself biased (a part says unbiased = False)"


def _objective(td: TensorDictBase) -> Tensor:
    """Summed loss, averaged over samples; the model's own where boundaries are relaxed."""
    return policy_objective(td) * td[keys.DECISION_MASK].sum() / td.shape[:-2].numel()


def _check_refusal(failure: Checker, estimator: Any, world: TinyProblem) -> None:
    try:
        check_compatible(estimator, world.agent, world.lm.config.pooling)
    except ValueError:
        return
    failure.need(False, "declares itself independent, but a policy with a past was not refused")


def _check_loss(failure: Checker, build: Callable[[], Any], world: TinyProblem) -> None:
    estimator = build()
    td = world.rollout(estimator)
    shape = td.shape
    td = estimator(td)
    failure.need(
        keys.LOSS_POLICY in td,
        "writes no 'loss_policy' and relaxes no boundary, so nothing trains the policy: end the chain with a surrogate "
        'such as ScoreFunction(), or say trains_through = "likelihood" where the agent\'s own boundaries carry the '
        "gradient",
    )
    loss = td[keys.LOSS_POLICY]
    failure.need(loss.shape == shape, f"loss_policy has shape {tuple(loss.shape)}, the rollout {tuple(shape)}")
    failure.need(bool(loss.isfinite().all()), "loss_policy is not finite")
    # Boundaries of the agent's own carry a gradient only where the agent makes some, and this one makes none.
    if estimator.trains_through == "loss" or estimator.sampling.relax is not None:
        grads = torch.autograd.grad(_objective(td), list(world.agent.parameters()), allow_unused=True)
        size = sum(g.abs().sum().item() for g in grads if g is not None)
        failure.need(
            size > 0, "no gradient reaches the policy: use action_log_prob or boundary_logits with their graph"
        )


def _losses(estimator: Any, td: TensorDictBase) -> Tensor:
    td = estimator(td)
    return td[keys.LOSS_POLICY] - td[keys.LOG_LIKELIHOOD]


def _check_determinism(failure: Checker, build: Callable[[], Any], world: TinyProblem) -> None:
    first, second = (_losses(e, world.rollout(e)) for e in (build(), build()))
    failure.need(
        torch.equal(first, second),
        "the same noise gave two losses: draw numbers in a hook, from the generator it is given",
    )


def _check_padding(failure: Checker, build: Callable[[], Any], world: TinyProblem) -> None:
    length_B = torch.tensor([LENGTH, LENGTH - 2])
    padding_BN = torch.arange(LENGTH) >= length_B[:, None]
    found = []
    for change in (0, 1):
        symbol_BN = torch.where(padding_BN, (world.symbol_BN + change) % 256, world.symbol_BN)
        estimator = build()
        td = estimator(world.rollout(estimator, symbol_BN=symbol_BN, length_B=length_B))
        found.append(td)
    if build().trains_through == "likelihood":
        return
    losses = [td[keys.LOSS_POLICY] for td in found]
    outside = ~found[0][keys.DECISION_MASK]
    failure.need(
        torch.allclose(losses[0][~outside], losses[1][~outside], rtol=1e-9, atol=1e-12),
        "symbols in the padding move the loss: weigh sums and means by decision_mask",
    )
    grads = torch.autograd.grad(losses[0][outside].sum(), world.parameters, allow_unused=True, retain_graph=True)
    failure.need(
        all(g is None or not bool(g.any()) for g in grads),
        "loss_policy has a gradient where nobody decides: multiply it by decision_mask",
    )


def _check_state(failure: Checker, build: Callable[[], Any], world: TinyProblem) -> None:
    used, fresh = build(), build()
    used(world.rollout(used))
    fresh.load_state_dict(used.state_dict())
    first, second = (_losses(e, world.rollout(e, seed=1)) for e in (used, fresh))
    failure.need(torch.equal(first, second), "a state_dict does not bring its state back: register buffers")


def _check_unbiased(failure: Checker, build: Callable[[], Any], world: TinyProblem) -> None:
    enumerated = rollout(world.lm, world.agent, world.symbol_BN, noise=forcing_noise(all_boundaries(LENGTH, BATCH)))
    log_prob_C = enumerated[keys.ACTION_LOG_PROB].sum((1, 2))
    likelihood_C = enumerated[keys.LOG_LIKELIHOOD].detach().sum((1, 2))
    true = world.gradient(-(log_prob_C.exp() * likelihood_C).sum())
    estimator = build()
    sampling = estimator.sampling
    hooked = any(hook is not None for hook in (sampling.couple, sampling.propose, sampling.relaxations))
    samples = sampling.samples
    if not hooked and len(log_prob_C) ** samples <= 2**13:
        mean = _enumerate(build, world, enumerated, log_prob_C, samples)
        off = ((mean - true).norm() / true.norm()).item()
        failure.need(
            off < 1e-9, f"declares itself unbiased, but its expected gradient is off by {off:.1%} of the true one"
        )
        return
    draws = torch.stack([_mean_draw(estimator, world, seed) for seed in range(GROUPS)])
    error = draws.std(0) / GROUPS**0.5
    worst = ((draws.mean(0) - true).abs() / error.clamp(min=1e-12)).max().item()
    failure.need(
        worst < STANDARD_ERRORS,
        f"declares itself unbiased, but the mean of {GROUPS * GROUP} draws is {worst:.1f} standard errors off",
    )


def _enumerate(
    build: Callable[[], Any], world: TinyProblem, enumerated: TensorDictBase, log_prob_C: Tensor, samples: int
) -> Tensor:
    """Expected gradient over all combinations of K samples' boundaries."""
    combinations = torch.cartesian_prod(*[torch.arange(len(log_prob_C))] * samples).view(-1, samples)
    weight = log_prob_C.detach()[combinations].sum(-1).exp()
    estimator = build()
    td = enumerated[combinations] if estimator.sampling.num_samples is not None else enumerated[combinations[:, 0]]
    if list(estimator.buffers()):  # what it remembers must come from a rollout of its own, not from all at once
        losses = torch.stack([build()(one)[keys.LOSS_POLICY] for one in td.unbind(0)])
    else:
        losses = estimator(td)[keys.LOSS_POLICY]
    return world.gradient((weight * losses.flatten(1).sum(1)).sum() / samples)


def _mean_draw(estimator: Any, world: TinyProblem, seed: int) -> Tensor:
    """Mean gradient of ``GROUP`` draws, made as one large batch."""
    td = world.rollout(estimator, seed=seed, symbol_BN=world.symbol_BN.repeat(GROUP, 1))
    return world.gradient(_objective(estimator(td)) / GROUP)
