"""Single gradients of an estimator, and the true gradient by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.expectations import all_boundaries, forcing_noise, policy_objective
from tokenv.env.rollout import rollout

COMPONENTS = ("logits", "policy", "encoder")
MOST_COORDINATES = 65_536
ENUMERABLE = 14


@dataclass
class GradientProblem:
    """The same parameters and the same text, for all estimators.

    The objective is ``1/decisions sum_{b,t} E_a[log p(x_{t+1} | x_<=t, a_<=t)]``; gradients are those of its negative.
    They have three components: with respect to a shift of each position's logit [B * T], to the policy's parameters,
    and, through the logits, to the encoder's (at most 65,536 random coordinates of these).

    Args:
        parts: model and agent.
        symbol_BN: the text.
        seed: of the coordinates.
    """

    parts: Components
    symbol_BN: Tensor
    seed: int = 0
    policy: list[nn.Parameter] = field(init=False)
    encoder: list[nn.Parameter] = field(init=False)
    chosen: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        lm = self.parts.lm
        self.policy = list(self.parts.agent.parameters())
        self.encoder = [*lm.codec.parameters(), *lm.down.parameters()]
        size = sum(p.numel() for p in self.encoder)
        if size > MOST_COORDINATES:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))
            self.chosen = order[:MOST_COORDINATES].sort().values.to(self.symbol_BN.device)

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.symbol_BN.device

    @property
    def rate(self) -> Tensor | None:
        """What an agent is told that is told a rate: the same in all draws, [B] quantiles of its range."""
        rates, rows = self.parts.agent.rates, len(self.symbol_BN)
        return None if rates is None else rates.at((torch.arange(rows, device=self.device) + 0.5) / rows)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Without gradients in the layers above the boundaries, where no estimator needs them."""
        above = [p for p in self.parts.lm.parameters() if not any(p is q for q in self.encoder)]
        for parameter in above:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in above:
                parameter.requires_grad_(True)

    def split(self, logits: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """From a gradient with respect to the logits [.., B, T] to all components, as flat float32 vectors."""
        grads = torch.autograd.grad(logits, [*self.policy, *self.encoder], gradient, materialize_grads=True)
        flat = [g.flatten().float() for g in grads]
        policy, encoder = torch.cat(flat[: len(self.policy)]), torch.cat(flat[len(self.policy) :])
        summed = gradient.reshape(-1, *gradient.shape[-2:]).sum(0).flatten().float()
        return {
            "logits": summed,
            "policy": policy,
            "encoder": encoder if self.chosen is None else encoder[self.chosen],
        }


def draw_gradient(scene: GradientProblem, estimator: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """One gradient of each component.

    Args:
        scene: parameters and text; inside ``frozen()`` it costs less.
        estimator: a chain.
        generator: of the noise.
    """
    parts = scene.parts
    td = rollout(parts.lm, parts.agent, scene.symbol_BN, estimator.sampling, generator=generator, rate=scene.rate)
    logits = td[keys.BOUNDARY_LOGITS]
    td = estimator(td)
    (gradient,) = torch.autograd.grad(policy_objective(td), logits, retain_graph=True)
    return scene.split(logits, gradient)


def true_gradient(scene: GradientProblem, symbols: int = 8192) -> dict[str, Tensor]:
    """The gradient itself, by enumerating all boundaries of sequences of at most 14 symbols.

    Args:
        scene: parameters and text.
        symbols: at most so many in one pass, which bounds memory.
    """
    batch, length = scene.symbol_BN.shape[:2]
    assert length <= ENUMERABLE
    action_C1T = all_boundaries(length).to(scene.symbol_BN.device)
    totals: dict[str, Tensor] = {}
    for action_K1T in action_C1T.split(max(1, symbols // (batch * length))):
        noise = forcing_noise(action_K1T, torch.float32).expand(-1, batch, -1)
        td = rollout(scene.parts.lm, scene.parts.agent, scene.symbol_BN, noise=noise, rate=scene.rate)
        log_prob, late = td[keys.ACTION_LOG_PROB].sum(-1), td[keys.LOG_LIKELIHOOD].detach().sum(-1)
        decisions = td[keys.DECISION_MASK][0].sum()
        loss = -(log_prob.exp() * late).sum() / decisions
        logits = td[keys.BOUNDARY_LOGITS]
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        for name, value in scene.split(logits, gradient).items():
            totals[name] = totals.get(name, 0) + value
    return totals
