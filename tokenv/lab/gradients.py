"""Single gradients of an estimator, the true gradient by enumeration, and running statistics of gradients.

With draws g_1, ..., g_n of an estimator and r_1, ..., r_m of an unbiased reference (or the true gradient, m = 1), bias,
variance and direction are functions of the Gram matrices. Products of *different* draws estimate |E g|^2 and E g . E r
without the bias that a draw's own noise would bring; errors are delete-one jackknife errors (Efron & Stein 1981).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from tokenv.config.components import Components
from tokenv.core import keys
from tokenv.core.contracts import Sampling
from tokenv.core.expectations import all_boundaries, forcing_noise, policy_objective
from tokenv.env.rollout import ONE_SAMPLE, rollout
from tokenv.estimators.branching import BitFlip

COMPONENTS = ("logits", "policy", "encoder")
MAX_COORDINATES = 65_536
MAX_ENUMERABLE = 14
MAX_DISTANCES = 128


@dataclass
class GradientProblem:
    """The same parameters and the same text, for all estimators.

    The objective is ``1/decisions sum_{b,t} E_a[log p(x_{t+1} | x_<=t, a_<=t)]``; gradients are those of its negative.
    They have three components: with respect to a shift of each position's logit [B * T], to the policy's parameters,
    and, through the logits, to the encoder's (at most 65,536 random coordinates of these).

    Args:
        components: language model and agent.
        symbol_BN: text.
        seed: seed of the coordinates.
    """

    components: Components
    symbol_BN: Tensor
    seed: int = 0
    policy: list[nn.Parameter] = field(init=False)
    encoder: list[nn.Parameter] = field(init=False)
    coordinates: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        lm = self.components.lm
        self.policy = list(self.components.agent.parameters())
        self.encoder = [*lm.codec.parameters(), *lm.down.parameters()]
        size = sum(p.numel() for p in self.encoder)
        if size > MAX_COORDINATES:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed))
            self.coordinates = order[:MAX_COORDINATES].sort().values.to(self.symbol_BN.device)

    @property
    def device(self) -> torch.device:
        """Device of parameters and text."""
        return self.symbol_BN.device

    @property
    def rate(self) -> Tensor | None:
        """Target rates of an agent which is conditioned on one: quantiles of its range [B], the same in all draws."""
        rates = self.components.agent.rates
        rows = len(self.symbol_BN)
        if rates is None:
            return None
        return rates.at((torch.arange(rows, device=self.device) + 0.5) / rows)

    def roll_out(self, sampling: Sampling = ONE_SAMPLE, **options: Any) -> TensorDictBase:
        """Return a rollout of the text; the options are those of ``tokenv.env.rollout.rollout``."""
        lm = self.components.lm
        agent = self.components.agent
        return rollout(lm, agent, self.symbol_BN, sampling, rate=self.rate, **options)

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator of noise on the device."""
        return torch.Generator(self.device).manual_seed(seed)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Compute no gradients while entered in the layers above the boundaries, where no estimator needs them."""
        below = set(self.encoder)
        above = nn.ParameterList(x for x in self.components.lm.parameters() if x not in below)
        above.requires_grad_(False)
        try:
            yield
        finally:
            above.requires_grad_(True)

    def split(self, logits: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        """Return all components, flat float32 vectors, of a gradient with respect to the logits [.., B, T]."""
        grads = torch.autograd.grad(
            logits, [*self.policy, *self.encoder], gradient, materialize_grads=True
        )
        flat = [g.flatten().float() for g in grads]
        policy = torch.cat(flat[: len(self.policy)])
        encoder = torch.cat(flat[len(self.policy) :])
        summed = gradient.reshape(-1, *gradient.shape[-2:]).sum(0).flatten().float()
        if self.coordinates is not None:
            encoder = encoder[self.coordinates]
        return {"logits": summed, "policy": policy, "encoder": encoder}


def draw_gradient(
    problem: GradientProblem, estimator: Any, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return one gradient of each component.

    Args:
        problem: parameters and text; inside ``frozen()`` it costs less.
        estimator: chain of transforms.
        generator: generator of the noise.
    """
    td = problem.roll_out(estimator.sampling, generator=generator)
    logits = td[keys.BOUNDARY_LOGITS]
    loss = policy_objective(estimator(td))
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return problem.split(logits, gradient)


def true_gradient(problem: GradientProblem, symbols: int = 8192) -> dict[str, Tensor]:
    """Return the gradient itself, by enumerating all boundaries of sequences of at most 14 symbols.

    Args:
        problem: parameters and text.
        symbols: largest number of symbols in one pass, which bounds the memory.
    """
    batch, length = problem.symbol_BN.shape[:2]
    assert length <= MAX_ENUMERABLE
    action_C1T = all_boundaries(length).to(problem.device)
    totals: dict[str, Tensor] = {}
    for action_K1T in action_C1T.split(max(1, symbols // (batch * length))):
        noise = forcing_noise(action_K1T, torch.float32).expand(-1, batch, -1)
        td = problem.roll_out(noise=noise)
        log_prob = td[keys.ACTION_LOG_PROB].sum(-1)
        log_likelihood = td[keys.LOG_LIKELIHOOD].detach().sum(-1)
        decisions = td[keys.DECISION_MASK][0].sum()
        loss = -(log_prob.exp() * log_likelihood).sum() / decisions
        logits = td[keys.BOUNDARY_LOGITS]
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        for name, value in problem.split(logits, gradient).items():
            totals[name] = totals.get(name, 0) + value
    return totals


@dataclass(frozen=True)
class Credit:
    """Effects of one decision, forced both ways, on the reward j symbols ahead (j = 0 is the first it can affect).

    Attributes:
        mean: E[R_{i+j+1}(a_i = 1) - R_{i+j+1}(a_i = 0)] in nats.
        mean_error: standard error of ``mean``.
        rms: root of the mean squared effect, nats.
        noise: standard deviation of R_{i+j+1} itself around its mean, nats, which a single reward adds to a credit's
            variance if nothing is subtracted.
        pairs: number of decisions with a reward j symbols ahead.
    """

    mean: list[float]
    mean_error: list[float]
    rms: list[float]
    noise: list[float]
    pairs: list[int]


@torch.no_grad()
def credit_by_distance(problem: GradientProblem, draws: int, generator: torch.Generator) -> Credit:
    """Force one random decision of every sequence both ways, and compare the rewards which follow.

    Later decisions are drawn from the policy, with the same random numbers.

    Args:
        problem: parameters and text.
        draws: number of rollouts.
        generator: generator of positions and noise.
    """
    distances = min(MAX_DISTANCES, problem.symbol_BN.shape[1] - 2)
    pairs = Sampling(num_samples=2, couple=BitFlip().couple)
    effects = []
    singles = []
    missing = []
    for _ in range(draws):
        td = problem.roll_out(pairs, generator=generator)
        reward = td[keys.REWARD].squeeze(-1).double().cpu()
        noise = td[keys.NOISE].cpu()
        forced = ((noise[0] == 0) & (noise[1] == 1)).long().argmax(-1)
        index = forced.unsqueeze(-1) + torch.arange(distances)
        last = reward.shape[-1] - 1
        with_boundary, without = (each.gather(-1, index.clamp(max=last)) for each in reward)
        effects.append(with_boundary - without)
        singles.append(without)
        missing.append(index > last)
    mask = torch.cat(missing).numpy()
    effect = np.ma.masked_array(torch.cat(effects).numpy(), mask)
    single = np.ma.masked_array(torch.cat(singles).numpy(), mask)
    pairs_J = effect.count(0)
    return Credit(
        mean=effect.mean(0).filled(0.0).tolist(),
        mean_error=(effect.std(0).filled(0.0) / np.sqrt(pairs_J.clip(1))).tolist(),
        rms=np.sqrt((effect**2).mean(0).filled(0.0)).tolist(),
        noise=single.std(0).filled(0.0).tolist(),
        pairs=pairs_J.tolist(),
    )


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class GradientStatistics:
    """Statistics of an estimator's gradient, from its draws.

    Attributes:
        variance: trace of the covariance of one draw.
        noise: variance over the squared norm of the mean: 1 / SNR^2.
        snr: norm of the mean over the root of the variance.
        bias: relative bias ``|E g - true| / |true|``.
        turn: bias of direction alone: ``1 - cos(E g, true)``.
        cosine: mean cosine of single draws with the true gradient.
        scale: length of the mean along the true gradient, relative to it; 1 for an unbiased estimator.
    """

    variance: Estimate
    noise: Estimate
    snr: Estimate
    bias: Estimate
    turn: Estimate
    cosine: Estimate
    scale: Estimate


def _signed_root(x: Tensor) -> Tensor:
    """Return the root of an estimate of a square, negative where noise has made the estimate negative."""
    return x.sign() * x.abs().sqrt()


def _mean_of_different(gram: Tensor) -> Tensor:
    """Return the mean product of different draws, an unbiased |E g|^2: []; of a single one, which is exact, its own."""
    count = len(gram)
    if count == 1:
        return gram.squeeze()
    return (gram.sum() - gram.diagonal().sum()) / (count * (count - 1))


def _figures(gram: Tensor, cross: Tensor, reference: Tensor) -> Tensor:
    """Return the figures of ``GradientStatistics``; infinite or NaN where noise hides what they are relative to: [7].

    Args:
        gram: products of the draws, [n, n].
        cross: products of the draws with those of the reference, [n, m].
        reference: products of the reference's draws, [m, m].
    """
    size_n = gram.diagonal()
    mean2 = _mean_of_different(gram)
    true2 = _mean_of_different(reference)
    along = cross.mean()
    single = (cross.mean(1) / size_n.sqrt().clamp(min=1e-300)).mean()
    variance = size_n.mean() - mean2
    norm = _signed_root(true2)
    length = _signed_root(mean2)
    known = norm > 0
    has_signal = length > 0
    return torch.stack(
        [
            variance,
            torch.where(has_signal, variance / mean2, math.inf),
            torch.where(variance > 0, length / variance.sqrt(), math.inf),
            torch.where(known, _signed_root(mean2 + true2 - 2 * along) / norm, math.nan),
            torch.where(known & has_signal, 1 - along / (length * norm), math.nan),
            torch.where(known, single / norm, math.nan),
            torch.where(known, along / true2, math.nan),
        ]
    )


def _squared_errors(delete_one: Sequence[Tensor]) -> Tensor:
    """Return (n - 1) / n times the sum of squared deviations of n delete-one values; NaN if one is not finite."""
    value = torch.stack(list(delete_one))
    return (len(value) - 1) / len(value) * (value - value.mean(0)).square().sum(0)


def gradient_statistics(draws: Tensor, reference: Tensor) -> GradientStatistics:
    """Return bias, variance and direction of an estimator.

    Args:
        draws: gradients, [n, d], n >= 3.
        reference: gradients of an unbiased estimator [m, d], m >= 3, or the true one, [1, d].

    Returns:
        Values with jackknife standard errors, which include the reference's own.
    """
    assert len(draws) >= 3
    assert len(reference) != 2
    draws = draws.double()
    reference = reference.double()
    gram = draws @ draws.T
    cross = draws @ reference.T
    of_reference = reference @ reference.T
    figures = _figures(gram, cross, of_reference)
    others = ~torch.eye(len(draws), dtype=torch.bool, device=draws.device)
    squared = _squared_errors(
        [_figures(gram[kept][:, kept], cross[kept], of_reference) for kept in others]
    )
    if len(reference) > 1:
        others = ~torch.eye(len(reference), dtype=torch.bool, device=draws.device)
        squared += _squared_errors(
            [_figures(gram, cross[:, kept], of_reference[kept][:, kept]) for kept in others]
        )
    estimates = zip(figures.tolist(), squared.sqrt().tolist(), strict=True)
    return GradientStatistics(*(Estimate(*estimate) for estimate in estimates))
