"""``check_estimator``: what every estimator must keep to, built in or yours.

::

    from tokenv.testing import check_estimator
    check_estimator("rloo", gamma=1.0)
    check_estimator(my_recipe)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv import keys
from tokenv.agents.learned import Learned
from tokenv.config import registry
from tokenv.contracts import check_fit
from tokenv.enumeration import all_boundaries, forcing
from tokenv.env.rollout import rollout
from tokenv.estimators.objective import policy_objective
from tokenv.lm.config import UNetConfig
from tokenv.lm.unet import UNet

BATCH, LENGTH, WIDTH, RATE = 2, 5, 8, 0.4
GROUP, GROUPS = 100, 60  # draws of an estimator that draws numbers of its own
STANDARD_ERRORS = 5.0


@dataclass
class _World:
    """A tiny model in float64 with a policy, and two sequences, one of them shorter."""

    lm: UNet
    agent: Learned
    symbol_BN: Tensor

    @classmethod
    def make(cls, window: int) -> _World:
        generator = torch.Generator().manual_seed(window)
        with torch.random.fork_rng():
            torch.manual_seed(window)
            lm = UNet(UNetConfig(width=WIDTH, heads=2, down_layers=1, mid_layers=1, up_layers=1, window=3)).double()
            agent = Learned(WIDTH, rate=RATE, window=window, scale=1.0).double()
            with torch.no_grad():
                agent.projection.weight.normal_(std=0.5)
                lm.early_head.weight.normal_()
        return cls(lm, agent, torch.randint(256, (BATCH, LENGTH), generator=generator))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of policy and encoder."""
        return [*self.agent.parameters(), *self.lm.codec.parameters(), *self.lm.down.parameters()]

    def rollout(self, estimator: Any, seed: int = 0, symbol_BN: Tensor | None = None, **options: Any) -> TensorDictBase:
        symbols = self.symbol_BN if symbol_BN is None else symbol_BN
        generator = torch.Generator().manual_seed(seed)
        sampling = estimator.sampling
        samples = () if sampling.num_samples is None else (sampling.num_samples,)
        noise = torch.rand(*samples, len(symbols), LENGTH - 1, generator=generator, dtype=torch.float64)
        return rollout(self.lm, self.agent, symbols, sampling, noise=noise, generator=generator, **options)

    def gradient(self, loss: Tensor) -> Tensor:
        return torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, self.parameters, retain_graph=True, materialize_grads=True)]
        ).detach()


def check_estimator(estimator: str | Callable[..., Any], *, windows: tuple[int, ...] = (0, 2), **options: Any) -> None:
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

    Raises:
        AssertionError: names what is wrong, and what to do.
        ValueError: the name or an option is unknown.
    """
    name = estimator if isinstance(estimator, str) else getattr(estimator, "__name__", str(estimator))

    def build() -> Any:
        context = {"width": WIDTH, "rate": RATE, "seq_len": LENGTH}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if isinstance(estimator, str):
                made = registry.build("estimator", {"name": estimator} | options, registry.ESTIMATORS, **context)
            else:
                made = registry.construct(f"estimator {name!r}", estimator, options, **context)
        return made.double()

    for window in windows:
        world = _World.make(window)
        if build().independent and window:
            _check_refusal(name, build(), world)
            continue
        _check_loss(name, build, world)
        _check_determinism(name, build, world)
        _check_padding(name, build, world)
        _check_state(name, build, world)
        if build().unbiased:
            _check_unbiased(name, build, world)


def _need(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise AssertionError(f"estimator {name}: {message}")


def _objective(td: TensorDictBase) -> Tensor:
    """Summed loss, averaged over samples; the model's own where boundaries are relaxed."""
    return policy_objective(td) * td[keys.DECISION_MASK].sum() / td.shape[:-2].numel()


def _check_refusal(name: str, estimator: Any, world: _World) -> None:
    try:
        check_fit(estimator, world.agent, world.lm.config.pooling)
    except ValueError:
        return
    raise AssertionError(f"estimator {name}: declares itself independent, but a policy with a past was not refused")


def _check_loss(name: str, build: Callable[[], Any], world: _World) -> None:
    estimator = build()
    td = world.rollout(estimator)
    shape = td.shape
    td = estimator(td)
    _need(
        keys.LOSS_POLICY in td,
        name,
        "writes no 'loss_policy' and relaxes no boundary, so nothing trains the policy: end the chain with a surrogate "
        'such as ScoreFunction(), or say trains_through = "likelihood" where the agent\'s own boundaries carry the '
        "gradient",
    )
    loss = td[keys.LOSS_POLICY]
    _need(loss.shape == shape, name, f"loss_policy has shape {tuple(loss.shape)}, the rollout {tuple(shape)}")
    _need(bool(loss.isfinite().all()), name, "loss_policy is not finite")
    # Boundaries of the agent's own carry a gradient only where the agent makes some, and this one makes none.
    if estimator.trains_through == "loss" or estimator.sampling.relax is not None:
        grads = torch.autograd.grad(_objective(td), list(world.agent.parameters()), allow_unused=True)
        size = sum(g.abs().sum().item() for g in grads if g is not None)
        _need(size > 0, name, "no gradient reaches the policy: use action_log_prob or boundary_logits with their graph")


def _losses(estimator: Any, td: TensorDictBase) -> Tensor:
    td = estimator(td)
    return td[keys.LOSS_POLICY] - td[keys.LOG_LIKELIHOOD]


def _check_determinism(name: str, build: Callable[[], Any], world: _World) -> None:
    first, second = (_losses(e, world.rollout(e)) for e in (build(), build()))
    _need(
        torch.equal(first, second),
        name,
        "the same noise gave two losses: draw numbers in a hook, from the generator it is given",
    )


def _check_padding(name: str, build: Callable[[], Any], world: _World) -> None:
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
    _need(
        torch.allclose(losses[0][~outside], losses[1][~outside], rtol=1e-9, atol=1e-12),
        name,
        "symbols in the padding move the loss: weigh sums and means by decision_mask",
    )
    grads = torch.autograd.grad(losses[0][outside].sum(), world.parameters, allow_unused=True, retain_graph=True)
    _need(
        all(g is None or not bool(g.any()) for g in grads),
        name,
        "loss_policy has a gradient where nobody decides: multiply it by decision_mask",
    )


def _check_state(name: str, build: Callable[[], Any], world: _World) -> None:
    used, fresh = build(), build()
    used(world.rollout(used))
    fresh.load_state_dict(used.state_dict())
    first, second = (_losses(e, world.rollout(e, seed=1)) for e in (used, fresh))
    _need(torch.equal(first, second), name, "a state_dict does not bring its state back: register buffers")


def _check_unbiased(name: str, build: Callable[[], Any], world: _World) -> None:
    enumerated = rollout(world.lm, world.agent, world.symbol_BN, noise=forcing(all_boundaries(LENGTH, BATCH)))
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
        _need(
            off < 1e-9, name, f"declares itself unbiased, but its expected gradient is off by {off:.1%} of the true one"
        )
        return
    draws = torch.stack([_mean_draw(estimator, world, seed) for seed in range(GROUPS)])
    error = draws.std(0) / GROUPS**0.5
    worst = ((draws.mean(0) - true).abs() / error.clamp(min=1e-12)).max().item()
    _need(
        worst < STANDARD_ERRORS,
        name,
        f"declares itself unbiased, but the mean of {GROUPS * GROUP} draws is {worst:.1f} standard errors off",
    )


def _enumerate(
    build: Callable[[], Any], world: _World, enumerated: TensorDictBase, log_prob_C: Tensor, samples: int
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


def _mean_draw(estimator: Any, world: _World, seed: int) -> Tensor:
    """Mean gradient of ``GROUP`` draws, made as one large batch."""
    td = world.rollout(estimator, seed=seed, symbol_BN=world.symbol_BN.repeat(GROUP, 1))
    return world.gradient(_objective(estimator(td)) / GROUP)
