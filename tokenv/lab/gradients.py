"""Single gradients of an estimator, the true gradient by enumeration, and running statistics of gradients.

With draws g_1, ..., g_n of an estimator and r_1, ..., r_m of an unbiased reference (or the true gradient, m = 1), bias,
variance and direction are functions of the Gram matrices. Products of *different* draws estimate |E g|^2 and E g . E r
without the bias that a draw's own noise would bring; errors are delete-one jackknife errors (Efron & Stein 1981).
"""

import math
from collections.abc import Iterator
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


@torch.no_grad()
def credit_by_distance(
    problem: GradientProblem, draws: int, generator: torch.Generator
) -> dict[str, list[float]]:
    """Force one random decision of every sequence both ways, and compare the rewards which follow.

    Later decisions are drawn from the policy, with the same random numbers.

    Args:
        problem: parameters and text.
        draws: number of rollouts.
        generator: generator of positions and noise.

    Returns:
        For every distance j, in symbols, from the decision to the reward (0 is the first that it can affect): ``mean``,
        E[R_{i+j+1}(a_i = 1) - R_{i+j+1}(a_i = 0)] in nats, and its standard error ``mean_error``; ``rms``, root of the
        mean squared effect, in nats; ``noise``, standard deviation of R_{i+j+1} itself around its mean, in nats, which
        a single reward adds to a credit if nothing is subtracted; ``pairs``, number of decisions with such a reward.
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
    return {
        "mean": effect.mean(0).filled(0.0).tolist(),
        "mean_error": (effect.std(0).filled(0.0) / np.sqrt(pairs_J.clip(1))).tolist(),
        "rms": np.sqrt((effect**2).mean(0).filled(0.0)).tolist(),
        "noise": single.std(0).filled(0.0).tolist(),
        "pairs": pairs_J.tolist(),
    }


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    error: float


def _signed_root(x: Tensor) -> Tensor:
    """Return the root of an estimate of a square, negative where noise has made the estimate negative."""
    return x.sign() * x.abs().sqrt()


def _figures(
    size: Tensor, mean2: Tensor, true2: Tensor, along: Tensor, single: Tensor
) -> dict[str, Tensor]:
    """Return all figures; infinite or NaN where noise hides the value to which they are relative.

    Args:
        size: mean of |g_i|^2; the others have its shape.
        mean2: unbiased estimate of |E g|^2.
        true2: unbiased estimate of |true|^2.
        along: mean of E g . true.
        single: mean of g_i . mean r / |g_i|.
    """
    variance = size - mean2
    unknown = torch.full_like(variance, math.nan)
    norm = _signed_root(true2)
    length = _signed_root(mean2)
    known = norm > 0
    has_signal = length > 0
    return {
        "variance": variance,
        "noise": torch.where(has_signal, variance / mean2, math.inf),
        "snr": torch.where(variance > 0, length / variance.sqrt(), math.inf),
        "bias": torch.where(known, _signed_root(mean2 + true2 - 2 * along) / norm, unknown),
        "turn": torch.where(known & has_signal, 1 - along / (length * norm), unknown),
        "cosine": torch.where(known, single / norm, unknown),
        "scale": torch.where(known, along / true2, unknown),
    }


def _off_diagonal(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean product of different draws, and the same without each draw in turn: [] and [n]."""
    n = len(gram)
    diagonal = gram.diagonal()
    total = gram.sum() - diagonal.sum()
    without = total - 2 * (gram.sum(0) - diagonal)
    return total / (n * (n - 1)), without / ((n - 1) * (n - 2))


def _leave_out(x: Tensor) -> Tensor:
    """Return the mean without each entry in turn: [n] -> [n]."""
    return (x.sum() - x) / (len(x) - 1)


def _squared_errors(delete_one: dict[str, Tensor]) -> dict[str, float]:
    """Return (n - 1) / n times the sum of squared deviations of the delete-one values; NaN if one is not finite."""
    return {
        name: ((len(x) - 1) / len(x) * (x - x.mean()).square().sum()).item()
        for name, x in delete_one.items()
    }


def gradient_statistics(draws: Tensor, reference: Tensor) -> dict[str, Estimate]:
    """Return bias, variance and direction of an estimator.

    Args:
        draws: gradients, [n, d], n >= 3.
        reference: gradients of an unbiased estimator [m, d], m >= 3, or the true one, [1, d].

    Returns:
        Figures with jackknife standard errors, which include the reference's own: ``variance``, trace of the covariance
        of one draw; ``noise``, variance over the squared norm of the mean, 1 / SNR^2; ``snr``, norm of the mean over
        the root of the variance; ``bias``, ``|E g - true| / |true|``; ``turn``, bias of direction alone, ``1 - cos(E g,
        true)``; ``cosine``, mean cosine of single draws with the true gradient; ``scale``, length of the mean along the
        true gradient, relative to it, which is 1 for an unbiased estimator.
    """
    assert len(draws) >= 3
    assert len(reference) != 2
    draws = draws.double()
    reference = reference.double()
    gram = draws @ draws.T
    cross = draws @ reference.T
    size = gram.diagonal()
    direction = cross / size.sqrt().clamp(min=1e-300).unsqueeze(1)
    mean2, mean2_without = _off_diagonal(gram)
    if len(reference) > 1:
        true2, true2_without = _off_diagonal(reference @ reference.T)
    else:
        true2 = reference.square().sum()
        true2_without = None
    figures = _figures(size.mean(), mean2, true2, cross.mean(), direction.mean())
    along = _leave_out(cross.mean(1))
    single = _leave_out(direction.mean(1))
    squared = _squared_errors(
        _figures(_leave_out(size), mean2_without, true2.expand(len(size)), along, single)
    )
    if true2_without is not None:
        m = len(reference)
        along = _leave_out(cross.mean(0))
        single = _leave_out(direction.mean(0))
        of_reference = _figures(
            size.mean().expand(m), mean2.expand(m), true2_without, along, single
        )
        for name, value in _squared_errors(of_reference).items():
            squared[name] += value
    return {
        name: Estimate(value.item(), math.sqrt(squared[name])) for name, value in figures.items()
    }
